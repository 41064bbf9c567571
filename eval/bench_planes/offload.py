"""What do users have instead: accelerate's offload to the CPU on the same budget?"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Mapping

import torch
from accelerate import infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import PreTrainedModel

from eval.random_packed import random_planes_model
from eval.targets import random_model
from hf_mlspec.routing.plane_budget import bytes_of

from .models import bus_speed

_TOKENS = 8


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """The model in the same planes, and in BF16."""
    shape = "tiny-2x512" if options.quick else options.shape
    for name, make in (("planes", random_planes_model), ("bf16", random_model)):
        model = make(shape, str(options.device))
        budget = sum(p.nbytes for p in model.parameters()) // 2 if options.quick else bytes_of(options.budget)
        try:
            yield {"name": f"accelerate, {name}", "budget": budget, **_offloaded(model, budget, options)}
        except (RuntimeError, ValueError) as error:
            yield {"name": f"accelerate, {name}", "failed": f"{type(error).__name__}: {error}"[:300]}
        del model
        gc.collect()
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def offload(model: PreTrainedModel, places: Mapping[str, int | str], device: torch.device) -> None:
    """What ``places`` leaves on the host comes to the device before each call of a module, and goes after it: with the
    hooks that accelerate's `dispatch_model` gives modules. That takes weights in the layout of their file, which
    packed layers leave at their first product; here they are offloaded as they are."""
    for name, place in places.items():
        for module in model.get_submodule(name).modules() if place == "cpu" else ():
            if next(module.parameters(recurse=False), None) is not None:
                add_hook_to_module(module, AlignDevicesHook(execution_device=device, offload=True))


def _offloaded(model: PreTrainedModel, budget: int, options: argparse.Namespace) -> dict:
    if options.device.type != "cuda":
        return {"failed": "there is no GPU to offload from"}
    with torch.inference_mode(False), torch.no_grad():
        model(torch.arange(16, device=options.device)[None])  # packed layers are in tiles from now on
    places = infer_auto_device_map(
        model, max_memory={0: budget, "cpu": 1 << 40}, no_split_module_classes=model._no_split_modules
    )
    left = [model.get_submodule(name) for name, place in places.items() if place == "cpu"]
    outside = sum(own.nbytes for module in left for own in module.parameters())
    offload(model, places, options.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 100, (1, 16), device=options.device)
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, max_new_tokens=2, **how)
    times = []
    for tokens in (2, 2 + _TOKENS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, **how)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    on_host = sum(place == "cpu" for place in places.values())
    peak = torch.cuda.max_memory_allocated()
    return {
        "tokens_s": _TOKENS / (times[1] - times[0]), "modules_on_host": on_host, "peak_bytes": peak,
        "host_bytes": outside, "floor_tokens_s": bus_speed(options.device) / outside,
    }  # fmt: skip
