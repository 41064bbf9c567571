"""What do programs score a model on: rows of a text and of HumanEval, their perplexity, and the drafts it accepts?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_mlspec
from hf_mlspec.evaluation import score_rows

WINDOW = 512  # tokens
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
Rows = tuple[list[list[int]], list[int]]  # token ids, and of each row how many at its end are scored


def tasks_of(file: Path) -> list[dict[str, Any]]:
    """Of HumanEval.jsonl, or of another file of lines with a prompt and its canonical_solution."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def windows_of(file: Path, tokenizer: Any, count: int) -> Rows:
    """The first so many windows of a text."""
    ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)][:count]
    return windows, [WINDOW - 1] * len(windows)


def solutions_of(tasks: list[dict[str, Any]], tokenizer: Any) -> Rows:
    """Prompts and solutions, of which the solutions are scored."""
    rows, scored = [], []
    for task in tasks:
        prompt, solution = (tokenizer(task[key], add_special_tokens=False)["input_ids"]
                            for key in ("prompt", "canonical_solution"))  # fmt: skip
        rows.append(prompt + solution)
        scored.append(len(solution))
    return rows, scored


def prompts_of(tasks: list[dict[str, Any]], tokenizer: Any) -> list[torch.Tensor]:
    """int64 ``[1, tokens]`` of each."""
    return [tokenizer(task["prompt"], return_tensors="pt")["input_ids"] for task in tasks]


def perplexity(model: nn.Module, rows: Rows, precision: str | None = None, batch_size: int = 8) -> float:
    """Of the scored tokens; precision: as in `score_rows`, None: the model's own."""
    options = {} if precision is None else {"precision": precision}
    found = score_rows(model, rows[0], num_scored=rows[1], batch_size=batch_size, **options)
    return math.exp(-sum(scores.total for _, scores in found) / sum(rows[1]))


def continued(
    model: nn.Module, prompts: list[torch.Tensor] | list[dict[str, torch.Tensor]], level: str, draft: int, tokens: int
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """What a chain of one level with drafts of so many tokens writes behind each prompt, ids or inputs of a call, and
    of these drafts the accepted tokens over all that were drafted, and over those whose verdict is known."""
    drafted = tested = accepted = 0
    written = []
    for given in prompts:
        inputs = given if isinstance(given, dict) else {"input_ids": given}
        options = {"assistant_models": [level], "speculation_config": {"num_draft_tokens": draft}}
        written.append(model.generate(**inputs, max_new_tokens=tokens, **GREEDY, **options))
        own = hf_mlspec.last_stats(model).levels[0]
        drafted, tested, accepted = drafted + own.drafted, tested + own.tested, accepted + own.accepted
    return written, {"accepted / drafted": accepted / drafted, "accepted / tested": accepted / tested}
