"""Which texts does a file or a folder of sources hold, and in which order?"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

SKIPPED_FOLDERS = frozenset({"_vendor", "vendored", "vendor", "_vendored", "externals", "extern", "external",
                             "third_party", "thirdparty", "_external", "site-packages", "dist-packages", "__pycache__",
                             "encodings"})
PROSE_SUFFIXES = frozenset({".md", ".rst", ".txt"})
FOLDER_FILE_BYTES = (200, 1_000_000)  # of a folder's file; what is larger was mostly written by a program


def read_texts(path: Path, without: Collection[str] = ()) -> list[str]:
    """The text of a file, those of a .jsonl file's lines, or those of a folder's sources in the order of their paths.

    ``without``: names of folders that are left out, too. OSError names a path that cannot be read, ValueError one that
    holds no text.
    """
    if path.is_dir():
        texts = [text for file in source_files(path, without) for text in source_text(file)]
    elif path.suffix == ".jsonl":
        lines = path.read_text(encoding="utf-8").splitlines()
        texts = ["\n".join(v for v in json.loads(line).values() if isinstance(v, str)) for line in lines if line]
    else:
        texts = [path.read_text(encoding="utf-8", errors="replace")]
    if not any(texts):
        raise ValueError(f"{path} holds no text: give a text file, a .jsonl file or a folder with .py or .md files")
    return texts


def source_files(folder: Path, without: Collection[str]) -> list[Path]:
    """Code and prose in it, modules of a package side by side."""
    skipped, least, most = SKIPPED_FOLDERS.union(without), *FOLDER_FILE_BYTES
    return sorted(path for path in folder.rglob("*")
                  if (path.suffix == ".py" or path.suffix in PROSE_SUFFIXES) and path.is_file()
                  and skipped.isdisjoint(path.relative_to(folder).parts) and least <= path.stat().st_size <= most)


def source_text(path: Path) -> list[str]:
    """A source without its licence header; nothing where it holds data tables or is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return []  # a test file written in another encoding on purpose
    text = without_licence_header(text) if path.suffix == ".py" else text
    return [text] if is_language(text, 0.6 if path.suffix == ".py" else 0.75) else []


def without_licence_header(code: str) -> str:
    """``code`` without the comment block at its top, where that names a licence."""
    header = re.match(r"(?:[ \t]*#[^\n]*\n|\s*\n)*", code).group()
    return code[len(header):] if re.search(r"copyright|licen[sc]e|SPDX", header, re.IGNORECASE) else code


def is_language(text: str, least: float) -> bool:
    """Whether at least this share of the characters are ASCII letters, spaces and newlines."""
    letters = sum(map(text.count, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ \n"))
    return letters >= least * max(len(text), 1)
