"""How does a process let go of a checkpoint's pages that it has read and will not read again?"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

_PAGEOUT = 21  # MADV_PAGEOUT of Linux 5.4; Python's mmap module names it only from 3.14 on


def let_go(tensor: torch.Tensor) -> None:
    """Give back the memory pages of a CPU tensor that lies in a mapped file, as safetensors hands them out.

    transformers keeps all files mapped until the last tensor is loaded, so every page that was read counts as this
    process's memory until then. Nothing is lost: a page that is read again comes from the file again. Memory that is
    no file's is left alone; elsewhere than on Linux, and where the kernel declines, nothing happens.
    """
    if not sys.platform.startswith("linux") or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return
    begin = tensor.data_ptr()
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only
    length = (begin + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0 and _lies_in_file(first):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _PAGEOUT)


def _lies_in_file(address: int) -> bool:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            bounds, _, _, _, inode = line.split(maxsplit=5)[:5]
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            if begin <= address < end:
                return inode != "0"
    return False
