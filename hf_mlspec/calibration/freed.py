"""Where does memory go that a step of calibration freed? Back to the system, where the C library says how."""

from __future__ import annotations

import ctypes
import os


def release_free() -> None:
    """Give back what the C library keeps of freed memory (glibc; elsewhere it stays for what comes next). Layers free
    tensors of many sizes, and the gaps that these leave would be as large as a small model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
