"""What does a model card say of a certificate, and how does the block get there without touching anything else?"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.whole_file import written_whole

BEGIN, END = "<!-- mlspec-certificate -->", "<!-- /mlspec-certificate -->"


def statement(document: dict[str, Any]) -> str:
    """The one line that matters: ``lossless: 0 of 55,517 tokens differ ...``."""
    found = document["result"]
    differ, tokens, tolerated = found["mismatches"], found["tokens_compared"], found["tolerated"]
    count = f"{differ:,} of {tokens:,} tokens differ"
    sizes = " and ".join(str(run["batch_size"]) for run in document["runs"])
    where = f"over {found['prompts']:,} prompts, batch size {sizes}"
    if not found["lossless"]:
        return f"NOT lossless: {count} from the target alone {where}"
    if tolerated:
        gap = document["settings"]["tolerate_ties"]
        return f"lossless up to ties: {count}, each between two float64 logits closer than {gap:g}, {where}"
    return f"lossless: {count} from the target alone {where}"


def block(document: dict[str, Any]) -> str:
    """A Markdown block for a model card: the statement and a small table, between two comments that mark it."""
    rows = [f"| {name} | {value} |" for name, value in _rows(document)]
    lines = [BEGIN, f"**{_escape(statement(document))}**", "", "| | |", "|---|---|", *rows, END]
    return "\n".join(lines) + "\n"


def place_block(path: str | os.PathLike[str], text: str) -> None:
    """Put the block into a Markdown file in place of the one that is there, or at its end; a new file is made.

    Every other byte stays. Raises ValueError as `check_place`.
    """
    file = Path(path).resolve()  # a link stays a link
    before = check_place(path)
    newline = "\r\n" if "\r\n" in before else "\n"
    text = text.replace("\n", newline)
    begin, end = _bounds(before)
    if begin is None:
        blank = newline if not before or before.endswith(newline) else newline * 2
        after = before + (blank if before else "") + text
    else:
        after = before[:begin] + text.removesuffix(newline) + before[end:]
    with written_whole(file) as beside:
        beside.write_bytes(after.encode("utf-8"))


def check_place(path: str | os.PathLike[str]) -> str:
    """The text of a Markdown file that is to take a block ("" where there is no file yet).

    Raises ValueError where the file is no UTF-8 text, or has a beginning of a block without its end.
    """
    file = Path(path)
    check_folder(file, "the badge")
    if not file.exists():
        return ""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is not UTF-8 text: byte {error.start} cannot be decoded") from error
    counts = [len(_lines_of(marker, text)) for marker in (BEGIN, END)]
    begin, end = _bounds(text)
    if counts not in ([0, 0], [1, 1]) or (begin is not None and end <= begin):
        raise ValueError(f"{str(path)!r} holds {counts[0]} lines {BEGIN!r} and {counts[1]} lines {END!r}, expected "
                         "one of each, in this order, or none: repair the file and try again")
    return text


def check_folder(file: str | os.PathLike[str], what: str) -> None:
    """Raise ValueError unless a file of this name can be written where it is to lie."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"{what} is to be written to {str(file)!r}, which is a folder; name a file")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{what} is to be written to {str(file)!r}, and that folder does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{what} is to be written to {str(file)!r}, and nothing may be written to that folder")


def _rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    target, settings = document["target"], document["settings"]
    versions, machine = document["versions"], document["machine"]
    weights = target["weights_sha256"] or target["parameters_sha256"]
    numbers = [f"{run['tokens_per_pass']:.2f}" for run in document["runs"]]
    return [(name, _escape(value)) for name, value in (
        ("target", f"{target['name']}, {settings['dtype']}{_format(target)}, {target['decoding']['how']}"),
        ("levels", " <- ".join(map(_level, document["levels"]))),
        ("acceptance", "; ".join(_list(f"{level['acceptance']:.3f}" for level in run["levels"])
                                 for run in document["runs"])),
        ("tokens per target pass", _list(numbers)),
        ("prompts", f"{document['prompts']['name'] or 'given as texts'}, {document['prompts']['count']:,}, "
                    f"up to {settings['max_new_tokens']} new tokens, greedy"),
        ("weights", f"SHA-256 {weights[:16]}"),
        ("kernels", _kernels(document["kernels"])),
        ("made with", f"hf_mlspec {versions['hf_mlspec']}, torch {versions['torch']}, transformers "
                      f"{versions['transformers']}, {machine['processor']}, {document['created'][:10]}"),
        ("certificate", f"SHA-256 {document['sha256'][:16]}"),
    )]


def _level(entry: dict[str, Any]) -> str:
    """Its name, and what it reads instead of the whole cache as it is."""
    window, kept = entry.get("draft_window"), entry.get("draft_cache")
    read = [f"draft window {window}"] * bool(window) + [f"{kept} cache"] * bool(kept)
    return entry["name"] + (f" ({', '.join(read)})" if read else "")


def _kernels(found: dict[str, Any]) -> str:
    if found["sha256"] is None:
        return "none, plain torch"
    return f"{found['instruction_set']}, SHA-256 {found['sha256'][:16]}"


def _format(target: dict[str, Any]) -> str:
    found = target["format"]
    return f", {found['format']} at {found['activation_bits']}-bit activations" if found else ""


def _list(values: Any) -> str:
    return ", ".join(map(str, values))


def _escape(text: str) -> str:
    """As text inside a cell of a Markdown table: names of folders may hold anything."""
    plain = re.sub(r"\s+", " ", text)
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", plain)


def _bounds(text: str) -> tuple[int | None, int]:
    """From the first character of a block to the last one of its closing comment; (None, 0) without one."""
    begins, ends = _lines_of(BEGIN, text), _lines_of(END, text)
    return (begins[0].start(), ends[0].end()) if begins and ends else (None, 0)


def _lines_of(marker: str, text: str) -> Sequence[re.Match[str]]:
    """The places where a marker stands alone on a line."""
    return list(re.finditer(rf"(?m)^{re.escape(marker)}(?=[ \t]*\r?$)", text))
