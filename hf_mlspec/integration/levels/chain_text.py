"""How is a chain written as one text? "mxfp4+FOLDER": the one reader of every command line and of lm-eval."""

from __future__ import annotations

import os
import re
from typing import Any

from .words import SEPARATORS, as_words

_BEHIND = re.compile(r"(@\w+)?(=\d+(:[\d.]*)?)?$")  # a cast, and what programs write of a level: FOLDER@int3=12:0.2


def parse_levels(levels: str | list[Any] | tuple[Any, ...] | None) -> list[Any]:
    """The levels of "mxfp4+FOLDER" or of a list of what `assistant_models` takes; None and "": no levels.

    Commas separate as "+" does. Where parts of a text are, joined again, the name of a folder, they are one level:
    the longest such name counts. ValueError for what is neither text nor list.
    """
    if levels is None or levels == "":
        return []
    if isinstance(levels, str):
        levels = _split(levels)
    if not isinstance(levels, (list, tuple)):
        raise ValueError(f'levels is {levels!r}, it must be words joined by "+", as in mxfp4+PATH, or a list')
    return as_words(levels)


def levels_of_options(texts: list[str]) -> list[Any]:
    """The levels of one chain from every `--level TEXT` of a command line, in their order; an empty text stays an
    empty level, which is an error later."""
    return [level for text in texts for level in parse_levels(text) or [text]]


def _split(text: str) -> list[str]:
    ends = [*(match.start() for match in SEPARATORS.finditer(text)), len(text)]
    found, begin = [], 0
    while begin <= len(text):
        left = [end for end in ends if end >= begin]
        end = next((end for end in reversed(left[1:]) if _is_folder(text[begin:end])), left[0])
        found.append(text[begin:end])
        begin = end + 1
    return found


def _is_folder(text: str) -> bool:
    return os.path.isdir(text) or os.path.isdir(text[: _BEHIND.search(text).start()])  # of any length
