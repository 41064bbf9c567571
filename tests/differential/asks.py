"""What is asked of a model: prompts, and how tokens are chosen and rows end? As plain values, and as arguments."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers.generation import (
    GenerationMixin,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

PAD = 0
_LEAVES_OUT = "padding_lengths" in GenerationMixin._get_logits_processor.__code__.co_varnames
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def draw_ask(chance: random.Random, vocabulary: int) -> dict[str, Any]:
    """lengths: of the prompts. new: tokens a row may gain. Words of generate are as there."""
    rows = chance.choice([1, 1, 2, 3, 4])
    ask: dict[str, Any] = {
        "lengths": [chance.choice([1, 2, 3, chance.randint(1, 24)]) for _ in range(rows)],
        "seed": chance.randrange(1 << 20),
        "repeats": chance.random() < 0.5,
        "new": chance.choice([1, 2, 3, 6, 9, 14]),
    }
    if chance.random() < 0.4:
        ask["sample"] = chance.randrange(1 << 20)
        ask["temperature"] = chance.choice([1.0, 0.3, 0.8, 1.7])
        ask["top_k"] = chance.choice([0, 0, 1, 5, 40])
        if chance.random() < 0.3:
            ask["top_p"] = chance.choice([0.3, 0.8, 0.95])
        if chance.random() < 0.1:
            ask["min_p"] = 0.05
        if chance.random() < 0.1:
            ask["typical_p"] = 0.6
    if chance.random() < 0.2:
        ask["repetition_penalty"] = chance.choice([1.3, 0.8])
    if chance.random() < 0.1:
        ask["no_repeat_ngram_size"] = chance.choice([1, 2])
    if chance.random() < 0.1:
        ask["suppress_tokens"] = sorted(chance.sample(range(vocabulary), vocabulary // 3))
    if chance.random() < 0.4:
        ask["eos"] = sorted(chance.sample(range(1, vocabulary), vocabulary // 8))
    if chance.random() < 0.15:
        ask["stop"] = [*chance.sample(_LETTERS, 3), chance.choice(_LETTERS) + chance.choice(_LETTERS)]
    return ask


def prompts_of(ask: dict[str, Any], vocabulary: int) -> list[list[int]]:
    """One prompt a row; those that repeat themselves are what a lookup finds drafts in."""
    chance = random.Random(ask["seed"])
    made = []
    for length in ask["lengths"]:
        row = [chance.randrange(3, vocabulary) for _ in range(length)]
        if ask["repeats"] and length > 6:
            part = row[: chance.randint(1, 5)]
            row = (part * length)[:length]
        made.append(row)
    return made


def padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch with the padding on the left."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def options_of(ask: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Arguments of generate, and of a request."""
    sampled = "sample" in ask
    options: dict[str, Any] = {"max_new_tokens": ask["new"], "do_sample": sampled, "pad_token_id": PAD}
    options["eos_token_id"] = ask.get("eos")
    for word in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
        if sampled and word in ask:
            options[word] = ask[word]
    for word in ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens"):
        if word in ask:
            options[word] = ask[word]
    if "stop" in ask:
        options["stop_strings"] = ask["stop"]
    return options


def processors_of(ask: dict[str, Any], padding: int) -> LogitsProcessorList:
    """What turns logits into scores, in the order of transformers' own loop. padding: tokens in front of the prompt,
    which later releases leave out of a repetition penalty."""
    made = LogitsProcessorList()
    if ask.get("repetition_penalty", 1.0) != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(ask["repetition_penalty"], padding * _LEAVES_OUT))
    if "no_repeat_ngram_size" in ask:
        made.append(NoRepeatNGramLogitsProcessor(ask["no_repeat_ngram_size"]))
    if "suppress_tokens" in ask:
        made.append(SuppressTokensLogitsProcessor(ask["suppress_tokens"]))
    if "sample" not in ask:
        return made
    if ask["temperature"] != 1.0:
        made.append(TemperatureLogitsWarper(ask["temperature"]))
    if ask["top_k"]:
        made.append(TopKLogitsWarper(ask["top_k"]))
    if "top_p" in ask:
        made.append(TopPLogitsWarper(ask["top_p"]))
    if "min_p" in ask:
        made.append(MinPLogitsWarper(ask["min_p"]))
    if "typical_p" in ask:
        made.append(TypicalLogitsWarper(ask["typical_p"]))
    return made


def ends_at(ask: dict[str, Any], tokenizer: Any, prompt: list[int], new: list[int]) -> int:
    """How many of these new tokens a row has when it ends."""
    ends = set(ask.get("eos") or ())
    stop = StopStringCriteria(tokenizer, ask["stop"]) if "stop" in ask else None
    for count in range(1, len(new) + 1):
        if new[count - 1] in ends:
            return count
        if stop is not None and bool(stop(torch.tensor([prompt + new[:count]]), None)[0]):
            return count
    return len(new)
