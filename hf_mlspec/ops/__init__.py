"""Who computes? The only door to compiled code: typed functions over the ``mlspec`` operators.

"float" below is float32, bfloat16 or float16; results have x's dtype. Every function raises TypeError or ValueError
for operands that do not fit, and KernelError without a kernel under MLSPEC_REQUIRE_KERNELS=1. The compiled kernels
give a row the same bits whatever the other rows, their number and the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cuda_library import why_no_cuda_kernels
from .library import KernelError, kernel_table, why_not_compiled
from .many_precisions import bitplane_linear, nested_linear, nested_rows
from .tiles import prepack_int4, prepack_mxfp4, unprepack_int4, unprepack_mxfp4
from .tiles_formats import prepack_nested, prepack_planes, unprepack_nested, unprepack_planes

__all__ = [
    "KernelError",
    "bf16_linear",
    "bitplane_linear",
    "choose_rows",
    "embed_rows",
    "f32_linear",
    "gated",
    "int4_dequantize",
    "int4_linear",
    "kernel_table",
    "mxfp4_linear",
    "nested_linear",
    "nested_rows",
    "prepack_int4",
    "prepack_mxfp4",
    "prepack_nested",
    "prepack_planes",
    "quantize_rows",
    "ragged_attention",
    "ragged_attention_rows",
    "rms_norm",
    "rope_write",
    "rope_write_rows",
    "round_open",
    "round_push",
    "round_settle",
    "round_window",
    "silu_mul",
    "unprepack_int4",
    "unprepack_mxfp4",
    "unprepack_nested",
    "unprepack_planes",
    "why_no_cuda_kernels",
    "why_not_compiled",
]

_mxfp4_linear = torch.ops.mlspec.mxfp4_linear.default
_int4_linear = torch.ops.mlspec.int4_linear.default
_int4_dequantize = torch.ops.mlspec.int4_dequantize.default
_bf16_linear = torch.ops.mlspec.bf16_linear.default
_f32_linear = torch.ops.mlspec.f32_linear.default
_quantize_rows = torch.ops.mlspec.quantize_rows.default
_rms_norm = torch.ops.mlspec.rms_norm.default
_silu_mul = torch.ops.mlspec.silu_mul.default
_rope_write = torch.ops.mlspec.rope_write.default
_ragged_attention = torch.ops.mlspec.ragged_attention.default
# Called layer by layer of every step, so without a Python function in between: ops/schema_step.py says what they take.
embed_rows = torch.ops.mlspec.embed_rows.default
gated = torch.ops.mlspec.gated.default
rope_write_rows = torch.ops.mlspec.rope_write_rows.default
ragged_attention_rows = torch.ops.mlspec.ragged_attention_rows.default
_choose_rows = torch.ops.mlspec.choose_rows.default
# The same of a captured round: ops/schema_round.py.
round_open = torch.ops.mlspec.round_open.default
round_window = torch.ops.mlspec.round_window.default
round_push = torch.ops.mlspec.round_push.default
round_settle = torch.ops.mlspec.round_settle.default


def mxfp4_linear(
    x: Tensor,
    weight_tiles: Tensor,
    scale_tiles: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation_bits: int = 16,
) -> Tensor:
    """float x ``[..., in]`` times an MXFP4 weight from ``prepack_mxfp4`` -> ``[..., out]``; bias ``[out]`` or None.

    activation_bits 16: x is rounded to bfloat16. 8: x is quantized to int8 with one scale per row and block of 32, the
    dot products of a block are integers and are scaled late (ML-SpecQD, arXiv 2503.13565). Sums are float32.
    """
    return _mxfp4_linear(x, weight_tiles, scale_tiles, out_features, bias, activation_bits)


def int4_linear(
    x: Tensor,
    weight_tiles: Tensor,
    scale_tiles: Tensor,
    zero_tiles: Tensor | None,
    out_features: int,
    bias: Tensor | None = None,
    *,
    group_size: int,
    activation_bits: int = 16,
) -> Tensor:
    """float x ``[..., in]`` times an int4 weight from ``prepack_int4`` -> ``[..., out]``.

    group_size 32, 64 or 128: elements that share a scale. zero_tiles None: symmetric. activation_bits 16: x is rounded
    to bfloat16; 8 or 4: x is quantized in the weight's groups (QSpec's W4A4 is 4), integer dot products of a group.
    """
    return _int4_linear(x, weight_tiles, scale_tiles, zero_tiles, out_features, bias, group_size, activation_bits)


def int4_dequantize(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, group_size: int
) -> Tensor:
    """An int4 weight from ``prepack_int4`` as bfloat16 ``[out, in]``, bit for bit that of formats/int4.dequantize:
    with ``bf16_linear`` what systems do that have no kernel for int4 weights times 16-bit activations."""
    return _int4_dequantize(weight_tiles, scale_tiles, zero_tiles, out_features, group_size)


def bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float x ``[..., in]``, rounded to bfloat16, times bfloat16 ``[out, in]`` -> ``[..., out]``, float32 sums."""
    return _bf16_linear(x, weight, bias)


