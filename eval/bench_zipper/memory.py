"""How much smaller are weights in two parts on the device than in 16 bits?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import nn

from hf_mlspec.nn.packed import PackedModule
from hf_mlspec.nn.zipper import ZipperLinear

from .models import in_two_parts, plain

LAYERS = 32  # of the 8B shape


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each mode and place of the high part: every linear but the head in two parts, the head, too, and the
    embedding as codes. whole_times_smaller: with all layers that the shape has."""
    wide = plain(options)
    dense = [2 * sum(one.numel() for one in part.parameters()) for part in (wide, wide.get_decoder().layers)]
    del wide
    for mode in ("exact", "paper", "clamp"):
        given = argparse.Namespace(**vars(options) | {"mode": mode})
        for high_part in ("device", "host"):
            for head, embedding in ((False, False), (True, False), (True, True)):
                kind = {"mode": mode, "high_part": high_part, "head": head, "embedding": embedding}
                yield kind | _bytes(given, high_part, head, embedding, dense)
                torch.cuda.empty_cache()


def _bytes(
    options: argparse.Namespace, high_part: str, head: bool, embedding: bool, dense: list[int]
) -> dict[str, float]:
    model = in_two_parts(options, high_part, head, embedding)
    modules = [module.prepack_() for module in model.modules() if isinstance(module, PackedModule)]
    linears = [module for module in modules if isinstance(module, ZipperLinear)]
    packed = sum(part.nbytes for linear in linears for part in linear.parts("weight"))
    of_linears = 2 * sum(linear.in_features * linear.out_features for linear in linears)
    layers = model.get_decoder().layers
    count = len(layers) if options.quick or options.model is not None else LAYERS
    held = _with_layers(_held(model), _held(layers), len(layers), count)
    whole = _with_layers(*dense, len(layers), count) / held
    return {"packed_mib": packed / 2**20, "times_smaller": of_linears / packed, "layers": count,
            "whole_mib": held / 2**20, "whole_times_smaller": whole}  # fmt: skip


def _held(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _with_layers(whole: float, layers: float, here: int, count: int) -> float:
    """Of a model with so many layers in place of those that are here."""
    return whole + layers / here * (count - here)
