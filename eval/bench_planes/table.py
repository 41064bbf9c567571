"""What do five systems take in calls of generate, in the form of QAQ's Table 1, on a shape with random weights?

BF16, static 8 and 4 planes, and planes that a router picks, all in memory or loaded on demand. Time to the first
token, time of a token behind it, one pass over a text in windows of 2,048 tokens, each read as a prompt, and weights
on the device. Each call makes its engine, as a user's does. The router is made, not trained (routed.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

import hf_mlspec
from eval.random_packed import GROUP
from eval.targets import random_model
from hf_mlspec.nn.replace import attach_quantizer
from hf_mlspec.routing.blocks import blocks_of

from .models import budget_of, bus_speed, dense_bytes, model_of, plane_bytes, source_of
from .routed import fit_guesses, made_router

_SHOWN = 8  # calls that are not timed: they load kernels, and planes that they read come to stay
_TOKENS, _QUICK_TOKENS = 64, 24  # behind a prompt
_COMPARED = 4  # prompts whose ids are compared


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """BF16 first, on demand last. over: of the first token beyond the same system in memory."""
    shape = "tiny-2x512" if options.quick else options.shape
    dense = random_model(shape, str(options.device))
    yield _measured("BF16", dense, options, held=sum(own.nbytes for own in dense.parameters()))
    hf_mlspec.clear(dense)
    del dense
    model = model_of(options)
    attach_quantizer(model, {"format": "planes", "group_size": GROUP})
    router = made_router(blocks_of(model))
    fit_guesses(model, router, options)
    whole, rest = plane_bytes(model), dense_bytes(model)
    for planes in (8, 4):
        held = rest + whole * planes // 8
        yield _measured(f"static {planes}", model, options, held=held, bits=f"planes{planes}")
    hf_mlspec.route(model, router)
    before = _measured("routed, all in memory", model, options, held=rest + whole)
    yield before
    wanted = _ids(model, options)
    hf_mlspec.clear(model)
    budget = budget_of(model, options, rest)
    hf_mlspec.stream_planes(model, budget, top_planes=options.top_planes)
    source = source_of(model)
    found = _measured("routed, loaded on demand", model, options, held=0)
    found |= {"held": rest + source.used, "less_than_static_8": 1 - (rest + source.used) / (rest + whole)}
    for key in [key for key in found if key.startswith(("first_", "token_", "pass"))]:
        found[f"over_{key}"] = found[key] / before[key] - 1
    yield found
    differ = sum(own != other for own, other in zip(_ids(model, options), wanted, strict=True))
    yield {"ids_compared": len(wanted), "ids_that_differ": differ, "bus_gb_s": bus_speed(options.device) / 1e9}
    hf_mlspec.route(model, None)


def _measured(name: str, model: PreTrainedModel, options: argparse.Namespace, *, held: int, bits: str = "") -> dict:
    """Medians of prompts of random tokens."""
    found: dict = {"name": name}
    with hf_mlspec.precision_switch(model).at(bits) if bits else nullcontext():
        new = _QUICK_TOKENS if options.quick else _TOKENS
        for tokens in (16, 64) if options.quick else (256, 2048):
            source = source_of(model) if name.startswith("routed") else None
            first = [_seconds(model, tokens, 1, options)[0] for _ in range(_SHOWN + options.repeats)][_SHOWN:]
            before = source.counts.fetched_bytes if source else 0
            _seconds(model, tokens, 1, options)
            fetched = source.counts.fetched_bytes - before if source else 0
            each = [_seconds(model, tokens, 1 + new, options)[0] for _ in range(1 + options.repeats)][1:]
            first_s = statistics.median(first)
            found |= {f"first_{tokens}_ms": first_s * 1e3, f"fetched_{tokens}": fetched,
                      f"token_{tokens}_ms": (statistics.median(each) - first_s) / new * 1e3}  # fmt: skip
        begin = time.perf_counter()
        for _ in range(2 if options.quick else options.windows):
            _seconds(model, 64 if options.quick else 2048, 1, options)
        found["pass_s"] = time.perf_counter() - begin
    return found | {"held": held}


def _seconds(
    model: PreTrainedModel, tokens: int, new: int, options: argparse.Namespace, seed: int | None = None
) -> tuple[float, list[int]]:
    """Of a call of generate behind random tokens; what it wrote."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (1, tokens), generator=generator).to(options.device)
    begin = time.perf_counter()
    out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0,
                         assistant_models=[])[0, tokens:].tolist()  # fmt: skip
    return time.perf_counter() - begin, out


def _ids(model: PreTrainedModel, options: argparse.Namespace) -> list[int]:
    tokens, new = (16, _QUICK_TOKENS) if options.quick else (256, _TOKENS)
    return [own for seed in range(_COMPARED) for own in _seconds(model, tokens, new, options, seed)[1]]
