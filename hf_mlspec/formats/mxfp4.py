"""Which number does an MXFP4 code mean, and which code does a number get?

A block is 32 consecutive elements along the last (input) axis. It stores one E8M0 scale byte, worth 2^(byte - 127),
and 32 E2M1 codes of 4 bits (4.25 bits an element):

    bit   3     2 1       0            index      0   1    2  3    4  5  6  7      (8..15: the same, negative)
          sign  exponent  mantissa     magnitude  0   0.5  1  1.5  2  3  4  6

    value = E2M1(code) * 2^(scale byte - 127).   Scale byte 255 is NaN; 0 is 2^-127, a float32 subnormal.

Example, rule "ocp_floor": a block whose largest magnitude is 7.5 has exponent 2, scale 2^(2 - 2) = 1 (byte 127); 7.5
saturates to 6 (code 7), -2.5 is a tie between 2 and 3 and takes the even code 4: -2 (code 12).

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3.3, 5.4.1 and 6.3. The spec leaves the choice of scale open:

    rule        scale exponent                                  ties            used by
    ocp_floor   floor(log2 amax) - 2                            even code       the spec, ML-SpecQD, microxcaling
    even_bump   the same, one more if amax >= 1.75 * 2^floor    even code       compressed-tensors, vLLM, AMD Quark
    ceil        smallest power of two >= amax / 6               away from zero  triton_kernels (gpt-oss on the fly)

All keep the sign of zero. A NaN or an Inf anywhere makes its block NaN: scale byte 255, all codes 0.

On disk, under the names that compressed-tensors uses ("mxfp4-pack-quantized"):

    X.weight_packed  uint8  [out, in / 2]    two codes a byte, low nibble first
    X.weight_scale   uint8  [out, in / 32]   E8M0 byte of each block of 32 along ``in``
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..precision import Bits, Family
from .damage import NAN_SCALE, require_size, require_values
from .packing import pack_nibbles
from .record import CastWord, Format, Option
from .weight import INPUT_DTYPES, NibbleWeight

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_CHUNK = 1 << 19  # elements in flight: the temporaries (under 16 MB) stay in the cache, whatever the tensor's size
_SEARCH_CHUNK = (1 << 15) - 1  # of quantize, below torch's grain: why is said in int4.py
_GPU_CHUNK = 1 << 24  # on a GPU launches cost more than memory: temporaries of 0.3 GB
_MAGNITUDE_BITS = 0x7FFFFFFF
_INFINITY_BITS = 0x7F800000
_MANTISSA_BITS = 23


def _next_up(value: float) -> float:
    return torch.nextafter(torch.tensor(value), torch.tensor(math.inf)).item()


# A magnitude's index is the number of thresholds at or below it. On a tie (the threshold itself) the even index wins:
# it lies below at the 1st, 3rd, 5th and 7th threshold, which therefore moves up by one float32 ULP.
_TIES_AWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_EVEN = tuple(t if i % 2 else _next_up(t) for i, t in enumerate(_TIES_AWAY))


def _floor_code(amax_bits: torch.Tensor) -> torch.Tensor:
    return (amax_bits >> _MANTISSA_BITS) - 2


def _even_bump_code(amax_bits: torch.Tensor) -> torch.Tensor:
    return ((amax_bits + (1 << (_MANTISSA_BITS - 2))) >> _MANTISSA_BITS) - 2


def _ceil_code(amax_bits: torch.Tensor) -> torch.Tensor:
    sixth = (amax_bits.view(torch.float32) / 6.0).view(torch.int32)
    return (sixth + ((1 << _MANTISSA_BITS) - 1)) >> _MANTISSA_BITS


RULES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[float, ...]]] = {
    "ocp_floor": (_floor_code, _TIES_EVEN),
    "even_bump": (_even_bump_code, _TIES_EVEN),
    "ceil": (_ceil_code, _TIES_AWAY),
}


def require_rule(rule: str) -> None:
    """ValueError naming the known rules when ``rule`` is none of them."""
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(f"unknown MXFP4 rounding rule {rule!r}: choose one of {', '.join(RULES)}")


def quantize(w: torch.Tensor, rule: str = "ocp_floor") -> tuple[torch.Tensor, torch.Tensor]:
    """float32/bfloat16/float16 ``[..., in]`` -> packed uint8 ``[..., in / 2]``, scales uint8 ``[..., in / 32]``.

    Works in chunks, so the temporaries stay under 1 MB (on a GPU 0.3 GB). TypeError for another dtype; ValueError when
    ``in`` is no multiple of 32 or the rule is unknown.
    """
    require_rule(rule)
    if w.dtype not in INPUT_DTYPES:
        raise TypeError(f"MXFP4 quantizes float32, bfloat16 or float16, not {w.dtype}: convert the tensor first")
    if w.ndim == 0 or w.shape[-1] % BLOCK:
        size = w.shape[-1] if w.ndim else "no axis"
        raise ValueError(
            f"MXFP4 blocks are {BLOCK} elements along the last axis, which is {size} here (shape {list(w.shape)})"
        )
    *outer, size = w.shape
    rows = w.reshape(-1, size)
    packed = torch.empty(rows.shape[0], size // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(rows.shape[0], size // BLOCK, dtype=torch.uint8, device=w.device)
    step = max(1, (_GPU_CHUNK if w.is_cuda else _SEARCH_CHUNK) // max(size, 1))
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        packed[part], scales[part] = _quantize_rows(rows[part].to(torch.float32), rule)
    return packed.view(*outer, size // 2), scales.view(*outer, size // BLOCK)


def _quantize_rows(rows: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    scale_code, thresholds = RULES[rule]
    blocks = rows.unflatten(-1, (-1, BLOCK)).contiguous()  # [rows, in / 32, 32]
    magnitude_bits = blocks.view(torch.int32) & _MAGNITUDE_BITS
    # Bits of non-negative floats order like the floats; Inf and NaN come out on top.
    amax_bits = magnitude_bits.amax(-1)
    finite = amax_bits < _INFINITY_BITS
    code = scale_code(torch.where(finite, amax_bits, 0)).clamp_(min=0)  # the largest float32 gives 253
    inverse_scale = ((254 - code) << _MANTISSA_BITS).view(torch.float32)  # 2^(127 - code), never subnormal
    scaled = magnitude_bits.view(torch.float32) * inverse_scale.unsqueeze(-1)
    index = torch.zeros(scaled.shape, dtype=torch.uint8, device=rows.device)
    for threshold in thresholds:  # a binary search per element (bucketize) mispredicts its branches: 2.5 times slower
        index += scaled >= threshold
    codes = torch.where(finite.unsqueeze(-1), index | (torch.signbit(blocks).to(torch.uint8) << 3), 0)
    scales = torch.where(finite, code, NAN_SCALE).to(torch.uint8)
    return pack_nibbles(codes.flatten(-2)), scales


def dequantize(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """packed uint8 ``[..., in / 2]``, scales uint8 ``[..., in / 32]`` -> ``dtype`` ``[..., in]``.

    Exact in float32 and bfloat16 up to their largest value, beyond it Inf; float16 has a narrower range and rounds
    once. ValueError when the shapes do not belong together, TypeError when they are not uint8.
    """
    if packed.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise TypeError(f"packed is {packed.dtype} and scales {scales.dtype}, MXFP4 stores both as torch.uint8")
    if packed.shape[:-1] != scales.shape[:-1] or packed.shape[-1] != scales.shape[-1] * (BLOCK // 2):
        raise ValueError(
            f"packed {list(packed.shape)} and scales {list(scales.shape)} do not belong together: "
            f"[..., in / 2] goes with [..., in / {BLOCK}]"
        )
    *outer, half = packed.shape
    rows = math.prod(outer)  # -1 is ambiguous where there are no columns
    packed_rows, scale_rows = packed.reshape(rows, half), scales.reshape(rows, half // (BLOCK // 2))
    out = torch.empty(packed_rows.shape[0], half * 2, dtype=dtype, device=packed.device)
    step = max(1, (_GPU_CHUNK if packed.is_cuda else _CHUNK) // max(half * 2, 1))
    for first in range(0, packed_rows.shape[0], step):
        part = slice(first, first + step)
        _dequantize_rows(packed_rows[part], scale_rows[part], out[part])
    return out.view(*outer, half * 2)


def _dequantize_rows(packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    # bfloat16 holds every scale and every product exactly; float16 has too little range and goes through float32.
    exact = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32
    pairs, powers = byte_values(exact, packed.device), scale_values(exact, packed.device)
    values = pairs.index_select(0, packed.flatten().to(torch.int32)).view(exact)
    blocks = values.view(*scales.shape, BLOCK)
    factors = powers.index_select(0, scales.flatten().to(torch.int32)).view(*scales.shape, 1)
    if out.dtype == exact:
        torch.mul(blocks, factors, out=out.view(blocks.shape))
    else:
        out.copy_(blocks.mul_(factors).view(out.shape))


def byte_values(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """``[256]`` integers whose bytes are the two ``dtype`` values of each packed byte, low nibble first: one load per
    byte."""
    signed = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    word = torch.int64 if dtype == torch.float32 else torch.int32
    return torch.stack((signed[byte & 15], signed[byte >> 4]), dim=-1).view(word).flatten()


def scale_values(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> torch.Tensor:
    """``[256]``: the value 2^(code - 127) of each E8M0 byte; code 0 is the subnormal 2^-127, code 255 is NaN."""
    bits = torch.arange(256, dtype=torch.int32, device=device) << _MANTISSA_BITS
    bits[0], bits[NAN_SCALE] = 1 << (_MANTISSA_BITS - 1), _INFINITY_BITS | (1 << (_MANTISSA_BITS - 1))
    return bits.view(torch.float32).to(dtype)


class Mxfp4Parts(NamedTuple):
    """uint8 codes and scales; in tiles, or as on disk."""

    packed: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Mxfp4Weight(NibbleWeight):
    """One linear layer's MXFP4 weight, as saved. ``name`` is only used in messages."""

    PARTS = Mxfp4Parts
    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    name: str = "weight"

    @classmethod
    def from_dense(cls, weight: torch.Tensor, rule: str = "ocp_floor", name: str = "weight") -> Mxfp4Weight:
        """Quantize ``[out, in]`` floats; ValueError naming the tensor when it holds NaN or Inf."""
        packed, scales = quantize(weight, rule)
        bad = int((scales == NAN_SCALE).sum())
        if bad:
            raise ValueError(
                f"{name}: {bad} of its {scales.numel()} blocks of {BLOCK} hold NaN or Inf, which MXFP4 cannot "
                "draft with: repair the checkpoint or exclude this layer"
            )
        return cls(packed, scales, name)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[out, in]`` in ``dtype``."""
        return dequantize(self.weight_packed, self.weight_scale, dtype)

    def validate(self, out_features: int | None = None, in_features: int | None = None) -> Mxfp4Weight:
        """Itself, or one specific error: TypeError for a dtype, ValueError for a shape, a truncated tensor or a NaN
        scale."""
        self.require_dtypes((torch.uint8, torch.uint8), "MXFP4")
        packed, scale = list(self.weight_packed.shape), list(self.weight_scale.shape)
        if len(packed) != 2 or len(scale) != 2:
            raise ValueError(
                f"{self.name}: weight_packed has shape {packed} and weight_scale {scale}, both must have two axes, "
                f"[out, in / 2] and [out, in / {BLOCK}]"
            )
        expected = [out_features or packed[0], (in_features or packed[1] * 2) // 2]
        require_size(self.name, "weight_packed", self.weight_packed, expected)
        require_size(self.name, "weight_scale", self.weight_scale, [packed[0], packed[1] // (BLOCK // 2)])
        if packed[1] % (BLOCK // 2):
            raise ValueError(f"{self.name}: in_features is {packed[1] * 2}, MXFP4 needs a multiple of {BLOCK}")
        require_values(self.name, "weight_scale", self.weight_scale)
        return self


def zeros(shape: tuple[int, ...], device: torch.device, **options: Any) -> Mxfp4Parts:
    """The parts on disk of a weight ``[..., out, in]`` whose values are all 0."""
    *outer, in_features = shape
    packed = torch.zeros(*outer, in_features // 2, dtype=torch.uint8, device=device)
    return Mxfp4Parts(packed, torch.zeros(*outer, in_features // BLOCK, dtype=torch.uint8, device=device))


FORMAT = Format(
    word="mxfp4",
    title="MXFP4",
    weight=Mxfp4Weight,
    zeros=zeros,
    group=lambda **options: BLOCK,
    bits_per_weight=lambda **options: 4 + 8 / BLOCK,
    families=(Family("mxfp4", ((4, 4), (4, 8), (4, 16)), {"mxfp4": 4}, examples=("mxfp4",)),),
    bit_choices=lambda stored: (Bits(4, 16), Bits(4, 8)),
    weights_called="4-bit weights",
    remedy=(
        "load it with from_pretrained(..., quantization_config=hf_mlspec.MLSpecConfig(format='int4')), or draft with "
        "'mxfp4', its cast"
    ),
    level_examples=("mxfp4a8",),
    options=(Option("rule", "ocp_floor", "ocp_floor, even_bump or ceil", require=require_rule),),
    casts=(CastWord("mxfp4"),),
    cast_activations=lambda device: 8 if device == "cpu" else 16,  # the paper's kernel
    experts=True,
)
