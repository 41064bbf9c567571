"""What is computed on every row by itself: codes, norm, gate, order, and rows of a table."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import activations
from ..formats.int4 import GROUP_SIZES
from .operator import CACHE_FLOATS, Operands, operator

ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu": 2, "relu": 3, "relu2": 4}  # mlspec_activation
_ACTIVATIONS = (  # by their numbers
    F.silu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.gelu,
    F.relu,
    lambda x: F.relu(x).square(),
)


def _check_quantize_rows(given: Operands) -> None:
    given.require_float("x")
    given.require_axis("x")
    given.require_choice("group_size", GROUP_SIZES)
    given.require_choice("bits", (4, 8))
    given.require_activation_clip()


def _codes_and_scales(given: Operands) -> tuple[Tensor, Tensor]:
    x, groups = given.x, -(-given.x.shape[-1] // given.group_size)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)


@operator(_check_quantize_rows, _codes_and_scales)
def _quantize_rows(x: Tensor, group_size: int, bits: int, activation_clip: float) -> tuple[Tensor, Tensor]:
    return activations.quantize_rows(x, group_size, bits, activation_clip)


def quantize_rows(
    x: Tensor, group_size: int, bits: int = 8, activation_clip: float = 1.0
) -> tuple[Tensor, Tensor]:
    """float ``[..., in]`` -> codes int8 ``[..., in]``, scales float32 ``[..., ceil(in / group_size)]``, bit for bit
    those of formats/activations.py. group_size 32, 64 or 128; bits 8 or 4; activation_clip: of 4 bits, .1 to 1. On a
    GPU x is bfloat16."""
    return _quantize_rows(x, group_size, bits, activation_clip)


def check_rms_norm(given: Operands) -> None:
    """TypeError, ValueError: these are no operands of a norm."""
    given.require_float("x")
    given.require_axis("x")
    given.require_float("weight")
    given.require_shape("weight", given.x.shape[-1:])
    if given.residual is not None:
        given.require_same("residual", "x")


@operator(check_rms_norm, lambda given: (
    given.x.new_empty(given.x.shape), given.x.new_empty((0,) if given.residual is None else given.x.shape)
))  # fmt: skip
def _rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The second is ``[0]`` without a residual."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), x.new_empty(0) if residual is None else total


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float x, residual ``[..., n]``, weight ``[n]`` -> (normed, x + residual): what the block reads and what its
    residual connection carries on. The sum is rounded to x.dtype before the norm reads it; without a residual it is x
    itself."""
    normed, total = _rms_norm(x, weight, eps, residual)
    return normed, x if residual is None else total


def _check_silu_mul(given: Operands) -> None:
    given.require_float("gate")
    given.require_same("up", "gate")


@operator(_check_silu_mul, lambda given: given.gate.new_empty(given.gate.shape))
def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of one shape and dtype, in float32, rounded once."""
    return _silu_mul(gate, up)


# Those below are called layer by layer of every step of a model on a device, so without a Python function in between.


def _check_embed_rows(given: Operands) -> None:
    given.require_numbers("ids", None)
    given.require_float("table", CACHE_FLOATS)
    table = given.table
    if table.ndim != 2 or not len(table):
        raise ValueError(
            f"{given.op}: table has shape {list(table.shape)}, expected [vocab, hidden] with a vocab of 1 or more"
        )
    given.require_contiguous("table")
    given.require_scale()


@operator(_check_embed_rows, lambda given: given.table.new_empty((len(given.ids), given.table.shape[1])),
          composed_on_cpu=True)  # fmt: skip
def embed_rows(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """ids int32 ``[n]`` -> those rows of table float32 or bfloat16 ``[vocab, hidden]``, times scale unless that is 1;
    ids outside of it (-1: no token) count as the nearest one inside. On a GPU the table is bfloat16."""
    rows = table[ids.long().clamp(0, len(table) - 1)]
    return rows if scale == 1 else (rows.float() * scale).to(table.dtype)


def check_gated(given: Operands) -> None:
    """TypeError, ValueError: gate_up and activation are none that gated rows are made of."""
    given.require_float("gate_up", CACHE_FLOATS)
    gate_up, activation = given.gate_up, given.activation
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"{given.op}: gate_up has shape {list(gate_up.shape)}, expected [n, 2 * intermediate]")
    if activation not in ACTIVATIONS.values():
        raise ValueError(f"{given.op}: activation is {activation}, choose one of {ACTIVATIONS}")


@operator(check_gated, lambda given: given.gate_up.new_empty((len(given.gate_up), given.gate_up.shape[1] // 2)),
          composed_on_cpu=True)  # fmt: skip
def gated(gate_up: Tensor, activation: int) -> Tensor:
    """gate_up float32 or bfloat16 ``[n, 2 I]``, gate first -> act(gate) * up ``[n, I]``, rounded once; activation: a
    number of ACTIVATIONS. On a GPU gate_up is bfloat16. Here in float64: torch's float32 functions round the last
    elements of a tensor in another way than those before, so an element's bits would depend on the number of rows."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return (_ACTIVATIONS[activation](gate) * up).float().to(gate_up.dtype)


