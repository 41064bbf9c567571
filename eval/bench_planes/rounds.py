"""How long is a round of a chain whose target streams its low planes, and what bounds it?"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

import hf_mlspec
from eval.plans.places import TRACES
from hf_mlspec.evaluation import ReplayResult, Trace, read_trace, replay
from hf_mlspec.nn.plane_source import PlaneCounts

from .captured import TRACE, draft_step
from .models import budget_of, bus_speed, dense_bytes, model_of, plane_bytes, source_of


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """Of all planes resident, and of the model streamed, each module by module and compiled."""
    model, shape = model_of(options), "tiny" if options.quick else options.shape
    engines = (options.engine,) if options.engine else ("modules", None)
    trace = read_trace(TRACES / TRACE)
    dense = dense_bytes(model)
    speed = bus_speed(options.device)
    yield {"shape": shape, "planes_bytes": plane_bytes(model), "other_bytes": dense, "bus_gb_s": speed / 1e9}
    for engine in engines:
        yield _replayed(model, trace, options, engine=engine, name=f"resident, {engine or 'compiled'}")
        yield _replayed(model, trace.alone(), options, engine=engine, name=f"resident alone, {engine or 'compiled'}")
    step = draft_step(model, options)
    yield {"draft_step_ms": step * 1e3}
    hf_mlspec.clear(model)
    budget = budget_of(model, options, dense)
    begin = time.perf_counter()
    hf_mlspec.stream_planes(model, budget, top_planes=options.top_planes)
    source = source_of(model)
    yield {
        "streamed_in_s": time.perf_counter() - begin, "budget": budget, "used": source.used, "slots": source.slots,
        "low_bytes": source.store.nbytes, "store": source.store.word, "pinned": source.store.pinned,
        "layers_streamed": sum(not one.resident for one in source.layers), "layers": len(source.layers),
    }  # fmt: skip
    for engine in engines:
        told = {"engine": engine, "speed": speed, "draft_step": step}
        yield _replayed(model, trace, options, name=f"streamed, {engine or 'compiled'}", **told)
        yield _replayed(model, trace.alone(), options, name=f"streamed alone, {engine or 'compiled'}", **told)


def prompts(options: argparse.Namespace) -> Iterator[dict]:
    """Prefills, in the same model: resident first."""
    model = model_of(options)
    lengths = (16, 64) if options.quick else (256, 2048)
    resident = [_prefill(model, length, options) for length in lengths]
    hf_mlspec.clear(model)
    hf_mlspec.stream_planes(model, budget_of(model, options, dense_bytes(model)), top_planes=options.top_planes)
    for length, seconds in zip(lengths, resident, strict=True):
        streamed = _prefill(model, length, options)
        yield {"tokens": length, "resident_s": seconds, "streamed_s": streamed, "over": streamed / seconds - 1}


def _prefill(model: PreTrainedModel, length: int, options: argparse.Namespace) -> float:
    ids = torch.randint(0, 100, (1, length), device=options.device)
    times = []
    with torch.inference_mode():
        for _ in range(options.repeats + 1):
            begin = time.perf_counter()
            model(ids, logits_to_keep=1).logits.sum().item()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _replayed(
    model: PreTrainedModel, trace: Trace, options: argparse.Namespace, *, name: str, engine: str | None = None,
    speed: float = 0.0, draft_step: float = 0.0,
) -> dict:  # fmt: skip
    """The best of some replays. A round: a draft of every level and a check. draft_step: seconds of one alone."""
    levels = [f"planes{options.top_planes}"] if trace.levels else []
    config = hf_mlspec.SpeculationConfig(engine=engine)
    takes: list[tuple[ReplayResult, PlaneCounts | None]] = []
    for _ in range(options.repeats):
        source, counts = source_of(model), None
        how = {"max_new_tokens": options.tokens, "rows": range(options.rows), "speculation_config": config}
        if source is None:
            takes.append((replay(model, trace, levels, **how), counts))
            continue
        with source.counting() as counts:
            takes.append((replay(model, trace, levels, **how), counts))
    stats, counts = min(((take.stats, counts) for take, counts in takes), key=lambda own: own[0].seconds)
    rounds = stats.target_passes - options.rows
    decoding = stats.seconds - stats.prefill_seconds
    drafting = sum(level.seconds - level.prefill_seconds for level in stats.levels)
    if stats.levels and not drafting:  # a round was one graph
        drafting = stats.levels[0].forwards / (rounds + options.rows) * rounds * draft_step
    found = {
        "name": name, "tokens_s": (stats.new_tokens - stats.prefill_tokens) / decoding, "rounds": rounds,
        "round_ms": decoding / rounds * 1e3, "draft_ms": drafting / rounds * 1e3,
        "tokens_a_round": (stats.new_tokens - stats.prefill_tokens) / rounds,
    }  # fmt: skip
    if counts is not None:
        bus = counts.fetched_bytes / (rounds + options.rows) / speed * 1e3 if speed else 0.0
        bound = max(bus, found["draft_ms"])
        found |= {"bus_floor_ms": bus, "over_bound": found["round_ms"] / bound, **vars(counts)}
    return found
