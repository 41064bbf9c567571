"""Which token ids is a long text, without the encoding of all of it in memory?

A tokenizer takes about 160 bytes a character while it encodes. So a text is cut at line starts, where the encodings of
what stands right before and behind are together that of both; a tokenizer that marks the begin of a text, or joins
lines, says there that they are not, and is tried at the next line, and in the end gets the rest as a whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import Any

PIECE = 1 << 15  # characters, at least
_AROUND = 256  # characters on either side of a cut by which it is judged
_TRIED = 32  # cuts, before a text stays whole from there on
_LINE_START = re.compile(r"(?<=\n)(?=[^\n])")


def encode(text: str, tokenizer: Any, most: int | None = None) -> array:
    """The ids of ``text`` without special tokens, int64; with ``most`` its first."""
    ids = array("q")
    for piece in _pieces(text, tokenizer):
        ids.extend(_encode(piece, tokenizer))
        if most is not None and len(ids) >= most:
            return ids[:most]
    return ids


def _encode(text: str, tokenizer: Any) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _pieces(text: str, tokenizer: Any) -> Iterator[str]:
    begin = 0
    while len(text) - begin > PIECE:
        starts = (found.start() for found in islice(_LINE_START.finditer(text, begin + PIECE), _TRIED))
        cut = next((start for start in starts if _is_seam(text, start, tokenizer)), len(text))
        yield text[begin:cut]
        begin = cut
    if begin < len(text) or not text:
        yield text[begin:]


def _is_seam(text: str, cut: int, tokenizer: Any) -> bool:
    before, behind = text[max(cut - _AROUND, 0) : cut], text[cut : cut + _AROUND]
    apart = [*_encode(before, tokenizer), *_encode(behind, tokenizer)]
    return apart == list(_encode(before + behind, tokenizer))