def _check_gated_pairs(given: Operands) -> None:
    given.require_float("gate_up", CACHE_FLOATS)
    if given.gate_up.ndim != 2 or given.gate_up.shape[1] % 2:
        raise ValueError(f"{given.op}: gate_up has shape {list(given.gate_up.shape)}, expected [n, 2 * intermediate]")
    if not math.isfinite(given.slope) or not 0 < given.limit < math.inf:
        raise ValueError(
            f"{given.op}: slope is {given.slope} and limit {given.limit}, expected finite numbers, the limit above 0"
        )


@operator(_check_gated_pairs, lambda given: given.gate_up.new_empty((len(given.gate_up), given.gate_up.shape[1] // 2)),
          composed_on_cpu=True)  # fmt: skip
def gated_pairs(gate_up: Tensor, slope: float, limit: float) -> Tensor:
    """gate_up float32 or bfloat16 ``[n, 2 I]``, gate and up in turns -> ``(up + 1) * gate * sigmoid(slope * gate)``
    ``[n, I]``, rounded once, of a gate up to limit and an up from -limit to limit (gpt-oss). On a GPU gate_up is
    bfloat16. Here in float64, as `gated`."""
    gate, up = gate_up.double().unflatten(1, (-1, 2)).unbind(2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(slope * gate)).float().to(gate_up.dtype)


def activated(x: Tensor, activation: int) -> Tensor:
    """The activation of float32 or bfloat16 x, rounded once; activation: a number of ACTIVATIONS. On the CPU it is
    computed in float64, as in `gated`."""
    if x.is_cuda:
        return _ACTIVATIONS[activation](x)
    return _ACTIVATIONS[activation](x.double()).float().to(x.dtype)


def _check_gated_in_order(given: Operands) -> None:
    check_gated(given)
    given.require_numbers("order", given.gate_up.shape[1] // 2)


@operator(_check_gated_in_order,
          lambda given: given.gate_up.new_empty((len(given.gate_up), given.gate_up.shape[1] // 2)),
          composed_on_cpu=True)  # fmt: skip
def gated_in_order(gate_up: Tensor, activation: int, order: Tensor) -> Tensor:
    """``ordered_rows(gated(gate_up, activation), order)``, bit for bit; on a GPU in one kernel."""
    return ordered_rows(gated(gate_up, activation), order)


def _check_ordered_rows(given: Operands) -> None:
    given.require_float("x", CACHE_FLOATS)
    if given.x.ndim != 2:
        raise ValueError(f"{given.op}: x has shape {list(given.x.shape)}, expected [n, width]")
    given.require_numbers("order", given.x.shape[1])


@operator(_check_ordered_rows, lambda given: given.x.new_empty(given.x.shape), composed_on_cpu=True)
def ordered_rows(x: Tensor, order: Tensor) -> Tensor:
    """x float32 or bfloat16 ``[n, width]``, order int32 ``[width]``: a permutation -> column i is x's column order[i].
    A number outside of x counts as the nearest one inside. On a GPU x is bfloat16."""
    return x.index_select(1, order.long().clamp(0, max(x.shape[1] - 1, 0)))


def _check_rms_norm_in_order(given: Operands) -> None:
    check_rms_norm(given)
    _check_ordered_rows(given)


@operator(_check_rms_norm_in_order, lambda given: (
    given.x.new_empty(given.x.shape), given.x.new_empty((0,) if given.residual is None else given.x.shape)
), composed_on_cpu=True)  # fmt: skip
def _rms_norm_in_order(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, order: Tensor
) -> tuple[Tensor, Tensor]:
    normed, total = _rms_norm(x, weight, eps, residual)
    return ordered_rows(normed, order), total


def rms_norm_in_order(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, order: Tensor
) -> tuple[Tensor, Tensor]:
    """``rms_norm(x, weight, eps, residual)``, the normed rows as ``ordered_rows`` gives them, bit for bit; on a GPU in
    one kernel. x float32 or bfloat16 ``[n, width]``."""
    normed, total = _rms_norm_in_order(x, weight, eps, residual, order)
    return normed, x if residual is None else total
