"""What does a model get to read in the tasks where it writes: GSM8K, MATH, MBPP, HumanEval?

Each function is lm-eval's `custom_dataset`: it reads the files below the data folder and gives {"test", "train"}; an
item has a "prompt", a "target" and what its score needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..metrics_math import boxed_answer
from ..metrics_number import marked_number
from .files import Record, Source, data_folder, examples, records, test_split, whole_record

_GSM8K = "one JSON object a line, {\"question\": text, \"answer\": text that ends with '#### number'}"
_MATH = ("one folder a subject with one file a problem, or one JSON object a line; each "
         "{\"problem\": text, \"solution\": text with \\boxed{...}}")
_MATH_PROJECT = ("MATH/{0} of MATH.tar (github.com/hendrycks/math), or prm800k/math_splits/{0}.jsonl of "
                 "github.com/openai/prm800k")
GSM8K = {split: Source((f"gsm8k/{split}.jsonl",), f"grade_school_math/data/{split}.jsonl of "
                       "github.com/openai/grade-school-math", _GSM8K) for split in ("train", "test")}
MATH = {split: Source((f"math/{split}", f"math/{split}.jsonl"), _MATH_PROJECT.format(split), _MATH)
        for split in ("train", "test")}
MBPP = Source(("mbpp/mbpp.jsonl",), "mbpp/mbpp.jsonl of github.com/google-research/google-research",
              'one JSON object a line, {"task_id": number, "text": text, "test_list": [text, ...], "test_setup_code": '
              "text}; tasks 11 to 510 are the test")
HUMANEVAL = Source(("humaneval/HumanEval.jsonl", "humaneval/HumanEval.jsonl.gz"),
                   "data/HumanEval.jsonl.gz of github.com/openai/human-eval",
                   'one JSON object a line, {"task_id", "prompt", "test", "entry_point": text}')
_MBPP_TEST = range(11, 511)  # as Austin et al. (2021) split it


def gsm8k(data: str | None = None, **_: Any) -> dict[str, Any]:
    folder = data_folder(data)
    path = GSM8K["test"].need(folder)
    return {"test": test_split(_gsm8k_items(path), path), "train": examples(GSM8K["train"], folder, _gsm8k_items)}


def _gsm8k_items(path: Path, most: int | None = None) -> list[dict[str, str]]:
    found = [record.check(question=str, answer=str) for record in records(path, most)]
    for record in found:
        if marked_number(record["answer"]) is None:
            raise record.wrong("answer", "no number after '####'")
    return [{"prompt": f"Question: {record['question']}\nAnswer:", "target": record["answer"]} for record in found]


def math(data: str | None = None, **_: Any) -> dict[str, Any]:
    folder = data_folder(data)
    path = MATH["test"].need(folder)
    return {"test": test_split(_math_items(path), path), "train": examples(MATH["train"], folder, _math_items)}


def _math_items(path: Path, most: int | None = None) -> list[dict[str, str]]:
    items = []
    for record in _math_folder(path, most) if path.is_dir() else records(path, most):
        record.check(problem=str, solution=str)
        if boxed_answer(record["solution"]) is None:
            raise record.wrong("solution", "no \\boxed{...} in it")
        items.append({"prompt": f"Problem:\n{record['problem']}\n\nSolution:", "target": record["solution"]})
    return items


def _math_folder(path: Path, most: int | None) -> list[Record]:
    """Subjects by name, problems by number."""
    files = sorted(path.glob("*/*.json"), key=lambda file: (file.parent.name, len(file.stem), file.stem))
    return [whole_record(file) for file in files[:most]]


def mbpp(data: str | None = None, **_: Any) -> dict[str, Any]:
    path = MBPP.need(data_folder(data))
    items = []
    for record in records(path):
        record.check(task_id=int, text=str, test_list=list, test_setup_code=str)
        if not record["test_list"] or not all(isinstance(test, str) for test in record["test_list"]):
            raise record.wrong("test_list", "expected one text or more")
        if record["task_id"] in _MBPP_TEST:
            items.append(_mbpp_item(record))
    if not items:
        raise ValueError(f"{path} holds no task with a task_id from {_MBPP_TEST[0]} to {_MBPP_TEST[-1]}, which are "
                         "the test")
    return {"test": test_split(items, path)}


def _mbpp_item(record: Record) -> dict[str, str]:
    """Task and tests as the docstring of a file (as InCoder is asked, Fried et al. 2022), all tests shown."""
    tests = "\n".join(record["test_list"])
    return {"prompt": f'"""\n{record["text"]}\n{tests}\n"""\n', "before": "",
            "target": f"{record['test_setup_code']}\n{tests}\n"}


def humaneval(data: str | None = None, **_: Any) -> dict[str, Any]:
    path = HUMANEVAL.need(data_folder(data))
    found = [record.check(task_id=str, prompt=str, test=str, entry_point=str) for record in records(path)]
    items = [{"prompt": record["prompt"], "before": record["prompt"],
              "target": f"{record['test']}\ncheck({record['entry_point']})\n"} for record in found]
    return {"test": test_split(items, path)}
