"""How do rows become the integers that an int4 weight multiplies, in the kernel that makes them, with the same bits?

Codes are laid out as the linear kernels of GPUs read them: codes int8 ``[n, in]``, of every 16 inputs in the order
0 8 1 9 .. 7 15; scales float32 ``[in up to a multiple of 128 / group, n up to a multiple of 4]``, zeros beyond. They
are the numbers of formats/activations.py. On a GPU rows are bfloat16 and a multiple of 32 wide.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import activations, int4
from ..formats.hadamard import Hadamard
from ..formats.int4 import GROUP_SIZES
from ..formats.int4_int8 import OUTLIERS
from ..formats.packing import unpack_nibbles
from .hadamard import check_matrices, matrix_on
from .int4 import check_weight, on_cpu_order, unprepack_int4
from .int4_int8 import unprepack_int4_int8
from .operator import CACHE_FLOATS, Operands, operator
from .products import finish, product_of_codes
from .rows import check_gated, check_rms_norm
from .tiles_cuda import PAIR_INPUTS

_TOGETHER, _TOKENS = 16, 4  # inputs whose codes are in an order of their own; tokens of a whole row of scales


class CodesOf(NamedTuple):
    """How rows are coded for a weight: a scale for so many inputs; 8 or 4 bits; what the largest of 4-bit codes means;
    the last inputs that have 8 bits whatever the others have, 0 or 128."""

    group_size: int
    bits: int
    activation_clip: float = 1.0
    outliers: int = 0


class Codes(NamedTuple):
    """Rows as integers, in the layout above."""

    codes: Tensor
    scales: Tensor

    def __len__(self) -> int:
        """Of rows."""
        return len(self.codes)


def _check_codes(given: Operands, what: str, width: int) -> None:
    given.require_choice("group_size", GROUP_SIZES)
    given.require_choice("bits", (4, 8))
    given.require_activation_clip()
    if width < 1 or width % 32:
        raise ValueError(f"{given.op}: {what} have {width} columns, expected a multiple of 32")
    fits = given.outliers == OUTLIERS == given.group_size and width % OUTLIERS == 0 and width > OUTLIERS
    if given.outliers and not fits:
        raise ValueError(
            f"{given.op}: outliers is {given.outliers} of {width} columns in groups of {given.group_size}, "
            f"expected 0, or {OUTLIERS} behind whole groups of {OUTLIERS}"
        )


def _require_rows(given: Operands) -> None:
    given.require_float("x", CACHE_FLOATS)
    if given.x.ndim != 2:
        raise ValueError(f"{given.op}: x has shape {list(given.x.shape)}, expected [n, width]")


def _check_turned(given: Operands, what: str, width: int) -> None:
    if given.order is not None:
        given.require_numbers("order", width)
        if given.matrix is not None or given.size != 1:
            raise ValueError(f"{given.op}: rows are put in an order and rotated, expected one of both")
    check_matrices(given, what.replace("rows of x have", "x has"), width)


def _room(given: Operands, like: Tensor, width: int) -> tuple[Tensor, Tensor]:
    groups, tokens = _up_to(width, PAIR_INPUTS) // given.group_size, _up_to(len(like), _TOKENS)
    return like.new_empty((len(like), width), dtype=torch.int8), like.new_empty((groups, tokens), dtype=torch.float32)


def _up_to(count: int, step: int) -> int:
    return -(-count // step) * step


def _coded(rows: Tensor, group_size: int, bits: int, clip: float, outliers: int) -> tuple[Tensor, Tensor]:
    """Rows ``[n, in]`` in plain torch."""
    width = rows.shape[1] - outliers
    codes, scales = activations.quantize_rows(rows[:, :width], group_size, bits, clip)
    if outliers:
        others = activations.quantize_rows(rows[:, width:], group_size, 8)
        codes, scales = torch.cat([codes, others[0]], 1), torch.cat([scales, others[1]], 1)
    codes = codes.unflatten(1, (-1, 2, _TOGETHER // 2)).transpose(2, 3).flatten(1)
    missing = (0, _up_to(len(rows), _TOKENS) - len(rows), 0, -rows.shape[1] % PAIR_INPUTS // group_size)
    return codes.contiguous(), torch.nn.functional.pad(scales.T, missing).contiguous()


def _check_norm_codes(given: Operands) -> None:
    _require_rows(given)
    check_rms_norm(given)
    if given.order is not None:
        given.require_numbers("order", given.x.shape[1])
    _check_codes(given, "rows of x", given.x.shape[1])


@operator(_check_norm_codes, lambda given: (
    *_room(given, given.x, given.x.shape[1]), given.x.new_empty((0,) if given.residual is None else given.x.shape)
), composed_on_cpu=True)  # fmt: skip
def _norm_codes(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, order: Tensor | None, group_size: int, bits: int,
    activation_clip: float, outliers: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    normed, total = torch.ops.mlspec.rms_norm(x, weight, eps, residual)
    normed = normed if order is None else torch.ops.mlspec.ordered_rows(normed, order)
    return *_coded(normed, group_size, bits, activation_clip, outliers), total


def norm_codes(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, order: Tensor | None, how: CodesOf
) -> tuple[Codes, Tensor]:
    """``rms_norm``, or ``rms_norm_in_order``, of ``[n, width]`` with the normed rows coded -> (codes, x + residual);
    on a GPU in one kernel, of rows up to 16,384 wide."""
    codes, scales, total = _norm_codes(x, weight, eps, residual, order, *how)
    return Codes(codes, scales), x if residual is None else total


def _check_row_codes(given: Operands) -> None:
    _require_rows(given)
    _check_codes(given, "rows of x", given.x.shape[1])
    _check_turned(given, "rows of x have", given.x.shape[1])


@operator(_check_row_codes, lambda given: _room(given, given.x, given.x.shape[1]), composed_on_cpu=True)
def _row_codes(
    x: Tensor, order: Tensor | None, matrix: Tensor | None, size: int, inner: int, group_size: int, bits: int,
    activation_clip: float, outliers: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _coded(_turned(x, order, matrix, size, inner), group_size, bits, activation_clip, outliers)


def _turned(x: Tensor, order: Tensor | None, matrix: Tensor | None, size: int, inner: int) -> Tensor:
    x = x if order is None else torch.ops.mlspec.ordered_rows(x, order)
    return x if size == 1 else torch.ops.mlspec.hadamard_rows(x, matrix, size, inner)


def row_codes(x: Tensor, turned: Tensor | Hadamard, how: CodesOf) -> Codes:
    """Rows ``[n, width]`` coded behind ``ordered_rows`` (an order int32 ``[width]``) or ``hadamard_rows``; on a GPU in
    one kernel, where groups do not go across the rows of the matrix that a thread multiplies."""
    return Codes(*_row_codes(x, *_operands_of(turned, x.device), *how))


def _operands_of(turned: Tensor | Hadamard | None, device: torch.device) -> tuple:
    """order, matrix, size, inner."""
    if isinstance(turned, Hadamard):
        return None, matrix_on(turned.order, device), turned.size, turned.inner
    return turned, None, 1, 1


def _check_gated_codes(given: Operands) -> None:
    check_gated(given)
    width = given.gate_up.shape[1] // 2
    _check_codes(given, "gated rows", width)
    _check_turned(given, "gated rows have", width)


@operator(_check_gated_codes, lambda given: _room(given, given.gate_up, given.gate_up.shape[1] // 2),
          composed_on_cpu=True)  # fmt: skip
def _gated_codes(
    gate_up: Tensor, activation: int, order: Tensor | None, matrix: Tensor | None, size: int, inner: int,
    group_size: int, bits: int, activation_clip: float, outliers: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = _turned(torch.ops.mlspec.gated(gate_up, activation), order, matrix, size, inner)
    return _coded(rows, group_size, bits, activation_clip, outliers)


def gated_codes(gate_up: Tensor, activation: int, turned: Tensor | Hadamard | None, how: CodesOf) -> Codes:
    """``gated``, ``gated_in_order`` or ``gated_hadamard`` with the rows coded; on a GPU in one kernel, as
    `row_codes`."""
    return Codes(*_gated_codes(gate_up, activation, *_operands_of(turned, gate_up.device), *how))


def _check_codes_linear(given: Operands) -> None:
    given.require_choice("outliers", (0, OUTLIERS))
    in_features = check_weight(given) - given.outliers
    given.require_dtype("codes", torch.int8)
    if given.codes.ndim != 2 or given.codes.shape[1] != in_features:
        shape = list(given.codes.shape)
        raise ValueError(f"{given.op}: codes has shape {shape}, the weight takes in_features = {in_features}")
    given.require_contiguous("codes")
    groups, tokens = _up_to(in_features, PAIR_INPUTS) // given.group_size, _up_to(len(given.codes), _TOKENS)
    given.require_part("scales", torch.float32, (groups, tokens))
    if given.bias is not None:
        given.require_float("bias")
        given.require_shape("bias", (given.out_features,))


@operator(_check_codes_linear,
          lambda given: given.codes.new_empty((len(given.codes), given.out_features), dtype=torch.bfloat16),
          composed_on_cpu=True)  # fmt: skip
def _int4_codes_linear(
    codes: Tensor, scales: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None,
    out_features: int, bias: Tensor | None, group_size: int, outliers: int,
) -> Tensor:  # fmt: skip
    own = codes.unflatten(1, (-1, _TOGETHER // 2, 2)).transpose(2, 3).flatten(1)
    x_scales = scales[: codes.shape[1] // group_size, : len(codes)].T
    tiles = on_cpu_order(weight_tiles, scale_tiles, zero_tiles, out_features)
    width = codes.shape[1] - outliers
    if outliers:
        packed, scale, outlier, outlier_scale = unprepack_int4_int8(tiles.weight, tiles.scale, out_features)
        zero = None
    else:
        packed, scale, zero = unprepack_int4(*tiles, out_features)
    weight = unpack_nibbles(packed).to(torch.int8).unflatten(-1, (-1, group_size))
    weight = weight - (int4.SYMMETRIC_ZERO if zero is None else zero.to(torch.int8).unsqueeze(-1))
    groups = width // group_size
    sums = product_of_codes(own[:, :width], x_scales[:, :groups], weight.flatten(-2), scale.double(), group_size)
    if outliers:
        behind = outlier_scale.double().unsqueeze(-1)
        sums = sums + product_of_codes(own[:, width:], x_scales[:, groups:], outlier, behind, outliers)
    return finish(sums, bias, torch.bfloat16)


def int4_codes_linear(
    rows: Codes, weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int,
    bias: Tensor | None = None, *, group_size: int, outliers: int = 0,
) -> Tensor:  # fmt: skip
    """Rows as integers times an int4 weight from ``prepack_int4`` -> bfloat16 ``[n, out]``, the bits that
    ``int4_linear`` gives the rows; outliers 128: from ``prepack_int4_int8``, those of ``int4_int8_linear``."""
    return _int4_codes_linear(*rows, weight_tiles, scale_tiles, zero_tiles, out_features, bias, group_size, outliers)
