"""Where do the planes lie that are not on the device? In host memory, pinned for a GPU, or in a safetensors file.

The planes of a layer beyond its top ones are one tensor ``[planes, bytes]`` in the order that the kernels of the
device read, so that a fetch copies and computes nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

_PAGE = 4096


class PlaneError(RuntimeError):
    """A plane that cannot be had: no token is made without it."""


class PlaneStore(Protocol):
    """Low planes of the layers of a model, by the place of the layer.

    word: "memory" or "disk". nbytes: of all. pinned: whether a GPU copies from it while the host goes on.
    """

    word: str
    nbytes: int
    pinned: bool

    def put(self, place: int, planes: Tensor) -> None:
        """Keep the planes of a layer: uint8 ``[planes, bytes]`` on the host or a GPU; layers come in their order."""

    def seal(self) -> None:
        """All layers were put."""

    def read(self, place: int, first: int, into: Tensor) -> None:
        """Planes from ``first`` on into contiguous uint8 ``[planes, bytes]`` on the host. PlaneError."""

    def close(self, lost: bool = False) -> None:
        """Give back what it holds. A second call does nothing. lost: the GPU that copied from it is gone."""


def leave_to_the_process(pinned: Sequence[Tensor]) -> None:
    """Pinned memory from which a lost GPU copied ends with the process: torch asks the GPU before it gives such memory
    back, in a destructor, whose error would end the process at once."""
    for own in pinned:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(own))


class HostStore:
    """Planes in host memory; pinned for a GPU, unless the system refuses: ``refusal`` then has its words."""

    word = "memory"

    def __init__(self, shapes: Sequence[tuple[int, int]], *, pin: bool):
        """shapes: planes and bytes of a plane, of every layer."""
        self.nbytes = sum(count * size for count, size in shapes)
        self.pinned, self.refusal = pin, ""
        self._held: list[Tensor] = []

    def put(self, place: int, planes: Tensor) -> None:
        self._held.append(self._empty(planes.shape).copy_(planes))

    def _empty(self, shape: torch.Size) -> Tensor:
        if self.pinned:
            try:
                return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.pinned, self.refusal = False, str(error).splitlines()[0]
        return torch.empty(shape, dtype=torch.uint8)

    def seal(self) -> None:
        """Nothing is left to do."""

    def planes(self, place: int, first: int, count: int) -> Tensor:
        """Some planes of a layer where they lie: uint8 ``[count, bytes]``."""
        if not self._held:
            raise PlaneError("the planes of this model are no longer streamed: load it again")
        return self._held[place][first : first + count]

    def read(self, place: int, first: int, into: Tensor) -> None:
        into.copy_(self.planes(place, first, len(into)))

    def close(self, lost: bool = False) -> None:
        """As `PlaneStore.close`."""
        if lost and self.pinned:
            leave_to_the_process(self._held)
        self._held = []


class FileStore:
    """Planes in a safetensors file, which is removed in the end.

    It is read, not mapped: a file that was cut short is then an error and no signal that ends the process. Once it is
    whole, every read asks for size and time first. What is read is not kept.
    """

    word = "disk"
    pinned = False

    def __init__(self, names: Sequence[str], shapes: Sequence[tuple[int, int]], folder: str | os.PathLike | None):
        """folder: where the file is made, None: where the system keeps temporary files. OSError where there is no
        room for it, before anything is written."""
        self.nbytes = sum(count * size for count, size in shapes)
        self._shapes = list(shapes)
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(folder or tempfile.gettempdir()).free
        if room < self.nbytes + _PAGE:
            raise OSError(
                f"{folder or tempfile.gettempdir()} has room for {room:,} bytes, and the low planes take "
                f"{self.nbytes:,}: name another folder, plane_folder=..."
            )
        self._own = Path(tempfile.mkdtemp(prefix="mlspec-planes-", dir=folder))
        self._end = weakref.finalize(self, shutil.rmtree, self._own, True)
        self.path, self._writing = self._own / "planes.safetensors", self._own / "planes.safetensors.writing"
        header, self._offsets = self._begin(names)
        self._fd: int | None = os.open(self._writing, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._stamp: tuple[int, int] | None = None  # of the whole file
        self._write(header, 0)

    def _begin(self, names: Sequence[str]) -> tuple[bytes, list[int]]:
        """The header, and where the planes of each layer begin."""
        header, at = {}, 0
        for name, (count, size) in zip(names, self._shapes, strict=True):
            span = [at, at + count * size]
            header[f"{name}.low_planes"] = {"dtype": "U8", "shape": [count, size], "data_offsets": span}
            at = span[1]
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 8) % _PAGE)  # planes begin with a page
        starts = [entry["data_offsets"][0] for entry in header.values()]
        return len(text).to_bytes(8, "little") + text, [len(text) + 8 + start for start in starts]

    def _write(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            count = os.pwrite(self._fd, view, at)
            view, at = view[count:], at + count

    def put(self, place: int, planes: Tensor) -> None:
        self._write(planes.cpu().contiguous().numpy().data, self._offsets[place])

    def seal(self) -> None:
        os.replace(self._writing, self.path)
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        found = os.stat(self.path)
        return found.st_size, found.st_mtime_ns

    def read(self, place: int, first: int, into: Tensor) -> None:
        if self._fd is None:
            raise PlaneError(f"{self.path} is no longer read: load the model again")
        self._require_same()
        view, at = memoryview(into.numpy()).cast("B"), self._offsets[place] + first * self._shapes[place][1]
        while len(view):
            try:
                count = os.preadv(self._fd, [view], at)
            except OSError as error:
                raise PlaneError(f"{self.path}: planes could not be read ({error}): load the model again") from error
            if count == 0:
                raise PlaneError(f"{self.path} ends at byte {at}, within the planes: load the model again")
            view, at = view[count:], at + count
        self._require_same()

    def _require_same(self) -> None:
        if self._stamp is None:
            return
        try:
            now = self._now()
        except OSError as error:
            raise PlaneError(f"{self.path} is gone ({error.strerror}): load the model again") from error
        if now != self._stamp:
            raise PlaneError(
                f"{self.path} was changed while its planes were streamed ({self._stamp[0]:,} bytes when it was "
                f"written, {now[0]:,} now): load the model again"
            )

    def close(self, lost: bool = False) -> None:
        if self._fd is not None:
            self._fd = None
            self._close()
        self._end()
