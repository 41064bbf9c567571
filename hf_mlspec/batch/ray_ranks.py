"""How does an evaluation get processes on other devices and machines? As actors of Ray, one for every rank."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Sequence
from typing import Any

from .ray_workers import ray, ray_cluster

_SAYS = "MLSPEC_DATA", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HOME", "MLSPEC_CACHE"  # told to others


def evaluated(words: Sequence[str], count: int | None, address: str | None) -> tuple[int, str]:
    """`mlspec eval WORDS` by so many processes; -> the exit status and what the first one printed.

    count: None: one for every GPU of the cluster. address: of a cluster, None: this machine alone. ValueError where
    the cluster has fewer GPUs or cores, and where one process fails: all others are ended, and what is in journals
    stays.
    """
    with ray_cluster(address, count, shows=True) as resources:
        gpus = int(resources.get("GPU", 0))
        count = _counted(count, gpus)
        cores = max(1, (os.cpu_count() or 1) // count) if address is None else 1
        if address is not None:
            _require_cores(count, int(resources.get("CPU", 0)))
        own = {"num_cpus": cores, "num_gpus": int(gpus > 0), "max_restarts": 0, "max_task_retries": 0}
        ranks = [_Rank.options(**own).remote(rank, count) for rank in range(count)]
        try:
            return _ended(ranks, list(words))
        finally:
            for rank in ranks:
                ray.kill(rank)


def _counted(count: int | None, gpus: int) -> int:
    """Processes; ValueError for more than there are GPUs, where there are any, and for none."""
    if count is None and not gpus:
        raise ValueError("Ray knows of no GPU: say with --workers how many processes are to share the documents")
    if count is not None and 0 < gpus < count:
        raise ValueError(f"--workers {count}: Ray knows of {gpus} GPUs, and a process has one of its own; give "
                         f"--workers {gpus}")
    return gpus if count is None else count


def _require_cores(asked: int, known: int) -> None:
    """ValueError where they are not there: Ray would wait for them, and the processes for one another."""
    if asked > known:
        raise ValueError(f"{asked} processes, each of which keeps a core: Ray knows of {known}; give fewer --workers, "
                         "or start nodes with ray start --num-cpus")


def _ended(ranks: list[Any], words: list[str]) -> tuple[int, str]:
    """What the first process says, when all have ended; the first error of any of them."""
    said = {name: os.environ[name] for name in _SAYS if name in os.environ}
    met = _got(ranks[0].meets.remote(), 0, len(ranks))
    running = {one.run.remote(words, os.getcwd(), said, met): rank for rank, one in enumerate(ranks)}
    first, left = (0, ""), list(running)
    while left:
        done, left = ray.wait(left, num_returns=1)
        status, printed = _got(done[0], running[done[0]], len(ranks))
        if running[done[0]] == 0 or status:
            first = status, printed
        if status:
            return first
    return first


def _got(call: Any, rank: int, size: int) -> Any:
    """What a process hands back; ValueError that names it where it failed."""
    try:
        return ray.get(call)
    except Exception as error:  # Ray's own kinds: of a process that died, and of what one raised
        raise ValueError(f"process {rank} of {size} failed: {_reason(error)}; what journals hold stays, give the same "
                         "command again") from error


def _reason(error: Exception) -> str:
    """What a process raised, without Ray's own traceback around it."""
    own = getattr(error, "cause", None) or error
    return f"{type(own).__name__}: {next(iter(str(own).strip().splitlines()), '')}"


@ray.remote
class _Rank:
    """A process of an evaluation: `evaluation.harness_ranks` reads from its environment which."""

    def __init__(self, rank: int, size: int) -> None:
        # Ray lets a process see one GPU, so that it is number 0 on its machine.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0")
        self._rank = rank

    def meets(self) -> tuple[str, int]:
        """Where this process can be met by the others."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, words: list[str], folder: str, said: dict[str, str], met: tuple[str, int]) -> tuple[int, str]:
        """The exit status and what was printed."""
        os.environ.update(said, MASTER_ADDR=met[0], MASTER_PORT=str(met[1]))
        os.chdir(folder)  # paths mean what they mean to whoever gave the command
        from ..evaluation.harness_command import run

        status, printed = 0, io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                run(words)
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(bool(end.code))
        return status, printed.getvalue()
