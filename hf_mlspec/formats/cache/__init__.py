"""In which codes are keys and values kept? One record a format, in CACHE_FORMATS: ``"int8"``, ``"int4"``.

Every token has one row for each key head, of its key and of its value, quantized for itself. Values that were
quantized once stay as they are, in float32 and in bfloat16: a cache can leave as plain keys and values and come back
bit for bit. The compiled kernels follow each rule bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch

from .int4 import INT4
from .int8 import INT8
from .record import CacheFormat

__all__ = ["CACHE_FORMATS", "INT4", "INT8", "CacheFormat", "cache_format", "stored_format"]

CACHE_FORMATS: dict[str, CacheFormat] = {record.word: record for record in (INT8, INT4)}


def cache_format(word: Any, said: str) -> CacheFormat | None:
    """The format of a word, None for None: keys and values as the model computes them. ``said`` begins the message:
    the option. ValueError for a word that there is not, TypeError for what is no word."""
    if word is None:
        return None
    if not isinstance(word, str):
        raise TypeError(f"{said} is {word!r}, expected a word ({', '.join(map(repr, CACHE_FORMATS))}) or None")
    if word not in CACHE_FORMATS:
        choices = " or ".join(map(repr, CACHE_FORMATS))
        raise ValueError(f"{said} is {word!r}, choose {choices}, or None for keys and values as they are computed")
    return CACHE_FORMATS[word]


def stored_format(dtype: torch.dtype) -> CacheFormat | None:
    """The format whose rows a cache of this dtype holds, None where it holds keys and values as they are."""
    return next((record for record in CACHE_FORMATS.values() if record.dtype == dtype), None)
