"""Where does memory go that a step of calibration freed, or has read? Back to the system, where that says how."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable

from torch import Tensor

_PAGE_OUT = 21  # MADV_PAGEOUT of Linux 5.4, which Python's mmap does not name


def release_free() -> None:
    """Give back what the C library keeps of freed memory (glibc; elsewhere it stays for what comes next). Layers free
    tensors of many sizes, and the gaps that these leave would be as large as a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


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
