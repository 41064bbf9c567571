"""What is a nested BF16 weight to the kernels: its ops, their plain torch, and its tiles on every device?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...formats import mxfp4, nested
from ...formats.mxfp4 import BLOCK
from ...formats.nested.codebooks import LEVELS
from ...formats.packing import unpack_nibbles
from ..cuda_library import serves
from ..dense import bf16_rows_linear
from ..operator import Operands, like_x, operator
from ..products import bf16_product, bias_of, in_slices, integer_product, tiles_of
from ..rows import embed_rows
from ..tiles import TILE_BYTES, TILE_OUTPUTS, require_count
from ..tiles_cuda import num_pairs
from . import tiles, tiles_cuda

NESTED_BITS = ((16, 16), (4, 16), (4, 8))  # of weight and activation


class NestedTiles(NamedTuple):
    """On the CPU uint8 ``[ceil(out / 16), in / 32, n]``, n = 256, 16 and 768 (tiles.py beside this); on a GPU that
    kernels serve as tiles_cuda.py says."""

    draft: Tensor
    exponents: Tensor
    low: Tensor


def _check_weight(given: Operands) -> int:
    """in_features."""
    draft, exponents = given.draft_tiles, given.exponent_tiles
    if draft.is_cuda and tiles_cuda.is_packed(draft):
        if exponents.ndim != 3:
            raise ValueError(
                f"{given.op}: exponent_tiles has shape {list(exponents.shape)}, expected 3 axes from prepack_nested"
            )
        in_features = nested_in_features(draft, exponents)
        pairs, chunks = num_pairs(given.out_features, in_features)
        shapes = ([pairs, chunks, tiles_cuda.DRAFT_BYTES], [1, in_features // BLOCK, 4],
                  [pairs, chunks, tiles_cuda.LOW_BYTES])  # fmt: skip
    else:
        if draft.ndim != 3 or draft.shape[2] != TILE_BYTES:
            raise ValueError(
                f"{given.op}: draft_tiles has shape {list(draft.shape)}, expected [out / 16, in / {BLOCK}, "
                f"{TILE_BYTES}] from prepack_nested"
            )
        require_count(given, "draft_tiles")
        in_features = draft.shape[1] * BLOCK
        shapes = [[*draft.shape[:2], size] for size in (TILE_BYTES, TILE_OUTPUTS, tiles.LOW_BYTES)]
    for name, shape in zip(("draft_tiles", "exponent_tiles", "low_tiles"), shapes, strict=True):
        given.require_part(name, torch.uint8, shape)
    return in_features


def _check_linear(given: Operands) -> None:
    in_features = _check_weight(given)
    given.require_part("codebook", torch.uint8, [LEVELS])
    require_nested_bits(given)
    given.require_rows(in_features, given.out_features)


def require_nested_bits(given: Operands) -> None:
    """ValueError for weight_bits and activation_bits that no product of nested weights has."""
    if (given.weight_bits, given.activation_bits) not in NESTED_BITS:
        pairs = ", ".join(f"{weight} and {activation}" for weight, activation in NESTED_BITS)
        raise ValueError(
            f"{given.op}: weight_bits is {given.weight_bits} and activation_bits {given.activation_bits}, choose one "
            f"of {pairs}"
        )


@operator(_check_linear, like_x)
def _nested_linear(
    x: Tensor, draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, codebook: Tensor, out_features: int,
    bias: Tensor | None, weight_bits: int, activation_bits: int,
) -> Tensor:  # fmt: skip
    """16 weight bits: what ``bf16_linear`` computes on the joined weight; 4: what ``mxfp4_linear`` computes, with the
    codebook's levels. Knows no escapes."""
    parts = on_cpu_order(draft_tiles, exponent_tiles, low_tiles, out_features)

    def part(rows: slice) -> Tensor:
        packed, scale, low, high = _unpacked(parts, tiles_of(rows), rows.stop - rows.start)
        if weight_bits == 16:
            return bf16_product(x, nested.join(packed, scale, low, high).to, bias_of(bias, rows))
        if activation_bits == 16:
            draft = nested.dequantize_draft
            return bf16_product(x, lambda dtype: draft(packed, scale, codebook, dtype), bias_of(bias, rows))
        codes = nested.draft_levels(codebook)[unpack_nibbles(packed).int()]
        return integer_product(x, codes, nested.draft_scales(scale).double(), mxfp4.BLOCK, 8, bias_of(bias, rows))

    return in_slices(part, out_features, x.shape[-1])


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
    table; activation_bits 16 or 8. Outputs that have escapes (formats/nested/) are escape_rows int64 ``[k]``, their
    whole rows escape_weight bfloat16 ``[k, in]``: the exact product takes them from there, the draft does not need
    them.
    """
    y = _nested_linear(x, draft_tiles, exponent_tiles, low_tiles, codebook, out_features, bias, weight_bits,
                       activation_bits)  # fmt: skip
    if not _has_escapes("nested_linear", escape_rows, escape_weight, x.shape[-1]) or weight_bits != 16:
        return y
    exact = bf16_rows_linear(x, escape_weight, None if bias is None else bias[escape_rows], out_features)
    return y.index_copy_(-1, escape_rows, exact)


def _check_rows(given: Operands) -> None:
    given.require_dtype("ids", torch.int32)
    if given.ids.ndim != 1:
        raise ValueError(f"{given.op}: ids has shape {list(given.ids.shape)}, expected [n]")
    _check_weight(given)
    if given.out_features < 1:
        raise ValueError(f"{given.op}: out_features is {given.out_features}, a table has 1 row or more")
    given.require_scale()


def _fake_rows(given: Operands) -> Tensor:
    size = nested_in_features(given.draft_tiles, given.exponent_tiles)
    return given.draft_tiles.new_empty((len(given.ids), size), dtype=torch.bfloat16)


@operator(_check_rows, _fake_rows)
def _nested_rows(
    ids: Tensor, draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int, scale: float
) -> Tensor:
    """Only the tiles that hold the rows are unpacked. Knows no escapes."""
    parts = on_cpu_order(draft_tiles, exponent_tiles, low_tiles, out_features)
    ids = ids.long().clamp(0, out_features - 1)
    unpacked = _unpacked(parts, ids // TILE_OUTPUTS, len(ids) * TILE_OUTPUTS)
    place = torch.arange(len(ids), device=ids.device) * TILE_OUTPUTS + ids % TILE_OUTPUTS
    rows = nested.join(*(plane[place] for plane in unpacked))
    return rows if scale == 1 else (rows.float() * scale).to(rows.dtype)


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
    escaped = embed_rows(place.int(), escape_weight, scale)
    return torch.where((escape_rows[place] == ids).unsqueeze(-1), escaped, rows)


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


def _unpacked(parts: tuple[Tensor, ...], cut: slice | Tensor, out_features: int) -> tuple[Tensor, ...]:
    return tiles.unpack(*(part[cut] for part in parts), out_features)


def prepack_nested(packed: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> NestedTiles:
    """The planes of formats/nested/ on one device -> draft_tiles, exponent_tiles, low_tiles.

    TypeError where one is not uint8, ValueError where their shapes are not those of one weight.
    """
    layout = tiles_cuda if serves(packed) else tiles
    return NestedTiles(*layout.pack(packed, scale, low, high))


def unprepack_nested(
    draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of ``prepack_nested``, bit for bit."""
    layout = tiles_cuda if tiles_cuda.is_packed(draft_tiles) else tiles
    return layout.unpack(draft_tiles, exponent_tiles, low_tiles, out_features)


def nested_in_features(draft_tiles: Tensor, exponent_tiles: Tensor) -> int:
    """in_features of a weight from ``prepack_nested``."""
    if tiles_cuda.is_packed(draft_tiles):
        return tiles_cuda.in_features(draft_tiles, exponent_tiles)
    return draft_tiles.shape[1] * BLOCK


def on_cpu_order(
    draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int
) -> NestedTiles:
    """A weight from ``prepack_nested`` in the tiles of the CPU, which can be cut at 16 outputs."""
    if not tiles_cuda.is_packed(draft_tiles):
        return NestedTiles(draft_tiles, exponent_tiles, low_tiles)
    return NestedTiles(*tiles.pack(*tiles_cuda.unpack(draft_tiles, exponent_tiles, low_tiles, out_features)))


def nested_fits_device(draft_tiles: Tensor) -> bool:
    """Whether a weight is in the tiles that ops on its device read."""
    return tiles_cuda.is_packed(draft_tiles) == serves(draft_tiles)
