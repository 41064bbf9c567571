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
from eval.random_packed import random_planes_model
from hf_mlspec.evaluation import ReplayResult, Trace, read_trace, replay, replay_captured, reschedule
from hf_mlspec.nn.plane_source import PlaneCounts
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.plane_budget import bytes_of

LENGTHS = (8, 16, 24)  # tokens of a draft
TRACE = "code-76m-planes8-planes4-long-humaneval.json"


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
    step = _draft_step(model, options)
    yield {"draft_step_ms": step * 1e3}
    yield from captured(model, trace, options, step, "resident")
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
    yield from captured(model, trace, options, step, "streamed", speed)


def captured(
    model: PreTrainedModel, trace: Trace, options: argparse.Namespace, step: float, name: str, speed: float = 0.0
) -> Iterator[dict]:
    """Rounds that are one graph, of several lengths; none without a GPU. step: seconds of a draft step."""
    for length in LENGTHS if options.device.type == "cuda" else ():
        fixed, source, takes = reschedule(trace, length), source_of(model), []
        how = {"max_new_tokens": options.tokens, "rows": range(options.rows)}
        for _ in range(options.repeats):
            takes.append(replay_captured(model, fixed, [f"planes{options.top_planes}"], **how).stats)
        stats = min(takes, key=lambda own: own.seconds - own.prefill_seconds)
        rounds, decoding = stats.target_passes - options.rows, stats.seconds - stats.prefill_seconds
        found = {
            "name": f"{name}, captured, {length} drafted", "rounds": rounds, "round_ms": decoding / rounds * 1e3,
            "tokens_s": (stats.new_tokens - stats.prefill_tokens) / decoding, "draft_ms": length * step * 1e3,
            "tokens_a_round": (stats.new_tokens - stats.prefill_tokens) / rounds,
        }  # fmt: skip
        if source is not None:
            low = sum((one.low - one.kept) * source.sizes[one.place].plane for one in source.layers)
            bus = low / speed * 1e3
            found |= {"bus_ms": bus, "over_bound": found["round_ms"] / max(bus, found["draft_ms"])}
        yield found


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


def model_of(options: argparse.Namespace) -> PreTrainedModel:
    """The shape with random planes; tiny where it is quick."""
    return random_planes_model("tiny-2x512" if options.quick else options.shape, options.device).eval()


def bus_speed(device: torch.device) -> float:
    """Bytes a second from pinned memory to the device, the best of five copies of 1 GiB."""
    if device.type != "cuda":
        return float("nan")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there, times = torch.empty_like(host, device=device), []
    for _ in range(5):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return host.numel() / min(times)


def _draft_step(model: PreTrainedModel, options: argparse.Namespace) -> float:
    """Seconds of a compiled step that reads the top planes alone, from the device's time for rounds of 8 of them."""
    ids = torch.randint(0, 100, (1, 64), device=options.device)
    how = {"assistant_models": [], "max_new_tokens": 65, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with hf_mlspec.precision_switch(model).at(f"planes{options.top_planes}"):
        for _ in range(2):
            model.generate(ids, **how)
    stats = hf_mlspec.last_stats(model)
    hf_mlspec.clear(model)
    return (stats.seconds - stats.prefill_seconds) / (stats.new_tokens - stats.prefill_tokens)


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


def source_of(model: PreTrainedModel):
    return next(own for own in model.modules() if isinstance(own, PlanesLinear)).source


def plane_bytes(model: PreTrainedModel) -> int:
    return sum(part.nbytes for own in model.modules() if isinstance(own, PlanesLinear) for part in own.parts("weight"))


def dense_bytes(model: PreTrainedModel) -> int:
    """Of what is not in planes: embedding, head, norms."""
    planes = {id(p) for own in model.modules() if isinstance(own, PlanesLinear) for p in own.parameters()}
    return sum(p.nbytes for p in model.parameters() if id(p) not in planes)


def budget_of(model: PreTrainedModel, options: argparse.Namespace, dense: int) -> int:
    """Of planes: what the device's budget leaves beside embedding, head and norms. Quick: three quarters."""
    return plane_bytes(model) * 3 // 4 if options.quick else bytes_of(options.budget) - dense
