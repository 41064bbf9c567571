"""How often does a model choose right in PIQA and WinoGrande, without examples? Rows are scored in batches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_mlspec.evaluation.tasks.choices import items_of

BATCH = 32  # rows of a pass
TASKS = ("piqa", "winogrande")


class Question(NamedTuple):
    """rows: ids of each choice; scored: how many at its end count."""

    rows: list[list[int]]
    scored: list[int]
    gold: int


def questions_of(name: str, folder: str, tokenizer: Any, items: int) -> list[Question]:
    """The first so many of a task; the folder holds the files of its task in hf_mlspec/evaluation/tasks."""
    found = []
    for item in items_of(name, folder)[:items]:
        if "continuation" in item:
            pairs = [(choice, item["continuation"]) for choice in item["choices"]]
        else:
            pairs = [(item["prompt"], choice) for choice in item["choices"]]
        ids = [[tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, f" {end}")]
               for before, end in pairs]  # fmt: skip
        found.append(Question([before + end for before, end in ids], [len(end) for _, end in ids], item["gold"]))
    return found


def accuracy(model: nn.Module, questions: list[Question]) -> float:
    """The share of questions that are answered right."""
    return sum(answers(model, questions)) / len(questions)


def paired(own: str, other: str) -> tuple[float, float]:
    """How much larger the share of 1 is in ``own`` than in ``other``, answers to the same questions, and the standard
    error of that. ValueError where they are not as many."""
    gained = [int(one) - int(two) for one, two in zip(own, other, strict=True)]
    mean = sum(gained) / len(gained)
    return mean, math.sqrt((sum(one * one for one in gained) / len(gained) - mean**2) / len(gained))


@torch.inference_mode()
def answers(model: nn.Module, questions: list[Question]) -> list[bool]:
    """Of each question whether the right choice has the largest probability. Padding stands behind a row's tokens,
    which do not see it."""
    rows = [(row, count) for one in questions for row, count in zip(one.rows, one.scored, strict=True)]
    order = sorted(range(len(rows)), key=lambda at: len(rows[at][0]))
    chances = torch.zeros(len(rows))
    for first in range(0, len(order), BATCH):
        some = order[first : first + BATCH]
        width = len(rows[some[-1]][0])
        ids = torch.tensor([rows[at][0] + [0] * (width - len(rows[at][0])) for at in some], device=model.device)
        logits = model(ids).logits
        for place, at in enumerate(some):
            row, count = rows[at]
            own = logits[place, len(row) - count - 1 : len(row) - 1].float().log_softmax(-1)
            chances[at] = own.gather(1, ids[place, len(row) - count : len(row), None]).sum()
    best = chances.view(len(questions), 2).argmax(1)
    return (best == torch.tensor([one.gold for one in questions])).tolist()
