"""Which operators read one weight at several precisions? As schema.py."""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands_formats
from .tiles_formats import nested_in_features

# Tiles: ops/tiles_nested.py and ops/tiles_planes.py, whose shapes on the CPU are told here; on a GPU *_cuda.py, and
# there linears round their results to bfloat16.
SCHEMAS: dict[str, str] = {
    # x float [..., in]; draft_tiles uint8 [ceil(out / 16), in / 32, 256]; exponent_tiles [.., 16]; low_tiles [..,
    # 768]; codebook uint8 [8]; bias float [out]; weight_bits and activation_bits 16 and 16, 4 and 16, or 4 and 8 ->
    # [..., out] in x.dtype. Knows no escapes.
    "nested_linear": (
        "(Tensor x, Tensor draft_tiles, Tensor exponent_tiles, Tensor low_tiles, Tensor codebook, int out_features,"
        " Tensor? bias, int weight_bits, int activation_bits) -> Tensor"
    ),
    # ids int32 [n]; a table's tiles -> its exact rows times scale, bfloat16 [n, in]. Knows no escapes.
    "nested_rows": (
        "(Tensor ids, Tensor draft_tiles, Tensor exponent_tiles, Tensor low_tiles, int out_features, float scale)"
        " -> Tensor"
    ),
    # x float [..., in]; weight bfloat16 [k, in], bias float [k]: outputs of a weight that has out_features of them ->
    # [..., k], the bits of bf16_linear on the whole weight, whose order of sums depends on its shape on a GPU.
    "bf16_rows_linear": "(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor",
    # plane_tiles uint8 [planes, ceil(out / 16), in / 32, 64]; scale_tiles float16 [ceil(out / 16), in / group_size,
    # 16] -> [..., out] in x.dtype.
    "bitplane_linear": (
        "(Tensor x, Tensor plane_tiles, Tensor scale_tiles, int out_features, Tensor? bias, int group_size,"
        " int zero_doubled, int num_planes) -> Tensor"
    ),
}


def fake_nested_linear(
    x: Tensor,
    draft_tiles: Tensor,
    exponent_tiles: Tensor,
    low_tiles: Tensor,
    codebook: Tensor,
    out_features: int,
    bias: Tensor | None,
    weight_bits: int,
    activation_bits: int,
) -> Tensor:
    operands_formats.check_nested_linear(
        x, draft_tiles, exponent_tiles, low_tiles, codebook, out_features, bias, weight_bits, activation_bits
    )
    return x.new_empty((*x.shape[:-1], out_features))


def fake_nested_rows(
    ids: Tensor, draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int, scale: float
) -> Tensor:
    operands_formats.check_nested_rows(ids, draft_tiles, exponent_tiles, low_tiles, out_features, scale)
    size = nested_in_features(draft_tiles, exponent_tiles)
    return draft_tiles.new_empty((len(ids), size), dtype=torch.bfloat16)


def fake_bf16_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    operands_formats.check_bf16_rows_linear(x, weight, bias, out_features)
    return x.new_empty((*x.shape[:-1], len(weight)))


def fake_bitplane_linear(
    x: Tensor,
    plane_tiles: Tensor,
    scale_tiles: Tensor,
    out_features: int,
    bias: Tensor | None,
    group_size: int,
    zero_doubled: int,
    num_planes: int,
) -> Tensor:
    operands_formats.check_bitplane_linear(
        x, plane_tiles, scale_tiles, out_features, bias, group_size, zero_doubled, num_planes
    )
    return x.new_empty((*x.shape[:-1], out_features))
