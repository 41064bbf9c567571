"""How does the CPU decoder get planes that are streamed? It asks before a product, and says when it is done.

It asks in the middle of compiled code, where no error can be raised: the error is kept, the call ends, and who called
raises it (`taken_failure`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from ...nn.planes import PlanesLinear
from ...ops.callbacks import PlanesBegin, PlanesEnd, set_plane_reader
from ..built import walk_of

_kept = threading.local()  # what a call of this thread failed with


class PlaneReader:
    """Brings the streamed planes of a model to its decoder; lives as long as that."""

    def __init__(self, linears: dict[int, PlanesLinear]):
        """linears: by the keys that the decoder knows them by."""
        open_: dict[int, AbstractContextManager] = {}  # not of self: no cycle keeps planes in memory

        def begin(key: int, planes: int) -> bool:
            try:
                reading = linears[key].source.reading(linears[key], planes)
                reading.__enter__()
            except BaseException as error:
                keep_failure(error)
                return False
            open_[key] = reading
            return True

        def end(key: int) -> None:
            try:
                open_.pop(key).__exit__(None, None, None)
            except BaseException as error:
                keep_failure(error)

        self.begin, self.end = PlanesBegin(begin), PlanesEnd(end)
        self.sources = {id(own.source): own.source for own in linears.values()}


def read_planes(handle, model: nn.Module) -> PlaneReader | None:
    """Give a decoder without linears the planes of a model that streams some; None where it streams none."""
    linears = {id(own): own for own in walk_of(model).of_kind(PlanesLinear) if own.source is not None}
    if not linears:
        return None
    reader = PlaneReader(linears)
    set_plane_reader(handle, reader.begin, reader.end)
    return reader


@contextmanager
def reading_alone(*readers: PlaneReader) -> Iterator[None]:
    """A block inside of which no other thread reads the planes of these."""
    sources = dict(item for reader in readers for item in reader.sources.items())
    with ExitStack() as held:
        for _, source in sorted(sources.items()):  # in one order, whoever begins
            held.enter_context(source.alone())
        yield


def keep_failure(error: BaseException) -> None:
    """What the running call of this thread fails with, until it can be raised."""
    _kept.failure = error


def taken_failure() -> BaseException | None:
    """What the last call of this thread failed with in the middle; it is told once."""
    failure, _kept.failure = getattr(_kept, "failure", None), None
    return failure
