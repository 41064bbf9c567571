"""Where does memory go that a step of calibration freed, or has read? Back to the system, where that says how."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

_PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4, which Python's mmap does not name
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt
_LARGE = 1 << 22  # bytes: no temporary of a search of scales
_MOST = 1 << 25  # bytes, up to which glibc raises that threshold by itself


def release_free() -> None:
    """Give back what the C library keeps of freed memory (glibc; elsewhere it stays for what comes next). Layers free
    tensors of many sizes, and the gaps that these leave would be as large as a small model."""
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


@contextmanager
def large_apart() -> Iterator[None]:
    """While it lasts, tensors of four megabytes and more lie in memory of their own, which goes back to the system as
    soon as they are freed (glibc; elsewhere nothing changes). Behind it only what glibc never keeps does."""
    limit = _of_c_library("mallopt")
    if limit is None:
        yield
        return
    limit(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        limit(_MMAP_THRESHOLD, _MOST)


def _of_c_library(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None


def release_pages(tensors: Iterable[Tensor]) -> None:
    """Give back the memory of tensors that lie in files, as transformers maps a checkpoint's (Linux; elsewhere
    nothing happens). Their values stay: whoever reads one again reads the file. Other memory is left alone, and so are
    files of other users, of which Linux tells nothing."""
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    places = _places_of_files()
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.nbytes:
            continue
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(low <= first and last <= high for low, high in places):
            first -= first % mmap.PAGESIZE
            advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _PAGE_OUT)


def _places_of_files() -> list[tuple[int, int]]:
    """Of this process' memory: first address, and the one behind the last."""
    places = []
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            place, _, _, _, inode, *_ = line.split()
            if inode != "0":
                low, high = (int(end, 16) for end in place.split("-"))
                places.append((low, high))
    return places
