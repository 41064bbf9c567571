"""One weight at several precisions: typed functions over the operators of nested BF16 and of bit-planes."""

from __future__ import annotations

import torch
from torch import Tensor

from . import library  # noqa: F401  the operators exist once it is imported

_nested_linear = torch.ops.mlspec.nested_linear.default
_nested_rows = torch.ops.mlspec.nested_rows.default
_bitplane_linear = torch.ops.mlspec.bitplane_linear.default
_bf16_rows_linear = torch.ops.mlspec.bf16_rows_linear.default
_embed_rows = torch.ops.mlspec.embed_rows.default


def nested_linear(
    x: Tensor,
    draft_tiles: Tensor,
    exponent_tiles: Tensor,
    low_tiles: Tensor,
    codebook: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    *,
    weight_bits: int,
    activation_bits: int = 16,
    escape_rows: Tensor | None = None,
    escape_weight: Tensor | None = None,
) -> Tensor:
    """float x ``[..., in]`` times a nested weight from ``prepack_nested`` -> ``[..., out]``; codebook uint8 ``[8]``.

    weight_bits 16: the exact weight, the bits of ``bf16_linear`` on it. 4: the draft, as ``mxfp4_linear`` with another
    table; activation_bits 16 or 8. Outputs that have escapes (formats/nested.py) are escape_rows int64 ``[k]``, their
    whole rows escape_weight bfloat16 ``[k, in]``: the exact product takes them from there, the draft does not need
    them.
    """
    y = _nested_linear(x, draft_tiles, exponent_tiles, low_tiles, codebook, out_features, bias, weight_bits,
                       activation_bits)  # fmt: skip
    if not _has_escapes("nested_linear", escape_rows, escape_weight, x.shape[-1]) or weight_bits != 16:
        return y
    exact = _bf16_rows_linear(x, escape_weight, None if bias is None else bias[escape_rows], out_features)
    return y.index_copy_(-1, escape_rows, exact)


def nested_rows(
    ids: Tensor,
    draft_tiles: Tensor,
    exponent_tiles: Tensor,
    low_tiles: Tensor,
    out_features: int,
    scale: float = 1.0,
    *,
    escape_rows: Tensor | None = None,
    escape_weight: Tensor | None = None,
) -> Tensor:
    """Rows of a table that is a nested weight, exactly, times scale: ids int32 ``[n]`` -> bfloat16 ``[n, in]``.

    As ``embed_rows``: ids outside of the table count as the nearest one inside. Rows with escapes (int64 ``[k]``,
    ascending) come from escape_weight bfloat16 ``[k, in]``.
    """
    rows = _nested_rows(ids, draft_tiles, exponent_tiles, low_tiles, out_features, scale)
    if not _has_escapes("nested_rows", escape_rows, escape_weight, rows.shape[1]):
        return rows
    ids = ids.long().clamp(0, out_features - 1)
    place = torch.searchsorted(escape_rows, ids).clamp_(max=len(escape_rows) - 1)
    escaped = _embed_rows(place.int(), escape_weight, scale)
    return torch.where((escape_rows[place] == ids).unsqueeze(-1), escaped, rows)


def bitplane_linear(
    x: Tensor,
    plane_tiles: Tensor,
    scale_tiles: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    *,
    group_size: int,
    zero_doubled: int,
    num_planes: int,
) -> Tensor:
    """float x ``[..., in]`` times the first ``num_planes`` planes of a weight from ``prepack_planes`` -> ``[...,
    out]``.

    x is rounded to bfloat16; products are exact, sums float32 within each group of group_size 32, 64 or 128, which is
    then scaled. zero_doubled: twice the code that means 0 (formats/bitplanes.py).
    """
    return _bitplane_linear(x, plane_tiles, scale_tiles, out_features, bias, group_size, zero_doubled, num_planes)


def _has_escapes(op: str, rows: Tensor | None, weight: Tensor | None, in_features: int) -> bool:
    """ValueError where they are not k rows and k whole weights."""
    if rows is None and weight is None:
        return False
    shapes = [None if tensor is None else list(tensor.shape) for tensor in (rows, weight)]
    if shapes[0] is None or shapes[1] != [*shapes[0], in_features]:
        raise ValueError(
            f"{op}: escape_rows has shape {shapes[0]} and escape_weight {shapes[1]}, expected [k] and [k, "
            f"{in_features}], or None for both where there are none"
        )
    return len(rows) > 0
