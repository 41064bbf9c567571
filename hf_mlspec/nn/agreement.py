"""How do processes that share a model end a call alike, also where one of them fails in the middle of a step?

A process that fails would leave the others waiting for its part of a sum. So it says in the store of the process group
that it failed; who waits looks there once a second, and says for which tensor it waits; who failed then sends a tensor
of that shape, which nobody reads. All are through with the same exchanges again, raise, and can make other calls.
Processes on CPUs alone: a GPU waits inside of a kernel.
"""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .shards import group_of, is_shared, local

_LOOKS = timedelta(seconds=1)
_PATIENCE = timedelta(seconds=20)  # for the others to say where they are
_exchanges: dict[str, Exchange] = {}  # by the name of their group


class RankFailed(RuntimeError):
    """Another process of those that share a model failed, or is gone; it ends the call on all of them."""


class Exchange:
    """Tensors of all processes of a group, in their order. All of them make the same exchanges.

    within: whether a call runs at whose end all agree. failures: that all were told of. gone: why nothing can be
    exchanged any more, or None.
    """

    def __init__(self, group: dist.ProcessGroup):
        """Every process has to call it."""
        self.group, self.within, self.gone = group, False, None
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        self._number = self.failures = 0  # exchanges that were begun
        name = [f"mlspec-{uuid.uuid4().hex}"]  # the store may be older than the group
        dist.broadcast_object_list(name, dist.get_global_rank(group, 0), group=group)
        self._store = dist.PrefixStore(name[0], dist.distributed_c10d._get_default_store())

    def parts(self, own: Tensor) -> list[Tensor]:
        """A dense tensor of every process, of one shape. RankFailed where another one fails or is gone."""
        self.require_all()
        every = [torch.empty_like(own) for _ in range(self.count)]
        self._wait(self._begun(every, own), own)
        return every

    def told(self, said: object) -> list:
        """What every process says, in their order."""
        own = torch.frombuffer(bytearray(pickle.dumps(said)), dtype=torch.uint8)
        sizes = [int(size) for size in self.parts(torch.tensor([len(own)]))]
        room = own.new_zeros(max(sizes))
        room[: len(own)] = own
        return [pickle.loads(part[:size].numpy().tobytes())
                for part, size in zip(self.parts(room), sizes, strict=True)]

    def fail(self, error: BaseException) -> None:
        """Let all others know that this process failed outside of an exchange, and wait until they do."""
        if self.gone is None:
            self._say("failed", f"{type(error).__name__}: {error}".splitlines()[0])
            self._meet(None, None)

    def require_all(self) -> None:
        """RankFailed where a process is gone."""
        if self.gone is not None:
            raise RankFailed(f"{self.gone}: end all processes that share the model and start them again")

    def _begun(self, every: list[Tensor], own: Tensor) -> dist.Work:
        self._number += 1
        return dist.all_gather(every, own, group=self.group, async_op=True)

    def _wait(self, work: dist.Work, own: Tensor) -> None:
        while not self._over(work, _LOOKS):
            if self._failed():
                raise RankFailed(self._meet(work, own))

    def _over(self, work: dist.Work, patience: timedelta) -> bool:
        """Whether it is, after so long at most."""
        try:
            work.wait(patience)
            return True
        except RuntimeError:
            if not work.is_completed():
                return False
        try:
            work.wait(patience)  # it was over just now, or is broken
        except RuntimeError as error:
            self.gone = f"a process that shares the model is gone ({str(error).splitlines()[0]})"
            self._say("failed", self.gone)
            self.require_all()
        return True

    def _meet(self, work: dist.Work | None, own: Tensor | None) -> str:
        """Be through with as many exchanges as all others; -> who failed, and of what. work: what this one waits for,
        with `own`."""
        waits = None if own is None else (own.shape, own.dtype)
        self._say("waits", pickle.dumps((self._number, waits)))
        try:
            every = [pickle.loads(self._get("waits", index)) for index in range(self.count)]
            last, waits = max((one for one in every if one[1]), key=lambda one: one[0], default=(self._number, None))
            if work is not None and not self._over(work, _PATIENCE if self._number == last else 2 * _PATIENCE):
                raise RankFailed("they wait for different things")
            if self._number < last:
                filler = torch.zeros(waits[0], dtype=waits[1])
                if not self._over(self._begun([torch.empty_like(filler) for _ in every], filler), _PATIENCE):
                    raise RankFailed("they wait for different things")
            told = next(iter(self._failed()), "a process that shares the model failed")
        except RuntimeError as error:  # of the store, too: who has to answer is not there, or is somewhere else
            failed = next(iter(self._failed_quietly()), "a process that shares the model failed")
            self.gone = self.gone or f"{failed}, and not all processes heard of it ({str(error).splitlines()[0]})"
            return self.gone
        self.failures += 1
        return told

    def _failed(self) -> list[str]:
        """Who failed, and of what."""
        failed = [index for index in range(self.count) if self._store.check([self._key("failed", index)])]
        return [f"rank {index} of {self.count} that share the model failed: {self._get('failed', index).decode()}"
                for index in failed]

    def _failed_quietly(self) -> list[str]:
        try:
            return self._failed()
        except RuntimeError:
            return []

    def _key(self, what: str, index: int) -> str:
        return f"{self.failures}-{what}-{index}"

    def _say(self, what: str, said: str | bytes) -> None:
        try:
            self._store.set(self._key(what, self.index), said)
        except RuntimeError:  # its store is gone with the process that kept it
            self.gone = self.gone or "the store of the processes that share the model is gone"

    def _get(self, what: str, index: int) -> bytes:
        key = self._key(what, index)
        self._store.wait([key], _PATIENCE)
        return self._store.get(key)


def exchange_of(group: dist.ProcessGroup) -> Exchange:
    """The one of a group; the first time every process has to call it."""
    found = _exchanges.get(group.group_name)
    if found is None or found.group is not group:
        found = _exchanges[group.group_name] = Exchange(group)
    return found


@contextmanager
def agreed(model: nn.Module) -> Iterator[None]:
    """A call of a model, inside: where processes on CPUs share it, it ends on all of them or raises on all of them.

    RankFailed on those that did not fail themselves; it names the first that did, and its error. A call inside of
    another one ends with that.
    """
    exchange = _of_model(model)
    if exchange is None or exchange.within:
        yield
        return
    exchange.within, before = True, exchange.failures
    try:
        yield
        exchange.parts(torch.zeros(1))
    except BaseException as error:
        if exchange.failures == before:  # else all were told
            exchange.fail(error)
        raise
    finally:
        exchange.within = False


def raise_if_shared(model: nn.Module, error: Exception) -> None:
    """Raise an error behind which one process alone would go on, without a level, or without one request: where
    others share the model, they know nothing of it. What is said of a request alone is the same on all of them."""
    if is_shared(model) and not isinstance(error, (ValueError, TypeError, FloatingPointError)):
        raise error


def _of_model(model: nn.Module) -> Exchange | None:
    if not is_shared(model) or local(next(model.parameters())).device.type != "cpu":
        return None
    return exchange_of(group_of(model))
