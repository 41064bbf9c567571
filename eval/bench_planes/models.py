"""Which model do these programs stream, how many bytes has it, and how fast is the bus?"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import PreTrainedModel

import hf_mlspec
from eval.random_packed import random_planes_model
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.plane_budget import bytes_of

_made: dict[tuple, PreTrainedModel] = {}


def model_of(options: argparse.Namespace) -> PreTrainedModel:
    """The shape with random planes, all resident; tiny where it is quick. Parts of one process share it."""
    shape = "tiny-2x512" if options.quick else options.shape
    if (shape, options.device) not in _made:
        _made.clear()
        _made[shape, options.device] = random_planes_model(shape, options.device).eval()
    model = _made[shape, options.device]
    hf_mlspec.clear(model)
    hf_mlspec.stream_planes(model, None)
    return model


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
