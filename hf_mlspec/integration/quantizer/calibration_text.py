"""Which rows of tokens does a calibration text become, be it a file, texts, a `datasets` object or token ids?"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from ...calibration.samples import require_counts, windows
from .encoded_text import encode

_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes of a path and of a part of it, where systems have a limit


def rows_of(
    calibration: Any, tokenizer: Any, samples: int, tokens: int, seed: int,
    read_tokenizer: Callable[[], Any] | None = None,
) -> Iterable[Any]:  # fmt: skip
    """Rows of token ids as `read_samples` takes them: of texts windows of one stream, ids as they are given.

    read_tokenizer: called for texts where ``tokenizer`` is None.

    ValueError for a file that cannot be read or is shorter than asked, a row of a data set without "text" and
    "input_ids", and texts without ``tokenizer``; TypeError for what is none of these, and no tokenizer.
    """
    require_counts(samples, tokens)
    if isinstance(calibration, Mapping):  # a DatasetDict, or what a tokenizer returns
        names = sorted(map(str, calibration))
        raise TypeError(f"calibration is a {type(calibration).__name__} with {names}: give one of them")
    if not isinstance(calibration, (str, os.PathLike, Iterable)) or isinstance(calibration, bytes):
        raise TypeError(f"calibration is {calibration!r}: give a text file, texts, a data set or rows of token ids")
    if isinstance(calibration, (str, os.PathLike)):
        _require_name(calibration)
        texts: Iterator[str] = iter([_read(Path(calibration), "calibration file")])
    else:
        first, rows = _column(iter(calibration))
        if not isinstance(first, str):
            return list(rows)
        texts = rows
    if tokenizer is None and read_tokenizer is not None:
        tokenizer = read_tokenizer()
    if tokenizer is None:
        raise ValueError("calibration is text: give its tokenizer too, or rows of token ids")
    if not callable(tokenizer):
        raise TypeError(f"tokenizer is {tokenizer!r}: give the tokenizer itself, as of AutoTokenizer.from_pretrained")
    return windows(_stream(texts, tokenizer, samples * tokens), samples, tokens, seed)


def _column(rows: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    """The first row and all of them: of a data set's rows the column of ids or of text."""
    first = next(rows, None)
    if first is None:
        raise ValueError("calibration is empty: give text or rows of token ids")
    rows = chain([first], rows)
    if not isinstance(first, Mapping):
        return first, rows
    column = next((name for name in ("input_ids", "text") if name in first), None)
    if column is None:
        raise ValueError(f'rows of the data set have {sorted(first)}, but no column "text" or "input_ids"')
    return first[column], (row[column] for row in rows)


def token_stream(file: str | os.PathLike, tokenizer: Any, most: int | None = None) -> list[int]:
    """The ids of a text file, without special tokens; with ``most`` its first."""
    return encode(_read(Path(file), "text file"), tokenizer, most).tolist()


def _require_name(calibration: str | os.PathLike) -> None:
    """ValueError for a text in place of a file's name."""
    said = os.fspath(calibration)
    whole = os.fsencode(said)
    if "\n" in said or len(whole) > _LONGEST_PATH or any(len(own) > _LONGEST_NAME for own in whole.split(b"/")):
        raise ValueError(f"calibration is a text of {len(said)} characters, not the name of a file: give a list of "
                         "texts, [text]")  # fmt: skip


def _stream(texts: Iterator[str], tokenizer: Any, needed: int) -> array:
    """Ids of all texts, one behind the other. A list that need not end, such as a streamed data set, is read for 8
    times as many as are needed."""
    ids = array("q")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"calibration[{index}] is a {type(text).__name__}, and calibration[0] is a text: give "
                            "texts alone, or rows of token ids alone")  # fmt: skip
        ids += encode(text, tokenizer)
        if len(ids) >= 8 * needed:
            break
    return ids


def _read(file: Path, what: str) -> str:
    if not file.is_file():
        there = "is a folder" if file.is_dir() else "does not exist"
        raise ValueError(f"{what} {str(file)!r} {there}; give a text file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is no UTF-8 text ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise ValueError(f"{what} {str(file)!r} is empty; give a text file")
    if "\0" in text:
        raise ValueError(f"{str(file)!r} is no text (a NUL character at {text.index(chr(0))}): give a text file")
    return text
