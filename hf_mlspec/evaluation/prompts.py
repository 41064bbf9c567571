"""Which prompts does a file hold? One reader for the command line and for every program of eval/."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

# The first of these that an object has is its prompt.
FIELDS = (
    "prompt",  # HumanEval, of its own release and of llm-foundry
    "question",  # GSM8K; ARC, where it is a table with the question under "stem"
    "turns",  # MT-Bench and Spec-Bench: a list, of which the first is taken
    "problem",  # MATH
    "query",  # ARC of llm-foundry
    "context",  # GSM8K and MATH of llm-foundry
    "text",  # MBPP, the demo pair
)
_LAYOUT = "text with one prompt a line, or .jsonl with one object a line"


def read_prompts(path: str | os.PathLike[str], count: int | None = None) -> list[str]:
    """The first `count` prompts, all by default, in order; fewer if there are no more, but at least one.

    path: text with one prompt per line; .jsonl with an object per line; .json with a list of objects or a single one;
        one of these as .gz; or a folder of .json files, or of folders of them (MATH: subjects by name, problems by
        number). Empty lines are skipped. The prompt of an object is under the first of `FIELDS` that it has.
    Raises ValueError naming file, line and remedy: no such file, no prompts, not UTF-8, no JSON object, none of the
    fields, not a text. Lines after the last requested prompt are not read.
    """
    found = list(islice(_prompts(Path(path)), count))
    if not found and count != 0:
        raise ValueError(f"prompts file {os.fspath(path)!r} holds no prompts; write {_LAYOUT}")
    return found


def _prompts(path: Path) -> Iterator[str]:
    if path.is_dir():
        found = [*path.glob("*.json"), *path.glob("[!.]*/*.json")]  # no deeper: "." may be anybody's checkout
        for file in sorted(found, key=lambda file: (file.parent.as_posix(), len(file.stem), file.stem)):
            yield from _prompts(file)
        return
    text, kind = _text(path), Path(path.name.removesuffix(".gz")).suffix
    if kind == ".json":
        yield from _from_json(text, path)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _prompt(_parsed(line, where), where) if kind == ".jsonl" else line


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except OSError as error:  # BadGzipFile has no strerror
        raise ValueError(f"prompts file {str(path)!r} cannot be read: {error.strerror or error}; give {_LAYOUT}"
                         ) from error
    except (EOFError, zlib.error) as error:
        raise ValueError(f"prompts file {str(path)!r} is not a complete .gz: {error}; download it again") from error
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"prompts file {str(path)!r} is not UTF-8 text: byte {error.start} (line {line}) cannot be "
                         "decoded; save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _from_json(text: str, path: Path) -> Iterator[str]:
    """A list of objects; or a single one, as each file of MATH is."""
    if not text.strip():
        return
    found = _parsed(text, str(path), "a .json file is one list of objects; name it .jsonl where each line is one")
    if isinstance(found, dict):
        yield _prompt(found, str(path))
    elif isinstance(found, list):
        for number, entry in enumerate(found, 1):
            yield _prompt(entry, f"{path}, entry {number}")
    else:
        raise ValueError(f"{path}: {type(found).__name__}, not a list of objects; put the prompts into one")


def _parsed(text: str, where: str, remedy: str = ".jsonl has one object a line") -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f", line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(f"{where}{at}: no JSON ({error.msg}); {remedy}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise ValueError(f"{where}: JSON that cannot be read ({error}); {remedy}") from error


def _prompt(entry: Any, where: str) -> str:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: no JSON object, it has {type(entry).__name__}; write {{\"prompt\": \"...\"}}")
    field = next((name for name in FIELDS if name in entry), None)
    if field is None:
        raise ValueError(f"{where}: no prompt under {', '.join(map(repr, FIELDS))}; it has {list(entry)}: rename the "
                         "field that holds the prompt")
    value = _INSIDE.get(field, lambda found: found)(entry[field])
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {field!r} is {entry[field]!r}, not a text; write {_WRITTEN.get(field, _QUOTED)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {field!r} holds {value[error.start]!r}, half a character; write all of it"
                         ) from error
    return value


def _stem(found: Any) -> Any:
    return found.get("stem") if isinstance(found, dict) else found


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list) and found else None


_INSIDE: dict[str, Callable[[Any], Any]] = {"question": _stem, "turns": _first}
_QUOTED = "one in quotes"
_WRITTEN = {"turns": "a list of texts, whose first is the prompt", "question": 'one in quotes, or {"stem": "..."}'}
