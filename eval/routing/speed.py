"""What does routing cost a prefill, and how fast are steps beside static widths? Medians, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import hf_mlspec
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.passes import Routed
from hf_mlspec.routing.router import Router


def medians(
    ways: dict[str, Callable[[], object]], repeats: int, before: Callable[[str], object] = lambda name: None
) -> dict[str, float]:
    """Seconds of each way, all of them once in every turn; before: called with its name, not timed."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            before(name)
            begin = time.perf_counter()
            way()
            if turn:  # the first makes tiles and decoders
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(own) for name, own in seconds.items()}


@torch.no_grad()
def of_prefill(model: Any, router: Router, ids: torch.Tensor, repeats: int) -> dict[str, float]:
    """Seconds of a prefill with widths that are known and with widths chosen on the way; of ids ``[1, tokens]``."""
    blocks, length = blocks_of(model), ids.shape[1]
    with Routed(router, blocks, [length]).over(model) as routed:
        model(input_ids=ids, use_cache=False)
    known = routed.widths

    def run(lengths: list[int]) -> None:
        with Routed(router, blocks, lengths, known).over(model):
            model(input_ids=ids, use_cache=False, logits_to_keep=1)

    found = medians({"known widths": lambda: run([0]), "chosen": lambda: run([length])}, repeats)
    return {"tokens": length, **found, "share": found["chosen"] / found["known widths"] - 1}


def of_generate(model: Any, router: Router, ids: torch.Tensor, new_tokens: int, repeats: int) -> dict[str, float]:
    """Tokens a second of generate: routed once or every step, alone and with drafts of two planes, and all planes
    module by module and compiled."""
    how = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
           "attention_mask": torch.ones_like(ids)}  # fmt: skip

    def run(engine: str | None, *levels: str) -> None:
        model.generate(ids, assistant_models=list(levels), speculation_config={"engine": engine}, **how)

    def set_router(name: str) -> None:
        hf_mlspec.route(model, router if "routed" in name else None, every="step" if "step" in name else "prompt")

    ways = {"routed": (None,), "routed, planes2 drafts": (None, "planes2"), "routed every step": (None,),
            "routed every step, planes2 drafts": (None, "planes2"), "all planes, modules": ("modules",),
            "all planes, planes2 drafts": (None, "planes2"), "all planes": (None,)}  # fmt: skip
    ways = {name: partial(run, *own) for name, own in ways.items()}
    found = medians(ways, repeats, set_router)
    hf_mlspec.route(model, None)
    return {name: new_tokens / seconds for name, seconds in found.items()}
