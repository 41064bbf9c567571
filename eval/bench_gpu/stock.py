"""How long does a step take stock transformers: eager, in a CUDA graph, with its own compilation?"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache
from transformers.generation import StoppingCriteria, StoppingCriteriaList

import hf_mlspec
from eval.gpu_timing import capture, time_each

NEW_TOKENS = 20
GRAPH_REPEATS = 10


class StepClock(StoppingCriteria):
    """When did each step of `generate` end? It stops nothing; transformers waits for the device in every step."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def median(self) -> float:
        """Seconds of a step, without the first, which reads the prompt."""
        return statistics.median(after - before for before, after in itertools.pairwise(self.at))


def eager_step(model: PreTrainedModel, prompt: Tensor, new_tokens: int = NEW_TOKENS) -> float:
    """Seconds of one greedy step of `generate` on prompt int64 ``[batch, width]``."""
    return _clocked(model, prompt, new_tokens, calls=1)


def compiled_step(model: PreTrainedModel, prompt: Tensor, new_tokens: int = NEW_TOKENS) -> float:
    """The same with a static cache, which transformers compiles by itself: its first call takes half a minute, the
    second records its graphs, the third counts."""
    return _clocked(model, prompt, new_tokens, calls=3, cache_implementation="static")


def _clocked(model: PreTrainedModel, prompt: Tensor, new_tokens: int, calls: int, **options: Any) -> float:
    if prompt.is_cuda and calls == 1:
        stock_generate(model, prompt, 3, **options)  # libraries pick their kernels
    for _ in range(calls):
        clock = StepClock()
        stock_generate(model, prompt, new_tokens, stopping_criteria=StoppingCriteriaList([clock]), **options)
    return clock.median()


def stock_generate(model: PreTrainedModel, prompt: Tensor, new_tokens: int, **options: Any) -> Tensor:
    """transformers' own loop, whatever hf_mlspec installed."""
    was = hf_mlspec.enabled()
    hf_mlspec.disable()
    try:
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens,
                              do_sample=False, pad_token_id=0, **options)
    finally:
        if was:
            hf_mlspec.enable()


def graph_step(model: PreTrainedModel, prompt: Tensor) -> float:
    """Seconds of a forward pass of one token a row over a static cache of as many tokens as the prompt has, in a CUDA
    graph: what stock modules cost when nothing is launched from Python."""
    batch, kept = prompt.shape
    device = prompt.device
    cache = StaticCache(config=model.config, max_cache_len=kept + 8)
    lengths = torch.zeros(len(cache.layers), dtype=torch.long, device=device)  # one kernel sets all of them
    for layer, length in zip(cache.layers, lengths.unbind(), strict=True):
        layer.cumulative_length = length
    ids = prompt[:, -1:].clone()
    positions = torch.full((batch, 1), kept, device=device)
    mask = (torch.arange(kept + 8, device=device) <= kept).expand(batch, 1, 1, -1)

    def work() -> Tensor:
        lengths.fill_(kept)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                       use_cache=True).logits
        return logits[:, -1].argmax(-1)

    return time_each(capture(work, device), device, GRAPH_REPEATS).median
