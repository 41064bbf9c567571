"""Which kernels of a GPU do a prompt and a token take, resident and streamed, at known widths?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

import hf_mlspec
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.engine import routed_engine
from hf_mlspec.routing.router import Router

from .models import budget_of, dense_bytes, model_of, source_of
from .routed import known_widths, made_router

_MOST = 8  # kernels that are told, those that take most
_WARM = 4  # passes of a kind before: they load kernels, and planes that they read come to stay


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """Milliseconds of the device by kernel, and of the wall without a profiler."""
    model = model_of(options)
    router = made_router(blocks_of(model))
    yield from _told("resident", model, router, options)
    budget = budget_of(model, options, dense_bytes(model))
    hf_mlspec.clear(model)
    hf_mlspec.stream_planes(model, budget, top_planes=options.top_planes)
    yield from _told("streamed", model, router, options)


def _told(planes: str, model: PreTrainedModel, router: Router, options: argparse.Namespace) -> Iterator[dict]:
    for tokens in (16,) if options.quick else (256,):
        engine = routed_engine(model, router, name=None, prepare=True, capacity=tokens + 64, num_positions=None)
        row = torch.randint(0, 100, (tokens,)).tolist()

        def prompt(engine=engine, row=row) -> None:
            engine.start(1, options.device)
            engine.chosen = [known_widths(router)]
            engine.feed([row])[0, -1].argmax().item()

        def token(engine=engine, row=row) -> None:
            row.append(int(engine.feed([row])[0, -1].argmax()))

        with torch.inference_mode():
            for name, run in (("prompt", prompt), ("token", token)):
                yield {"planes": planes, "what": name, "tokens": tokens, **_profiled(model, run, options)}


def _profiled(model: PreTrainedModel, run: Callable[[], None], options: argparse.Namespace) -> dict:
    source, walls = source_of(model), []
    before = 0 if source is None else source.counts.fetched_bytes
    for _ in range(_WARM + options.repeats):
        begin = time.perf_counter()
        run()
        walls.append(time.perf_counter() - begin)
    fetched = 0 if source is None else (source.counts.fetched_bytes - before)
    activity = ProfilerActivity.CUDA if options.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as found:
        run()
    times = {one.key: one for one in found.key_averages()}
    own = {key: one.self_device_time_total or one.self_cpu_time_total for key, one in times.items()}
    most = sorted(own, key=own.get, reverse=True)[:_MOST]
    told = "; ".join(f"{own[key] / 1e3:.2f} ms in {times[key].count} of {_short(key)}" for key in most)
    return {"wall_ms": min(walls[_WARM:]) * 1e3, "kernels_ms": sum(own.values()) / 1e3,
            "kernels": sum(one.count for one in times.values()), "fetched": fetched, "of": told}  # fmt: skip


def _short(name: str) -> str:
    """A kernel's name without most of its template arguments."""
    return " ".join(name.replace("void ", "").split())[:90]
