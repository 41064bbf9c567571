"""How do GPUs that share a model reach one another inside a step? Through boxes in each other's memory, else by NCCL.

Boxes add up in one kernel, which a graph can hold. Both add in the order of the processes: the same bits either way.
"""

from __future__ import annotations

import platform
from pathlib import Path

from torch import Tensor

from ...nn.state import logger
from ...ops import ranks as boxes
from ..ranks import Ranks


class BoxedRanks(Ranks):
    """Processes of one machine whose GPUs write into one another's memory. Calls of one decoder, one at a time."""

    def __init__(self, ranks: Ranks, own: boxes.Boxes):
        super().__init__(ranks.group, ranks.device)
        self._boxes = own

    def summed(self, own: Tensor) -> Tensor:
        """As `Ranks.summed`; only enqueues."""
        return self._boxes.sum(own.contiguous())

    def side_by_side(self, own: Tensor) -> Tensor:
        """As `Ranks.side_by_side`; only enqueues."""
        return self._boxes.gather(own.contiguous())


def exchange_of(ranks: Ranks) -> Ranks:
    """What a decoder on the device of `ranks` adds up with. Every process has to call it. One warning says why GPUs
    cannot reach one another's memory, where that is so."""
    if ranks.device.type != "cuda":
        return ranks
    own = handle = why = None
    try:
        own = boxes.new_boxes(ranks.device, ranks.index, ranks.count)
        handle = own.handle()
    except (RuntimeError, ValueError) as error:  # of want of memory, of too many processes
        why = str(error)
    told = ranks.told((_machine(), handle))
    if why is None:
        why = _open(own, ranks, told)
    problems = [problem for problem in ranks.told(why) if problem is not None]
    if not problems:
        return BoxedRanks(ranks, own)
    if ranks.index == 0:
        logger.warning(f"GPUs that share a model add up through NCCL, slower: {problems[0].splitlines()[0]}")
    return ranks


def _open(own: boxes.Boxes, ranks: Ranks, told: list[tuple[str, Tensor | None]]) -> str | None:
    """The boxes of all others; why they cannot be had, or None."""
    here = told[ranks.index][0]
    for index, (machine, handle) in enumerate(told):
        if machine != here:
            return f"rank {index} runs on another machine"
        if handle is None:
            return f"rank {index} has none"
        try:
            if index != ranks.index:
                own.open(index, handle)
        except RuntimeError as error:
            return str(error)
    return None


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
