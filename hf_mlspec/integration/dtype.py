"""Which torch.dtype does a word mean?"""

from __future__ import annotations

from typing import Any

import torch

_CHOICES = ("bfloat16", "float16", "float32", "float64")


def dtype_named(dtype: Any, what: str = "dtype") -> Any:
    """A word as the floating point dtype that torch has under it; None, "auto" and what is no word, as they are.
    ValueError, naming ``what`` says so and the choices, for another word."""
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{what} is {dtype!r}, choose one of auto, {', '.join(_CHOICES)}")
    return found


def dtype_or_bfloat16(dtype: torch.dtype | str | None) -> torch.dtype:
    """The same; bfloat16 where nobody asks for one: None and "auto"."""
    return torch.bfloat16 if dtype in (None, "auto") else dtype_named(dtype)
