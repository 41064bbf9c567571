"""Which operators exist? Signature, meaning and result shape of every op in the ``mlspec`` namespace."""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands, operands_rows

# name -> schema. C++ only adds implementations (TORCH_LIBRARY_IMPL), so Python and C++ cannot disagree about a
# signature. "float" below: float32, bfloat16 or float16. Tiles: ops/tiles.py, whose shapes on the CPU are told here;
# on a GPU ops/tiles_cuda.py, there linears round their results to bfloat16 and quantize_rows takes bfloat16 alone.
SCHEMAS: dict[str, str] = {
    # x float [..., in]; weight_tiles uint8 [ceil(out / 16), in / 32, 256]; scale_tiles uint8 [ceil(out / 16), in / 32,
    # 16]; bias float [out]; activation_bits 8 or 16 -> [..., out] in x.dtype, summed in float32.
    "mxfp4_linear": (
        "(Tensor x, Tensor weight_tiles, Tensor scale_tiles, int out_features, Tensor? bias, int activation_bits)"
        " -> Tensor"
    ),
    # the same with scale_tiles float16 and zero_tiles uint8 [ceil(out / 16), in / group_size, 16]; activation_bits 4,
    # 8 or 16.
    "int4_linear": (
        "(Tensor x, Tensor weight_tiles, Tensor scale_tiles, Tensor? zero_tiles, int out_features, Tensor? bias,"
        " int group_size, int activation_bits) -> Tensor"
    ),
    # tiles and group_size as int4_linear's -> bfloat16 [out, in].
    "int4_dequantize": (
        "(Tensor weight_tiles, Tensor scale_tiles, Tensor? zero_tiles, int out_features, int group_size) -> Tensor"
    ),
    # x float [..., in]; weight bfloat16 (float32) [out, in]; bias float [out] -> [..., out] in x.dtype.
    "bf16_linear": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "f32_linear": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    # x float [..., in] -> codes int8 [..., in], scales float32 [..., ceil(in / group_size)].
    "quantize_rows": "(Tensor x, int group_size, int bits) -> (Tensor, Tensor)",
    # x, residual float [..., n]; weight float [n] -> normed, x + residual ([0] without a residual), both in x.dtype.
    "rms_norm": "(Tensor x, Tensor weight, float eps, Tensor? residual) -> (Tensor, Tensor)",
    # gate, up float, one shape -> silu(gate) * up.
    "silu_mul": "(Tensor gate, Tensor up) -> Tensor",
    # q float [batch, tokens, heads, dim]; k, v [batch, tokens, kv_heads, dim]; cos, sin float32 [positions,
    # rotary_dim / 2]; keys, values float32 or bfloat16 [batch, kv_heads, slots, dim] -> rotated q.
    "rope_write": (
        "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, int[] starts, Tensor(a!) keys, Tensor(b!) values)"
        " -> Tensor"
    ),
    # the same q and cache; window 0 or slots a token sees; softcap 0 or the cap -> [batch, tokens, heads, dim].
    "ragged_attention": (
        "(Tensor q, Tensor keys, Tensor values, int[] starts, float scale, int window, float softcap) -> Tensor"
    ),
}
# The instruction set the compiled CPU kernels chose, e.g. "avx512vnni"; implemented by the compiled library only.
CPU_ISA_SCHEMA = "cpu_isa() -> str"
# The linear kernels that serve a GPU, "sm_90a" or "sm_80+"; implemented by the compiled CUDA library only.
CUDA_LINEARS_SCHEMA = "cuda_linears(int device) -> str"


# The result's shape and dtype without computing it (torch.compile, meta tensors).


def fake_mxfp4_linear(
    x: Tensor, weight_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, activation_bits: int
) -> Tensor:
    operands.check_mxfp4_linear(x, weight_tiles, scale_tiles, out_features, bias, activation_bits)
    return x.new_empty((*x.shape[:-1], out_features))


def fake_int4_linear(
    x: Tensor,
    weight_tiles: Tensor,
    scale_tiles: Tensor,
    zero_tiles: Tensor | None,
    out_features: int,
    bias: Tensor | None,
    group_size: int,
    activation_bits: int,
) -> Tensor:
    operands.check_int4_linear(
        x, weight_tiles, scale_tiles, zero_tiles, out_features, bias, group_size, activation_bits
    )
    return x.new_empty((*x.shape[:-1], out_features))


def fake_int4_dequantize(
    weight_tiles: Tensor, scale_tiles: Tensor, zero_tiles: Tensor | None, out_features: int, group_size: int
) -> Tensor:
    operands.check_int4_dequantize(weight_tiles, scale_tiles, zero_tiles, out_features, group_size)
    return weight_tiles.new_empty((out_features, scale_tiles.shape[1] * group_size), dtype=torch.bfloat16)


def fake_bf16_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    operands.check_bf16_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def fake_f32_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    operands.check_f32_linear(x, weight, bias)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def fake_quantize_rows(x: Tensor, group_size: int, bits: int) -> tuple[Tensor, Tensor]:
    operands.check_quantize_rows(x, group_size, bits)
    groups = -(-x.shape[-1] // group_size)
    return x.new_empty(x.shape, dtype=operands.INT8), x.new_empty((*x.shape[:-1], groups), dtype=operands.FLOAT32)


def fake_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    operands_rows.check_rms_norm(x, weight, residual)
    return x.new_empty(x.shape), x.new_empty((0,) if residual is None else x.shape)


def fake_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    operands_rows.check_silu_mul(gate, up)
    return gate.new_empty(gate.shape)


def fake_rope_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, starts: list[int], keys: Tensor, values: Tensor
) -> Tensor:
    operands_rows.check_rope_write(q, k, v, cos, sin, starts, keys, values)
    return q.new_empty(q.shape)


def fake_ragged_attention(
    q: Tensor, keys: Tensor, values: Tensor, starts: list[int], scale: float, window: int, softcap: float
) -> Tensor:
    operands_rows.check_ragged_attention(q, keys, values, starts, window, softcap)
    return q.new_empty(q.shape)
