"""Which part of an evaluation is this process's, where `accelerate launch` or torchrun began several, and who has all?

lm-eval hands every process each n-th document. Nothing else is shared: every process has a model and a journal of its
own, reads the journals of all, and rank 0 puts what was measured in the order of the documents.
"""

from __future__ import annotations

import datetime
import os
from glob import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = datetime.timedelta(days=30)  # documents differ; of a process that dies the launcher ends the others


class Ranks:
    """The processes of an evaluation, one where no launcher says otherwise. rank: this one's number; size: of all;
    local: its number on its machine, which is that of its GPU."""

    def __init__(self) -> None:
        self.rank, self.size, self.local = (int(os.environ.get(name, default)) for name, default in
                                            (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))  # fmt: skip
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=_PATIENCE)

    def device(self, named: str | None) -> str | None:
        """The device of this process, where one GPU is not named."""
        if self.size == 1 or named not in (None, "cuda") or not torch.cuda.is_available():
            return named
        return f"cuda:{self.local}"

    def journal(self, file: Path) -> Path:
        """Where this process writes what it finished."""
        return file if self.rank == 0 else file.with_name(f"{file.name}.rank{self.rank}")

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier()

    def gathered(self, found: Any, dst: int) -> list[Any] | None:
        """What all found as one, in a list, as one process would have it; None but on rank `dst`."""
        if self.size == 1:
            return [found]
        every: list[Any] | None = [None] * self.size if self.rank == dst else None
        dist.gather_object(found, every, dst=dst)
        return None if every is None else [in_turn(every)]


def journals(file: Path) -> list[Path]:
    """The journals of all processes of this run and of earlier ones, however many they were."""
    return [place for place in (file, *sorted(file.parent.glob(f"{escape(file.name)}.rank*"))) if place.is_file()]


def in_turn(every: list[Any]) -> Any:
    """Dicts of lists, one of each process, as one whose lists take from all in turn: the order of the documents."""
    if isinstance(every[0], dict):
        names = dict.fromkeys(name for one in every for name in one)
        return {name: in_turn([one.get(name, type(every[0].get(name, []))()) for one in every]) for name in names}
    longest = max(map(len, every))
    return [one[place] for place in range(longest) for one in every if place < len(one)]
