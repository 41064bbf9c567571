"""What do prompts and tokens take at widths that a router picks, beside static ones, resident and on demand?

The router is made, not trained: some blocks read 6 planes, the others 4, so that it is 4.4 of a weight, and one block
in eight leaves it to the query, or, where every step chooses, to each token behind it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

import hf_mlspec
from hf_mlspec.ops import choose_of_prompt, chooses_on_device
from hf_mlspec.routing.blocks import Block, average_bits, blocks_of
from hf_mlspec.routing.choice import widths_of
from hf_mlspec.routing.cpu_engine import RoutedCpuEngine
from hf_mlspec.routing.device_choice import weights_on_device
from hf_mlspec.routing.engine import RoutedCudaEngine, RoutedEngine, routed_engine
from hf_mlspec.routing.features import pooled
from hf_mlspec.routing.foresight import LEAD, indices
from hf_mlspec.routing.passes import Routed
from hf_mlspec.routing.router import Router

from .models import budget_of, dense_bytes, model_of, plane_bytes, source_of

_STEPS = 24  # tokens behind the longest prompt; the first third captures
_SHOWN = 8  # prompts that are not timed: they load kernels, and planes that they read come to stay
_FITTED = 32  # prompts that guesses are fitted to
_NARROW, _WIDE, _AVERAGE = 4, 6, 4.4


def made_router(blocks: list[Block]) -> Router:
    """See above; the same for every run."""
    router, generator = Router(blocks), torch.Generator().manual_seed(0)
    order = torch.randperm(len(blocks), generator=generator).tolist()
    open_, rest, wide = order[: len(blocks) // 8], order[len(blocks) // 8 :], []
    while rest and average_bits([_WIDE if j in wide else _NARROW for j in range(len(blocks))], blocks) < _AVERAGE:
        wide.append(rest.pop())
    for place, one in enumerate(router.of):
        scores = torch.full_like(one.outer.bias, -100.0)
        for width in (_NARROW, _WIDE):
            chosen = place in open_ or width == (_WIDE if place in wide else _NARROW)
            scores[router.widths.index(width)] = 0.0 if chosen else -100.0
        with torch.no_grad():
            one.outer.bias.copy_(scores)
            if place in open_:
                one.outer.weight.normal_(generator=generator)
    return router.eval().requires_grad_(False)


def fit_guesses(model: PreTrainedModel, router: Router, options: argparse.Namespace) -> None:
    """Of what blocks to come choose, from random prompts, as training does."""
    blocks, tokens = blocks_of(model), 16 if options.quick else 256
    features, chosen = [[] for _ in blocks], [[] for _ in blocks]
    router.look_ahead()
    for _ in range(_FITTED):
        ids = torch.randint(0, 100, (1, tokens), device=options.device)
        with torch.no_grad(), Routed(router, blocks, [tokens]).over(model) as routed:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
        for place in range(len(blocks)):
            features[place].append(routed.features[place].cpu())
            chosen[place] += routed.widths[place]
    router.usual = [max(own) for own in chosen]
    for place, own in enumerate(router.ahead):
        own.fit(torch.cat(features[place]), indices(chosen[place + LEAD], router.widths, torch.device("cpu")))


def known_widths(router: Router) -> list[int]:
    """What a made router picks; the narrow width where it leaves it to the query."""
    narrow, wide = (router.widths.index(width) for width in (_NARROW, _WIDE))
    return [_WIDE if one.outer.bias[wide] > one.outer.bias[narrow] else _NARROW for one in router.of]


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """Resident first, then the same model on its budget. over: seconds of a prompt beyond those of resident planes."""
    model = model_of(options)
    router = made_router(blocks_of(model))
    fit_guesses(model, router, options)
    resident = list(_all(model, router, options))
    yield from ({"planes": "resident", **one} for one in resident)
    whole, dense = plane_bytes(model), dense_bytes(model)
    budget = budget_of(model, options, dense)
    hf_mlspec.clear(model)
    hf_mlspec.stream_planes(model, budget, top_planes=options.top_planes)
    yield {"planes": "streamed", "budget": budget, "used": source_of(model).used, "less_than_static":
           1 - (source_of(model).used + dense) / (whole + dense)}  # fmt: skip
    beside = {(one["tokens"], one["widths"]): one for one in resident}
    for one in _all(model, router, options, ("known", "routed", "steps")):
        before = beside[one["tokens"], one["widths"]]
        yield {"planes": "streamed", **one, "over": one["prompt_ms"] / before["prompt_ms"] - 1,
               "token_over": one["token_ms"] / before["token_ms"] - 1}  # fmt: skip
    if _by_kernels(options):
        yield from (_choosing(router, tokens, options) for tokens in _lengths(options))


def choosing(options: argparse.Namespace) -> Iterator[dict]:
    """What the choices of a prompt take by themselves, all planes resident."""
    if options.device.type == "cuda" and not _by_kernels(options):
        raise ValueError("choices alone are timed on a CPU, and on GPUs where a kernel makes them: an H100 or H200")
    model = model_of(options)
    router = made_router(blocks_of(model))
    fit_guesses(model, router, options)
    for tokens in _lengths(options) if options.quick or _by_kernels(options) else (64, 256, 1024):
        yield _choosing(router, tokens, options) if _by_kernels(options) else _share(model, router, tokens, options)


def _by_kernels(options: argparse.Namespace) -> bool:
    """Whether one kernel a block chooses; a CPU has the op in plain torch, for tests, and the host chooses there."""
    return options.device.type == "cuda" and chooses_on_device(options.device)


def _lengths(options: argparse.Namespace) -> tuple[int, int]:
    """Of prompts."""
    return (16, 64) if options.quick else (256, 2048)


def _share(model: PreTrainedModel, router: Router, tokens: int, options: argparse.Namespace) -> dict:
    """What the choices of all blocks for a prompt take where the host makes them, beside a prompt at known widths: the
    least processor time of some runs each, which other programs on the machine change little."""
    engine, known, blocks = _engine(model, router, tokens), known_widths(router), blocks_of(model)
    x = torch.randn(1, tokens, blocks[0].features, device=options.device, dtype=torch.bfloat16)
    choosing, prompts = [], []
    with torch.inference_mode():
        for _ in range(options.repeats + 1):
            begin = time.process_time()
            for place, block in enumerate(blocks):
                widths_of(router, blocks, place, pooled(x, [tokens], block.name))
            choosing.append(time.process_time() - begin)
            engine.start(1, options.device)
            engine.chosen = [list(known)]
            begin = time.process_time()
            engine.feed([torch.randint(0, 100, (tokens,)).tolist()])
            prompts.append(time.process_time() - begin)
    found = {"tokens": tokens, "blocks": len(blocks), "choosing_cpu_ms": min(choosing) * 1e3}
    return found | {"prompt_cpu_ms": min(prompts) * 1e3, "share": min(choosing) / min(prompts)}


def _choosing(router: Router, tokens: int, options: argparse.Namespace) -> dict:
    """What the choices of all blocks for a prompt take by themselves, on a GPU as one graph: the best of some runs."""
    weights = weights_on_device(router, options.device)
    width = weights[0].inner.shape[1]
    x = [torch.randn(tokens, width, device=options.device, dtype=torch.bfloat16) for _ in range(8)]
    mean, times = torch.empty(width, device=options.device), []

    def choose() -> None:
        for place, own in enumerate(weights):
            choose_of_prompt(x[place % len(x)], mean, own)

    choose()
    if options.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            choose()
        choose = graph.replay
    for _ in range(options.repeats + 3):
        mean.tolist()  # waits
        begin = time.perf_counter()
        choose()
        mean.tolist()
        times.append(time.perf_counter() - begin)
    return {"tokens": tokens, "blocks": len(weights), "choosing_ms": min(times) * 1e3}


def _all(
    model: PreTrainedModel, router: Router, options: argparse.Namespace,
    names: tuple = ("known", "routed", "steps", "8"),
) -> Iterator[dict]:  # fmt: skip
    known = known_widths(router)
    for tokens in _lengths(options):
        widths = {"known": known, "routed": None, "steps": None, "8": [8] * len(known)}
        for name in names:
            own = router.choosing("step" if name == "steps" else "prompt")
            yield {"widths": name, "tokens": tokens, **_timed(model, own, widths[name], tokens, options)}


def _timed(
    model: PreTrainedModel, router: Router, widths: list[int] | None, tokens: int, options: argparse.Namespace
) -> dict:
    """Medians of prompts of random tokens, and of the tokens behind the last one. widths: None: chosen."""
    engine, counts = _engine(model, router, tokens), source_of(model)
    with torch.inference_mode():
        prompts, row, bits = [], [], []
        for _ in range(options.repeats + _SHOWN):
            row = torch.randint(0, 100, (tokens,)).tolist()
            engine.start(1, options.device)
            engine.chosen = [None if widths is None else list(widths)]
            before = 0 if counts is None else counts.counts.fetched_bytes
            prompts.append(_seconds(engine, row))
            fetched = 0 if counts is None else counts.counts.fetched_bytes - before
            bits.append(average_bits(engine.chosen[0], engine.blocks))
        steps = [_seconds(engine, row) for _ in range(_STEPS)][_STEPS // 3 :]
    return {
        "engine": engine.name, "bits": statistics.mean(bits), "prompt_ms": statistics.median(prompts[_SHOWN:]) * 1e3,
        "prompt_fetched": fetched, "token_ms": statistics.median(steps) * 1e3,
    }  # fmt: skip


def _engine(model: PreTrainedModel, router: Router, tokens: int) -> RoutedEngine | RoutedCudaEngine | RoutedCpuEngine:
    """For a prompt of so many tokens and the steps behind it."""
    return routed_engine(model, router, name=None, prepare=True, capacity=tokens + _STEPS + 8, num_positions=None)


def _seconds(engine: RoutedEngine | RoutedCudaEngine | RoutedCpuEngine, row: list[int]) -> float:
    """Of a pass that ends in a token, which the row gains."""
    begin = time.perf_counter()
    row.append(int(engine.feed([row])[0, -1].argmax()))
    return time.perf_counter() - begin
