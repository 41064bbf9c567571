"""How many tokens a second does one way of `generate` write after its prompts were read, and what did it count?"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_mlspec
from eval.gpu_timing import synchronize


@dataclass
class Rate:
    """Decode-only rates of several calls, and what the last of them counted.

    tokens_per_second: of all rows together. ids: of the last call, new tokens only.
    """

    tokens_per_second: float
    repeats: int
    stats: hf_mlspec.SpeculationStats
    ids: Tensor
    counts: dict[str, Any] = field(default_factory=dict)


def decode_rate(
    model: PreTrainedModel, inputs: dict[str, Tensor], levels: list[Any], new_tokens: int, repeats: int = 3,
    **config: Any,
) -> Rate:
    """Median over `repeats` calls of the chain, greedy, after one that builds and captures; [] is the target alone.

    RuntimeError where a call settled everything in the pass that reads the prompt.
    """
    rates = []
    for _ in range(repeats + 1):
        output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
                                assistant_models=levels, speculation_config=config or None,
                                return_dict_in_generate=True)
        synchronize(inputs["input_ids"].device)
        stats = output.speculation
        tokens, seconds = stats.new_tokens - stats.prefill_tokens, stats.seconds - stats.prefill_seconds
        if tokens < 1 or seconds <= 0:
            raise RuntimeError(f"{new_tokens} new tokens leave nothing to time behind the pass that reads the prompt")
        rates.append(tokens / seconds)
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    return Rate(statistics.median(rates[1:]), repeats, stats, new, counts_of(stats))


def counts_of(stats: hf_mlspec.SpeculationStats) -> dict[str, Any]:
    """Acceptance by level and tokens a pass, for a line of results."""
    return {"tokens_per_pass": stats.tokens_per_target_pass,
            "acceptance": [level.acceptance for level in stats.levels],
            "drafted": [level.drafted for level in stats.levels]}


def rows_that_differ(one: Tensor, other: Tensor) -> int:
    """Rows whose ids differ; both padded with 0 behind their ends."""
    width = max(one.shape[1], other.shape[1])
    a, b = (torch.nn.functional.pad(ids, (0, width - ids.shape[1])) for ids in (one, other))
    return int((a != b).any(1).sum())
