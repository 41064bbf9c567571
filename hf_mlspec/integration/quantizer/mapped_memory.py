"""How does a process release the pages of a checkpoint that it will not read again?"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_DONTNEED = 4  # MADV_DONTNEED
_PAGEOUT = 21  # MADV_PAGEOUT of Linux 5.4; Python's mmap module names it only from 3.14 on


def let_go(tensor: torch.Tensor, keep_cached: bool = False) -> None:
    """Release the memory pages of a CPU tensor in a mapped file, as safetensors returns them.

    keep_cached: the system may keep the file's pages for whoever reads it next; only for memory that nobody wrote to,
    because what was written would be lost.

    transformers keeps all files mapped until the last tensor is loaded, so pages that were read count as this
    process's memory until then. A page that is needed again is read from the file again. Nothing happens for other
    memory, on systems other than Linux, or if the kernel declines.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    begin = tensor.data_ptr()
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only
    length = (begin + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    advice = _DONTNEED if keep_cached else _PAGEOUT
    if length > 0 and _lies_in_file(first):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)


def _lies_in_file(address: int) -> bool:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            bounds, _, _, _, inode = line.split(maxsplit=5)[:5]
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            if begin <= address < end:
                return inode != "0"
    return False
