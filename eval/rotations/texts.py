"""Which tokens is a model calibrated on, and which prompts does it continue?"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from eval.scored import WINDOW, prompts_of


def drawn_rows(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Windows of the texts to calibrate on, alike many of each, for us and for others."""
    rows, count = [], args.samples // len(args.calibration)
    for file in args.calibration:
        ids = tokenizer(_text_of(file), add_special_tokens=False)["input_ids"]
        drawn = random.Random(args.seed).sample(range(len(ids) // WINDOW), count)
        rows += [ids[index * WINDOW : (index + 1) * WINDOW] for index in sorted(drawn)]
    return rows


def _text_of(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return text
    lines = [json.loads(line) for line in text.splitlines() if line]
    return "\n\n".join(f"{asked(line['question'])} {line['answer']}" for line in lines)


def asked(question: str) -> str:
    """A prompt."""
    return f"Question: {question}\nAnswer:"


def prompts_by_source(args: argparse.Namespace, tasks: list[dict[str, Any]], tokenizer: Any) -> dict[str, list[dict]]:
    """Inputs of calls: HumanEval's, and where it is named GSM8K's."""
    sources = {"HumanEval": tasks[: args.prompts]}
    if args.gsm8k is not None:
        lines = args.gsm8k.read_text(encoding="utf-8").splitlines()[: args.prompts]
        sources["GSM8K"] = [{"prompt": asked(json.loads(line)["question"])} for line in lines]
    return {name: batches(prompts_of(own, tokenizer), args.batch_size, args.device) for name, own in sources.items()}


def batches(prompts: list[torch.Tensor], size: int, device: str) -> list[dict[str, torch.Tensor]]:
    """Inputs of calls of so many rows, padded on the left. prompts: int64 ``[1, tokens]`` each."""
    made = []
    for first in range(0, len(prompts), size):
        rows = [ids[0] for ids in prompts[first : first + size]]
        width = max(map(len, rows))
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            ids[index, width - len(row) :] = row
            mask[index, width - len(row) :] = 1
        made.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return made
