"""How does a batch get workers on other devices and machines? As actors of Ray, each with a chain of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import ray
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "ray":
        raise
    raise ModuleNotFoundError("Ray is not installed: pip install 'hf-mlspec[ray]', or leave out --workers and --ray "
                              "for one worker in this process", name="ray") from error

from .group import worker_of
from .source import Numbered
from .worker import Settings, WorkerLost

_LOST = (RayActorError, OutOfMemoryError, WorkerCrashedError, NodeDiedError)  # no error of what a worker was asked
_STARTS = 3
_STORE = 128 << 20  # bytes of Ray's object store: lines and answers, no weights


class RayWorker:
    """A worker that is an actor; `ray_cluster` is entered.

    settings: whose device names the kind; an actor on a GPU has one of its own, or one for each of its processes.
    cores: of the machine, kept for it.
    """

    def __init__(self, settings: Settings, cores: int) -> None:
        self.settings, self.life = settings, 0
        self._options = {"num_cpus": cores, "num_gpus": settings.processes * settings.device.startswith("cuda"),
                         "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1000}  # fmt: skip
        self._actor = self._new()

    async def load(self) -> dict[str, Any]:
        return await self._called("load")

    async def answer(self, lines: list[Numbered]) -> tuple[list[dict[str, Any]], list[str]]:
        return await self._called("answer", lines)

    async def pid(self) -> int:
        """The process of the actor, on its machine."""
        return await self._called("pid")

    def replace(self) -> None:
        """Another actor in its place, wherever there is room."""
        self.close()
        self._actor, self.life = self._new(), self.life + 1

    def close(self) -> None:
        ray.kill(self._actor)

    def _new(self) -> Any:
        return _Actor.options(**self._options).remote(self.settings)

    async def _called(self, name: str, *words: Any) -> Any:
        actor = self._actor
        try:
            return await getattr(actor, name).remote(*words)
        except _LOST as error:
            raise WorkerLost(str(error).splitlines()[0]) from error


@ray.remote
class _Actor:
    """Ray runs calls of its methods side by side, in one event loop."""

    def __init__(self, settings: Settings) -> None:
        self.worker = worker_of(settings)

    async def load(self) -> dict[str, Any]:
        return self.worker.load()

    async def answer(self, lines: list[Numbered]) -> tuple[list[dict[str, Any]], list[str]]:
        return await self.worker.answer(lines)

    async def pid(self) -> int:
        return os.getpid()


@contextmanager
def ray_cluster(address: str | None, workers: int | None, shows: bool = False) -> Iterator[dict[str, float]]:
    """Connected to the cluster at `address`, None: one of this machine alone, for as long as it is entered; -> its
    resources. workers: room for so many on this machine. shows: what workers say, on standard error. ValueError where
    there is none at the address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        _start(max(os.cpu_count() or 1, workers or 1), shows)
    else:
        try:
            ray.init(address=address, log_to_driver=shows, logging_level="ERROR")
        except Exception as error:  # Ray raises several kinds, a bare one among them
            raise ValueError(f"--ray {address}: no cluster answers there ({_first_line(error)}); start one with ray "
                             "start --head, or leave --ray out for this machine alone") from error
    try:
        yield ray.cluster_resources()
    finally:
        ray.shutdown()


def _start(cores: int, shows: bool) -> None:
    """Ray on this machine; a busy one may take longer than the 30 s that Ray waits for itself."""
    for left in reversed(range(_STARTS)):
        try:
            ray.init(address="local", num_cpus=cores, include_dashboard=False, object_store_memory=_STORE,
                     log_to_driver=shows, logging_level="ERROR")
            return
        except Exception as error:
            ray.shutdown()
            if not left:
                raise ValueError(f"Ray does not start on this machine: {_first_line(error)}; leave out --workers for "
                                 "one worker in this process") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
