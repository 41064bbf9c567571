"""Where do the hidden states of all samples wait from one block to the next? In memory, or in a file.

The file has no name: whatever ends the process, a kill included, its bytes are free again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from typing import BinaryIO

import torch
from torch import Tensor


class FiledStates(MutableSequence[Tensor]):
    """Tensors of the CPU in a file, as they were put there; each is read anew where it is taken. The file stays the
    caller's, to be closed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._end = file, 0
        self._places: list[tuple[int, torch.Size, torch.dtype]] = []  # first byte, and what lies there

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Tensor:
        first, shape, dtype = self._places[index]
        found = torch.empty(shape, dtype=dtype)
        self._file.seek(first)
        if (count := self._file.readinto(_bytes_of(found))) != found.nbytes:
            raise OSError(f"{count} of {found.nbytes} bytes of hidden states were read: the disk lost some")
        return found

    def __setitem__(self, index: int, states: Tensor) -> None:
        first, shape, dtype = self._places[index]
        if shape.numel() * dtype.itemsize < states.nbytes:
            first = self._room(states.nbytes)
        self._put(index, first, states)

    def insert(self, index: int, states: Tensor) -> None:
        first = self._room(states.nbytes)
        self._places.insert(index, (first, states.shape, states.dtype))
        self._put(index, first, states)

    def __delitem__(self, index: int) -> None:
        del self._places[index]

    def _room(self, nbytes: int) -> int:
        first, self._end = self._end, self._end + nbytes
        return first

    def _put(self, index: int, first: int, states: Tensor) -> None:
        self._file.seek(first)
        self._file.write(_bytes_of(states.detach().contiguous()))
        self._places[index] = first, states.shape, states.dtype


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.flatten().view(torch.uint8).numpy())


@contextmanager
def waiting_states(folder: str | os.PathLike | None, nbytes: int) -> Iterator[MutableSequence[Tensor]]:
    """Nothing yet; folder: of their file, None: in memory. nbytes: of all states, reserved in the file at once, where
    the system can; OSError if the disk has less."""
    if folder is None:
        yield []
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        if nbytes and hasattr(os, "posix_fallocate"):
            _reserve(file, nbytes, folder)
        yield FiledStates(file)


def _reserve(file: BinaryIO, nbytes: int, folder: str | os.PathLike) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        what = f"hidden states need {nbytes} bytes ({error.strerror}): use another disk"
        raise OSError(error.errno, what, str(folder)) from error
