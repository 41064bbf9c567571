"""What does the compiled decoder call in the middle of a call? Functions of Python, by their addresses.

Each is called by the thread that calls the decoder, and may not raise: compiled code knows no error of Python's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch
from torch import Tensor

# mlspec::PlaneReader
PlanesBegin = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int64, ctypes.c_int64)
PlanesEnd = ctypes.CFUNCTYPE(None, ctypes.c_int64)
SumRanks = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64)  # mlspec::Ranks
GatherRanks = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
ChooseWidth = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)  # mlspec::ChooseWidth


def set_plane_reader(decoder, begin: PlanesBegin, end: PlanesEnd) -> None:
    """Who brings the planes of streamed weights, before these are set. begin(key, planes): whether the first planes of
    a weight are in their place, until end(key). Both are called by the thread that calls the decoder; neither may
    raise. They have to live as long as the decoder."""
    decoder.set_plane_reader(*(ctypes.cast(one, ctypes.c_void_p).value for one in (begin, end)))


def set_ranks(decoder, count: int, sum: SumRanks, gather: GatherRanks) -> None:
    """Let `count` processes share the decoder, of whose heads, MLPs and head each has its part, before the head is
    set. sum(address, n): float32 ``[n]`` becomes the sum of all processes'; gather(part, rows, width, whole): float32
    ``[rows, width]`` of all of them side by side. False where another process is gone. Both are called by the thread
    that calls the decoder; neither may raise. They have to live as long as the decoder."""
    decoder.set_ranks(count, *(ctypes.cast(one, ctypes.c_void_p).value for one in (sum, gather)))


def floats_at(address: int, *shape: int) -> Tensor:
    """float32 of this shape where compiled code has them."""
    numbers = (ctypes.c_float * math.prod(shape)).from_address(address)
    return torch.frombuffer(numbers, dtype=torch.float32).view(shape)


def width_chooser(choose: Callable[[int, Tensor], int], hidden: int) -> ChooseWidth:
    """What `score_choosing` of a decoder is to call, of ``hidden`` features. choose(block, inputs float32 ``[tokens,
    hidden]``): planes of the block, or -1 where none can be picked; it may not raise."""

    def chosen(block: int, address: int, tokens: int) -> int:
        return choose(block, floats_at(address, tokens, hidden))

    return ChooseWidth(chosen)


def address_of(callback: ChooseWidth) -> int:
    """Where compiled code calls it; it has to live as long as the call."""
    return ctypes.cast(callback, ctypes.c_void_p).value