def f32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """float x ``[..., in]`` times float32 ``[out, in]`` -> ``[..., out]``, summed in float32."""
    return _f32_linear(x, weight, bias)


def quantize_rows(x: Tensor, group_size: int, bits: int = 8) -> tuple[Tensor, Tensor]:
    """float ``[..., in]`` -> codes int8 ``[..., in]``, scales float32 ``[..., ceil(in / group_size)]``, bit for bit
    those of formats/activations.py. group_size 32, 64 or 128; bits 8 or 4."""
    return _quantize_rows(x, group_size, bits)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float x, residual ``[..., n]``, weight ``[n]`` -> (normed, x + residual): what the block reads and what its
    residual connection carries on. The sum is rounded to x.dtype before the norm reads it; without a residual it is x
    itself."""
    normed, total = _rms_norm(x, weight, eps, residual)
    return normed, x if residual is None else total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of one shape and dtype, in float32, rounded once."""
    return _silu_mul(gate, up)


def rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: list[int], keys: Tensor, values: Tensor
) -> Tensor:
    """Rotates q ``[batch, tokens, heads, dim]`` and k ``[batch, tokens, kv_heads, dim]``; writes k and v into the
    ragged cache; -> rotated q.

    Token t of row r has position and slot ``starts[r] + t``. cos, sin float32 ``[positions, rotary_dim / 2]``: the
    first rotary_dim elements of a head are rotated, halves against each other. keys, values float32 or bfloat16
    ``[batch, kv_heads, slots, dim]``, dense in their last two axes.
    """
    return _rope_write(q, k, v, cos, sin, starts, keys, values)


def ragged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: list[int],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Causal grouped-query attention of rotated q ``[batch, tokens, heads, dim]`` over a ragged cache ``[batch,
    kv_heads, slots, dim]`` -> ``[batch, tokens, heads, dim]``.

    Token t of row r sits in slot ``starts[r] + t`` and sees the slots up to its own, only the last ``window`` of them
    unless that is 0. Scores are multiplied by ``scale``, then capped to ``softcap * tanh(score / softcap)`` unless 0.
    """
    return _ragged_attention(q, keys, values, starts, scale, window, softcap)


def choose_rows(
    logits: Tensor,
    softcap: float = 0.0,
    seed: Tensor | None = None,
    streams: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """float ``[n, vocab]`` -> tokens int32 ``[n]``, confidence float32 ``[n]``: their softmax probability.

    Logits are capped to ``softcap * tanh(logit / softcap)`` unless that is 0. Without a seed the token of the largest
    logit, the first of equals. With seed int64 ``[1]``, streams and positions int32 ``[n]``: that of the largest logit
    plus Gumbel noise, a draw from the softmax. The noise is a pure function of (seed, stream, position, token): all
    levels of a chain share it (speculation/row_sampling.py). A row with a NaN gets token -1 and confidence NaN.
    """
    return _choose_rows(logits, softcap, seed, streams, positions)
