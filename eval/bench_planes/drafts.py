"""Is a draft whose planes a router picks faster than one of fixed planes, at the same acceptance, all planes resident?

Acceptance is replayed, so that time alone differs: the first planes of every block in rounds that are one graph and in
rounds of the host; a router's choice, which runs in rounds of the host, for each prompt and for each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from transformers import PreTrainedModel

import hf_mlspec
from eval.plans.places import TRACES
from hf_mlspec.evaluation import Trace, read_trace, replay, replay_captured, reschedule
from hf_mlspec.routing.blocks import blocks_of

from .captured import TRACE
from .models import model_of
from .routed import made_router

LENGTHS = (4, 8)  # tokens of a draft
FIXED = ("planes3", "planes4", "planes6")


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """Of every length: fixed planes, then the router's."""
    model, trace = model_of(options), read_trace(TRACES / TRACE)
    router = made_router(blocks_of(model))
    yield _line(model, "the target alone", "host", options, trace.alone(), [])
    for length in LENGTHS[: 1 if options.quick else None]:
        own = reschedule(trace, length)
        for level in FIXED:
            if options.device.type == "cuda":
                yield _line(model, f"{level}, {length} drafted", "captured", options, own, [level])
            yield _line(model, f"{level}, {length} drafted", "host", options, own, [level])
        for every in ("prompt", "step"):
            config = {"router": router, "router_every": every}
            yield _line(model, f"routed every {every}, {length} drafted", "host", options, own, ["routed"], config)


def _line(
    model: PreTrainedModel, name: str, rounds: str, options: argparse.Namespace, trace: Trace, levels: list[str],
    config: dict | None = None,
) -> dict:  # fmt: skip
    """The best of some replays."""
    how = {"max_new_tokens": options.tokens, "rows": range(options.rows),
           "speculation_config": hf_mlspec.SpeculationConfig(**(config or {}))}  # fmt: skip
    run = replay_captured if rounds == "captured" else replay
    takes = [run(model, trace, levels, **how).stats for _ in range(options.repeats)]
    hf_mlspec.clear(model)
    stats = min(takes, key=lambda own: own.seconds - own.prefill_seconds)
    decoding, tokens = stats.seconds - stats.prefill_seconds, stats.new_tokens - stats.prefill_tokens
    passes = stats.target_passes - options.rows
    return {"name": name, "rounds": rounds, "tokens_s": tokens / decoding, "round_ms": decoding / passes * 1e3,
            "tokens_a_round": tokens / passes}  # fmt: skip
