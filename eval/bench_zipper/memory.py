"""How much smaller are weights in two parts on the device than in 16 bits?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from hf_mlspec.nn.zipper import ZipperLinear

from .models import in_two_parts


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each mode, place of the high part and whether the head is in two parts, too."""
    for mode in ("exact", "paper", "clamp"):
        given = argparse.Namespace(**vars(options) | {"mode": mode})
        for high_part in ("device", "host"):
            for head in (False, True):
                yield {"mode": mode, "high_part": high_part, "head": head, **_bytes(given, high_part, head)}
                torch.cuda.empty_cache()


def _bytes(options: argparse.Namespace, high_part: str, head: bool) -> dict[str, float]:
    model = in_two_parts(options, high_part, head)
    layers = [module.prepack_() for module in model.modules() if isinstance(module, ZipperLinear)]
    packed = sum(part.nbytes for layer in layers for part in layer.parts("weight"))
    dense = 2 * sum(layer.in_features * layer.out_features for layer in layers)
    rest = sum(parameter.nbytes for parameter in model.parameters()) - packed
    return {"packed_mib": packed / 2**20, "times_smaller": dense / packed, "rest_mib": rest / 2**20,
            "whole_times_smaller": (dense + rest) / (packed + rest)}  # fmt: skip
