"""How long is a round that is one graph, over streamed planes, with the top planes as a draft and a tiny model below?

What bounds it: the low planes that the bus has to bring, or drafting. Drafting is timed in rounds of its own: with two
levels a step of the top planes alone, with three captured rounds whose target reads the top planes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import hf_mlspec
from eval.plans.places import TRACES
from eval.targets import random_model
from hf_mlspec.evaluation import Trace, read_trace, replay, replay_captured, reschedule

from .models import budget_of, bus_speed, dense_bytes, model_of, plane_bytes, source_of

TRACE = "code-76m-planes8-planes4-long-humaneval.json"
CHAIN = "code-76m-planes8-planes4-code-4m-long-humaneval.json"  # a tiny model below
DRAFT = "code-76m-code-4m-humaneval.json"  # it alone below the target
LENGTHS = (16,)  # tokens of a draft
CHAIN_LENGTHS = ((16, 3), (24, 5), (16, 7))  # likewise, and of the tiny level below it


class Drafted(NamedTuple):
    """Levels below a target, a trace of them, and seconds of a round's drafts."""

    name: str
    levels: list[Any]
    trace: Trace
    seconds: float


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """Resident, then streamed: with one level and with two; rounds of the host beside them."""
    model, tiny = model_of(options), tiny_model(options)
    dense, speed = dense_bytes(model) + sum(p.nbytes for p in tiny.parameters()), bus_speed(options.device)
    yield {"planes_bytes": plane_bytes(model), "other_bytes": dense, "bus_gb_s": speed / 1e9}
    step = draft_step(model, options)
    chains = [*pairs(options, step), *threes(model, tiny, options)]
    for one in chains:
        yield {"name": one.name, "drafting_ms": one.seconds * 1e3}
    yield from (captured(model, one, options, "resident") for one in chains)
    hf_mlspec.clear(model)
    begin = time.perf_counter()
    hf_mlspec.stream_planes(model, budget_of(model, options, dense), top_planes=options.top_planes)
    source = source_of(model)
    yield {
        "streamed_in_s": time.perf_counter() - begin, "used": source.used, "slots": source.slots,
        "layers_streamed": sum(not one.resident for one in source.layers), "layers": len(source.layers),
    }  # fmt: skip
    for one in chains:
        if source.copies_in_graphs:
            yield captured(model, one, options, "streamed", speed)
        yield stepped(model, one, options, speed)


def tiny_model(options: argparse.Namespace) -> PreTrainedModel:
    """Of random weights, with the target's vocabulary."""
    shape = "tiny" if options.quick else options.tiny
    return random_model(shape, str(options.device), 1, tie_word_embeddings=True)


def pairs(options: argparse.Namespace, step: float) -> Iterator[Drafted]:
    """Of one level, the top planes. step: seconds of a token of it."""
    trace = read_trace(TRACES / TRACE)
    for length in LENGTHS[: 1 if options.quick else None]:
        yield Drafted(f"{length} drafted", [level_of(options)], reschedule(trace, length), length * step)


def threes(model: PreTrainedModel, tiny: PreTrainedModel, options: argparse.Namespace) -> Iterator[Drafted]:
    """Of two levels."""
    chain, draft = read_trace(TRACES / CHAIN), read_trace(TRACES / DRAFT)
    for length, below in CHAIN_LENGTHS[: 1 if options.quick else None]:
        rounds = -(-length // (below + 1))
        with hf_mlspec.precision_switch(model).at(level_of(options)):
            inner = Drafted("", [tiny], reschedule(draft, below), 0.0)
            each = captured(model, inner, options, "")["round_ms"] / 1e3
        name = f"{rounds} rounds of {below} drafted"
        yield Drafted(name, [level_of(options), tiny], reschedule(chain, [length, below]), rounds * each)


def level_of(options: argparse.Namespace) -> str:
    return f"planes{options.top_planes}"


def draft_step(model: PreTrainedModel, options: argparse.Namespace) -> float:
    """Seconds of a compiled step that reads the top planes alone, from the device's time for rounds of 8 of them."""
    ids = torch.randint(0, 100, (1, 64), device=options.device)
    how = {"assistant_models": [], "max_new_tokens": 65, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with hf_mlspec.precision_switch(model).at(level_of(options)):
        for _ in range(2):
            model.generate(ids, **how)
    stats = hf_mlspec.last_stats(model)
    hf_mlspec.clear(model)
    return (stats.seconds - stats.prefill_seconds) / (stats.new_tokens - stats.prefill_tokens)


def captured(
    model: PreTrainedModel, one: Drafted, options: argparse.Namespace, name: str, speed: float = 0.0
) -> dict:
    """Rounds that are one graph, captured before they are timed; the best of some replays."""
    config = hf_mlspec.SpeculationConfig(engine="cuda")
    how = {**_how(options), "speculation_config": config}
    takes = [replay_captured(model, one.trace, one.levels, **how) for _ in range(options.repeats)]
    return _line(model, one, options, f"{name}, captured, {one.name}", speed, takes)


def stepped(model: PreTrainedModel, one: Drafted, options: argparse.Namespace, speed: float) -> dict:
    """Rounds of the host, over the same trace, each step launched or replayed as it comes."""
    takes = [replay(model, one.trace, one.levels, **_how(options)) for _ in range(options.repeats)]
    return _line(model, one, options, f"streamed, host rounds, {one.name}", speed, takes)


def _how(options: argparse.Namespace) -> dict:
    return {"max_new_tokens": options.tokens, "rows": range(options.rows)}


def _line(
    model: PreTrainedModel, one: Drafted, options: argparse.Namespace, name: str, speed: float, takes: list
) -> dict:
    stats = min((take.stats for take in takes), key=lambda own: own.seconds - own.prefill_seconds)
    rounds, decoding = stats.target_passes - options.rows, stats.seconds - stats.prefill_seconds
    tokens, source = stats.new_tokens - stats.prefill_tokens, source_of(model)
    found = {
        "name": name, "rounds": rounds, "round_ms": decoding / rounds * 1e3, "tokens_s": tokens / decoding,
        "tokens_a_round": tokens / rounds, "drafting_ms": one.seconds * 1e3,
    }  # fmt: skip
    if source is None:
        return found
    low = sum((own.low - own.kept) * source.sizes[own.place].plane for own in source.layers)
    bus = low / speed * 1e3
    return found | {"bus_ms": bus, "over_bound": found["round_ms"] / max(bus, one.seconds * 1e3)}
