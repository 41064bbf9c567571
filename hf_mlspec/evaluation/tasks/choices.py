"""Which texts does a model compare in the tasks where it chooses: PIQA, WinoGrande, ARC, HellaSwag?

Each function is lm-eval's `custom_dataset`. An item has a "prompt", its "choices" and "gold", the index of the right
one; in WinoGrande the choices are beginnings and "continuation" is the same end of each.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .files import Record, Source, data_folder, examples, labels, records, test_split

_SITE = "github.com/ybisk/ybisk.github.io (piqa/data)"
_PIQA = 'one JSON object a line, {"goal", "sol1", "sol2": text}, and beside it NAME-labels.lst with 0 or 1 a line'
PIQA = {split: Source((f"piqa/{name}.jsonl",), f"{name}.jsonl and {name}-labels.lst of {_SITE}", _PIQA)
        for split, name in {"train": "train", "test": "valid"}.items()}
_WINOGRANDE = ('one JSON object a line, {"sentence": text with a _, "option1", "option2": text, "answer": "1" or "2"} '
               'or {"context_options": [text, text], "continuation": text, "gold": 0 or 1}')
_ALLENAI = "winogrande_1.1.zip (github.com/allenai/winogrande)"
WINOGRANDE = {
    "train": Source(("winogrande/train_xl.jsonl",), f"train_xl.jsonl of {_ALLENAI}", _WINOGRANDE),
    "test": Source(("winogrande/dev.jsonl", "winogrande/winogrande_dev.jsonl"), f"dev.jsonl of {_ALLENAI}, or as "
                   "winogrande_dev.jsonl the winogrande.jsonl of github.com/mosaicml/llm-foundry", _WINOGRANDE),
}
_ARC = ('one JSON object a line, {"question": {"stem": text, "choices": [{"text", "label": text}, ...]}, "answerKey": '
        "label}")
_HELLASWAG = ('one JSON object a line, {"activity_label", "ctx_a", "ctx_b": text, "endings": [4 texts], '
              '"label": 0 to 3}')
HELLASWAG = {split: Source((f"hellaswag/hellaswag_{name}.jsonl",), f"data/hellaswag_{name}.jsonl of "
                           "github.com/rowanz/hellaswag", _HELLASWAG)
             for split, name in {"train": "train", "test": "val"}.items()}


def _splits(sources: dict[str, Source], data: str | None, read: Any) -> dict[str, Any]:
    folder = data_folder(data)
    path = sources["test"].need(folder)
    return {"test": test_split(read(path), path), "train": examples(sources["train"], folder, read)}


def items_of(task: str, data: str | None = None) -> list[dict[str, Any]]:
    """The items of "piqa" or "winogrande" as plain lists: without the `datasets` package. ValueError for none."""
    sources, read = {"piqa": (PIQA, _piqa_items), "winogrande": (WINOGRANDE, _winogrande_items)}[task]
    path = sources["test"].need(data_folder(data))
    if not (items := read(path)):
        raise ValueError(f"{path} holds no items")
    return items


def piqa(data: str | None = None, **_: Any) -> dict[str, Any]:
    return _splits(PIQA, data, _piqa_items)


def _piqa_items(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    found = [record.check(goal=str, sol1=str, sol2=str) for record in records(path, most)]
    beside = path.with_name(f"{path.stem}-labels.lst")
    if not beside.exists():
        raise FileNotFoundError(f"{beside} is missing next to {path.name}: both are of {_SITE}; 0 or 1 a line")
    golds = labels(beside, ("0", "1"), len(found), exactly=most is None)
    return [{"prompt": f"Question: {record['goal']}\nAnswer:", "gold": gold,
             "choices": [record["sol1"], record["sol2"]]}
            for record, gold in zip(found, golds, strict=True)]


def winogrande(data: str | None = None, **_: Any) -> dict[str, Any]:
    return _splits(WINOGRANDE, data, _winogrande_items)


def _winogrande_items(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    return [_two_beginnings(record) if "context_options" in record else _blank_filled(record)
            for record in records(path, most)]


def _two_beginnings(record: Record) -> dict[str, Any]:
    record.check(context_options=list, continuation=str, gold=int)
    options = record["context_options"]
    if len(options) != 2 or not all(isinstance(option, str) for option in options):
        raise record.wrong("context_options", "expected two texts")
    if record["gold"] not in (0, 1):
        raise record.wrong("gold", f"{record['gold']}, expected 0 or 1")
    return {"choices": options, "continuation": record["continuation"], "gold": record["gold"]}


def _blank_filled(record: Record) -> dict[str, Any]:
    """The blank filled ends what differs; what follows it is scored (Trinh and Le 2018, partial scoring)."""
    record.check(sentence=str, option1=str, option2=str, answer=str)
    before, blank, after = record["sentence"].partition("_")
    if not blank:
        raise record.wrong("sentence", "no _ in it")
    if record["answer"] not in ("1", "2"):
        raise record.wrong("answer", f"{record['answer']!r}, expected '1' or '2'")
    return {"choices": [before + record["option1"], before + record["option2"]], "continuation": after.strip(),
            "gold": int(record["answer"]) - 1}


def arc_easy(data: str | None = None, **_: Any) -> dict[str, Any]:
    return _splits(arc_sources("ARC-Easy"), data, _arc_items)


def arc_challenge(data: str | None = None, **_: Any) -> dict[str, Any]:
    return _splits(arc_sources("ARC-Challenge"), data, _arc_items)


def arc_sources(part: str) -> dict[str, Source]:
    return {split.lower(): Source((f"arc/{part}/{part}-{split}.jsonl",), f"{part}/{part}-{split}.jsonl of "
                                  "ARC-V1-Feb2018.zip (allenai.org/data/arc)", _ARC) for split in ("Train", "Test")}


def _arc_items(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    return [_arc_item(record) for record in records(path, most)]


def _arc_item(record: Record) -> dict[str, Any]:
    record.check(question=dict, answerKey=str)
    question = Record(f"{record.where}, in 'question'", record["question"]).check(stem=str, choices=list)
    if not all(isinstance(choice, dict) for choice in question["choices"]):
        raise question.wrong("choices", "expected objects")
    choices = [Record(f"{record.where}, in 'choices'", choice).check(text=str, label=str)
               for choice in question["choices"]]
    names = [choice["label"] for choice in choices]
    if record["answerKey"] not in names:
        raise record.wrong("answerKey", f"{record['answerKey']!r} is none of the labels {names}")
    return {"prompt": f"Question: {question['stem']}\nAnswer:", "choices": [choice["text"] for choice in choices],
            "gold": names.index(record["answerKey"])}


def hellaswag(data: str | None = None, **_: Any) -> dict[str, Any]:
    return _splits(HELLASWAG, data, _hellaswag_items)


def _hellaswag_items(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    return [_hellaswag_item(record) for record in records(path, most)]


def _hellaswag_item(record: Record) -> dict[str, Any]:
    record.check(activity_label=str, ctx_a=str, ctx_b=str, endings=list, label=int)
    endings = record["endings"]
    if len(endings) != 4 or not all(isinstance(ending, str) for ending in endings):
        raise record.wrong("endings", "expected four texts")
    if record["label"] not in range(4):
        raise record.wrong("label", f"{record['label']}, expected 0 to 3")
    text = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return {"prompt": _plain(text), "choices": [_plain(ending) for ending in endings], "gold": record["label"]}


def _plain(text: str) -> str:
    """Without what WikiHow's markup left behind: [title] ends a sentence, [header] and the like go."""
    return re.sub(r" {2,}", " ", re.sub(r"\[[^\]]*\]", "", text.replace(" [title]", ". "))).strip()
