"""Which text does a model predict in LAMBADA and WikiText-2? Functions for lm-eval's `custom_dataset`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .files import Source, data_folder, lines, records, test_split

LAMBADA = Source(("lambada/lambada_test.jsonl", "lambada/lambada_test_plain_text.txt"),
                 "lambada_test.jsonl (OpenAI's, as in EleutherAI/lambada_openai), or lambada_test_plain_text.txt of "
                 "lambada-dataset.tar.gz (zenodo.org/records/2630551)",
                 'one JSON object a line, {"text": passage}, or one passage a line')
WIKITEXT2 = Source(("wikitext2/test.txt", "wikitext2/wiki.test.tokens", "wikitext2/wiki.test.raw"),
                   "wiki.test.tokens or wiki.test.raw of wikitext-2 (Merity et al. 2016)",
                   "plain text whose articles begin with a line ' = Title = '")
_TITLE = re.compile(r"^ = (?!=).*(?<!=) = *$", re.MULTILINE)


def lambada(data: str | None = None, **_: Any) -> dict[str, Any]:
    """The last word of each passage, with the space before it, is the target."""
    path = LAMBADA.need(data_folder(data))
    if path.suffix == ".jsonl":
        found = [(record.where, record.check(text=str)["text"]) for record in records(path)]
    else:
        found = [(f"{path}, line {number}", _decoded(line, path, number)) for number, line in lines(path)]
    items = []
    for where, text in found:
        prompt, space, word = text.strip().rpartition(" ")
        if not space or not prompt.strip():
            raise ValueError(f"{where}: a passage needs words before its last one, got {text[:40]!r}")
        items.append({"prompt": prompt, "target": f" {word}"})
    return {"test": test_split(items, path)}


def wikitext2(data: str | None = None, **_: Any) -> dict[str, Any]:
    """One item an article, its text as it stands in the file."""
    path = WIKITEXT2.need(data_folder(data))
    text = _decoded(path.read_bytes(), path)
    if "\r\n" in text:
        raise ValueError(f"{path} has the line ends of Windows, which would be scored; fetch it without conversion")
    starts = [found.start() for found in _TITLE.finditer(text)]
    if not starts:
        raise ValueError(f"{path}: no line ' = Title = ' begins an article; layout: {WIKITEXT2.layout}")
    if text[: starts[0]].strip():
        raise ValueError(f"{path}: text before the first line ' = Title = ': {text[: starts[0]].strip()[:40]!r}")
    articles = [text[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return {"test": test_split([{"text": article} for article in articles], path)}


def _decoded(text: bytes, path: Path, number: int | None = None) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = number or text[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from error
