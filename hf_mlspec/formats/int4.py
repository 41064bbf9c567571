"""Which number does an int4 code mean, and which code does a number get?

A group is 32, 64 or 128 consecutive elements along the last (input) axis. It stores 4-bit codes 0..15, one float16
scale and, when asymmetric, one zero point 0..15 in a uint8 (4.13 to 4.5 bits an element, with zeros 4.19 to 4.75):

    value = (code - zero) * scale        symmetric: zero = 8 everywhere and not stored, so integers -8..7

Example, symmetric: -8, 7, 6.2, 5.1 and zeros get scale 1 and codes 0, 15, 14, 13 and 8: values -8, 7, 6, 5 and 0.

The scale is searched. Each of a few divisors d proposes one, rounded to float16 before it is used; the proposal with
the smallest squared error over the group wins, the first of equals:

    symmetric    amax / d        d = 7, 7.5, 8, 8.5, 9   7 clips nothing; 8 is exact when the largest is negative;
                                                         beyond it the largest elements clip and the others gain
    asymmetric   (hi - lo) / d   d = 15, 16, 17          hi = max(0, largest), lo = min(0, smallest): 0 stays exact
                                                         zero = round(-lo / scale - (d - 15) / 2), within 0..15

On Gaussian weights this removes 19, 21 and 25 % of the squared error of amax / 7 at 32, 64 and 128 elements
(asymmetric, of (hi - lo) / 15: 4, 6 and 9 %). Ties round to even. A scale below float16's smallest, 2^-24, becomes
2^-24. A group of zeros has scale 1 and codes equal to its zero point, 8 or (asymmetric) 0: a scale is never zero.

Sources: round-to-nearest over groups as in GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978); a searched clipping
ratio as in AWQ's implementation.

On disk:

    X.weight_packed  uint8    [out, in / 2]      two codes 0..15 a byte, low nibble first
    X.weight_scale   float16  [out, in / group]  step of each group of 32, 64 or 128 along ``in``, above 0
    X.weight_zero    uint8    [out, in / group]  the code that means 0; absent when it is 8 everywhere
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..precision import Bits, Family
from .damage import require_positive, require_size, require_zero_points
from .packing import LARGEST_CODE, pack_nibbles, unpack_nibbles
from .record import Format, Option
from .weight import NibbleWeight, require_float_matrix

GROUP_SIZES = (32, 64, 128)
SYMMETRIC_ZERO = 8

_SYMMETRIC_DIVISORS = (7.0, 7.5, 8.0, 8.5, 9.0)
_ASYMMETRIC_DIVISORS = (15.0, 16.0, 17.0)
_LARGEST_SCALE = torch.finfo(torch.float16).max
_SMALLEST_SCALE = 2.0**-24  # float16's smallest subnormal
_CHUNK = 1 << 19  # elements in flight: the temporaries stay in the cache, whatever the tensor's size
# Below torch's grain of 32768 elements every operation of the search stays on its thread: on a busy machine barriers
# after each of fifty short operations a chunk cost 20 times what a second thread gains on an idle one.
_SEARCH_CHUNK = (1 << 15) - 1
_GPU_CHUNK = 1 << 24  # on a GPU launches cost more than memory
_TO_INTEGERS = 1.5 * 2.0**23  # added and taken away: rounds to integers, ties to even; torch's round splits at 2048


def require_group_size(group_size: int, in_features: int) -> None:
    """ValueError when ``group_size`` is not 32, 64 or 128, or does not divide ``in_features``."""
    if group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"int4 groups hold {sizes} elements, not {group_size!r}: choose one of these")
    if in_features % group_size:
        fitting = [size for size in GROUP_SIZES if in_features % size == 0]
        remedy = f"use group_size={fitting[-1]}" if fitting else "keep this layer in 16 bits"
        raise ValueError(f"in_features is {in_features}, no multiple of the int4 group of {group_size}: {remedy}")


def quantize(
    weight: torch.Tensor, group_size: int = 128, symmetric: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """float32/bfloat16/float16 ``[out, in]`` -> packed uint8 ``[out, in / 2]`` (low nibble first), scales float16
    ``[out, in / group_size]``, zeros uint8 of the scales' shape, or None when symmetric.

    TypeError for another dtype; ValueError when ``weight`` is no matrix, ``in`` no multiple of the group, or a row
    holds NaN, Inf or a group whose scale float16 cannot hold (the row and the group are named).
    """
    out_features, in_features = require_float_matrix("int4 quantizes", weight)
    require_group_size(group_size, in_features)
    codes = torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_features, in_features // group_size, dtype=torch.float16, device=weight.device)
    zeros = torch.empty_like(scales, dtype=torch.uint8)
    step = max(1, (_GPU_CHUNK if weight.is_cuda else _SEARCH_CHUNK) // max(in_features, 1))
    for first in range(0, out_features, step):
        part = slice(first, first + step)
        groups = weight[part].to(torch.float32).unflatten(-1, (-1, group_size))  # [rows, in / group, group]
        low, high = groups.amin(-1), groups.amax(-1)
        _require_range(low, high, symmetric, first)
        codes[part], scales[part], zeros[part] = _search(groups, low, high, symmetric)
    return codes, scales, None if symmetric else zeros


def _require_range(low: torch.Tensor, high: torch.Tensor, symmetric: bool, first_row: int) -> None:
    widest = _widest_scale(low, high, symmetric)
    fits = widest <= _LARGEST_SCALE  # NaN does not
    if fits.all():
        return
    row, group = (~fits).nonzero()[0].tolist()
    where = f"row {first_row + row}, group {group}"
    smallest, largest = low[row, group].item(), high[row, group].item()
    if not (low[row, group].isfinite() and high[row, group].isfinite()):
        raise ValueError(f"int4: {where} holds NaN or Inf: repair the checkpoint or exclude this layer")
    raise ValueError(
        f"int4: {where} ranges from {smallest:g} to {largest:g} and needs the scale {widest[row, group].item():g}, "
        f"float16 ends at {_LARGEST_SCALE:g}: keep this layer in 16 bits or rescale the weight"
    )


def _widest_scale(low: torch.Tensor, high: torch.Tensor, symmetric: bool) -> torch.Tensor:
    if symmetric:
        return torch.maximum(-low, high) / _SYMMETRIC_DIVISORS[0]
    # Divided first: the range of a group may leave float32.
    return high.clamp(min=0) / _ASYMMETRIC_DIVISORS[0] - low.clamp(max=0) / _ASYMMETRIC_DIVISORS[0]


def _search(
    groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    divisors = _SYMMETRIC_DIVISORS if symmetric else _ASYMMETRIC_DIVISORS
    span = torch.maximum(-low, high) if symmetric else high.clamp(min=0) - low.clamp(max=0)
    # Errors are measured in units of the span: squares of small weights would leave float32.
    unit = torch.where(span > 0, span, 1.0).reciprocal_().clamp_(max=torch.finfo(torch.float32).max).unsqueeze(-1)
    best_error = torch.full_like(span, torch.inf)
    best_scale, best_zero = torch.zeros_like(span), torch.zeros_like(span)
    for divisor in divisors:
        scale = (span / divisor).clamp_(min=_SMALLEST_SCALE).to(torch.float16).to(torch.float32)
        zero = _zero_point(low, scale, divisor, symmetric)
        values = _integers(groups, scale, zero, symmetric).mul_(scale.unsqueeze(-1))
        error = values.sub_(groups).mul_(unit).square_().sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
    codes = _integers(groups, best_scale, best_zero, symmetric).add_(best_zero.unsqueeze(-1)).to(torch.uint8)
    best_scale = torch.where(span > 0, best_scale, 1.0)  # of zeros: then a zero on disk is always damage
    return pack_nibbles(codes.flatten(-2)), best_scale.to(torch.float16), best_zero.to(torch.uint8)


def _zero_point(low: torch.Tensor, scale: torch.Tensor, divisor: float, symmetric: bool) -> torch.Tensor:
    if symmetric:
        return torch.full_like(scale, float(SYMMETRIC_ZERO))
    clipped = (divisor - LARGEST_CODE) / 2  # steps beyond either end
    return (low.clamp(max=0).neg_() / scale - clipped).round_().clamp_(0, LARGEST_CODE)


def _integers(groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """code - zero of every element, as float32."""
    steps = (groups / scale.unsqueeze(-1)).add_(_TO_INTEGERS).sub_(_TO_INTEGERS)
    if symmetric:
        return steps.clamp_(-SYMMETRIC_ZERO, LARGEST_CODE - SYMMETRIC_ZERO)
    return steps.add_(zero.unsqueeze(-1)).clamp_(0, LARGEST_CODE).sub_(zero.unsqueeze(-1))


def dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """packed uint8 ``[out, in / 2]``, scales float16 ``[out, in / group]``, zeros uint8 of that shape or None (8
    everywhere) -> ``dtype`` ``[out, in]``.

    Exact in float32; narrower types round once. TypeError for another dtype, ValueError when the shapes do not belong
    together.
    """
    _require_arrays(packed, scales, zeros)
    out_features, half = packed.shape
    group_size = half * 2 // scales.shape[1]
    zero = torch.full_like(scales, SYMMETRIC_ZERO, dtype=torch.int8) if zeros is None else zeros.to(torch.int8)
    out = torch.empty(out_features, half * 2, dtype=dtype, device=packed.device)
    step = max(1, (_GPU_CHUNK if packed.is_cuda else _CHUNK) // max(half * 2, 1))
    for first in range(0, out_features, step):
        part = slice(first, first + step)
        codes = unpack_nibbles(packed[part]).to(torch.int8).unflatten(-1, (-1, group_size))
        values = (codes - zero[part].unsqueeze(-1)).to(torch.float32) * scales[part].to(torch.float32).unsqueeze(-1)
        out[part] = values.flatten(-2).to(dtype)
    return out


def _require_arrays(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    if packed.dtype != torch.uint8 or scales.dtype != torch.float16:
        raise TypeError(f"packed is {packed.dtype}, scales {scales.dtype}: int4 stores torch.uint8 and torch.float16")
    if packed.ndim != 2 or scales.ndim != 2 or packed.shape[0] != scales.shape[0] or not scales.shape[1]:
        raise ValueError(
            f"packed {list(packed.shape)} and scales {list(scales.shape)} do not belong together: [out, in / 2] goes "
            "with [out, in / group]"
        )
    group_size, rest = divmod(packed.shape[1] * 2, scales.shape[1])
    if rest or group_size not in GROUP_SIZES:
        raise ValueError(
            f"{scales.shape[1]} scales a row for {packed.shape[1] * 2} codes: groups of 32, 64 or 128 were expected"
        )
    if zeros is not None and zeros.dtype != torch.uint8:
        raise TypeError(f"zeros is {zeros.dtype}, int4 stores zero points as torch.uint8")
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros has shape {list(zeros.shape)}, one per scale was expected: {list(scales.shape)}")


class Int4Parts(NamedTuple):
    """uint8 codes, float16 scales, uint8 zero points or None (8 everywhere); in tiles, or as on disk."""

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


@dataclass(frozen=True)
class Int4Weight(NibbleWeight):
    """One linear layer's int4 weight, as saved. ``weight_zero`` None: symmetric. ``name`` is only used in messages."""

    PARTS = Int4Parts
    weight_packed: torch.Tensor
    weight_scale: torch.Tensor
    weight_zero: torch.Tensor | None = None
    name: str = "weight"

    @classmethod
    def from_dense(
        cls, weight: torch.Tensor, group_size: int = 128, symmetric: bool = True, name: str = "weight"
    ) -> Int4Weight:
        """Quantize ``[out, in]`` floats; ValueError naming the tensor and the row for NaN, Inf or a scale beyond
        float16."""
        try:
            return cls(*quantize(weight, group_size, symmetric), name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    @property
    def group_size(self) -> int:
        """Elements that share a scale: 32, 64 or 128."""
        return self.in_features // self.weight_scale.shape[1]

    @property
    def symmetric(self) -> bool:
        return self.weight_zero is None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[out, in]`` in ``dtype``."""
        return dequantize(self.weight_packed, self.weight_scale, self.weight_zero, dtype)

    def validate(
        self, out_features: int | None = None, in_features: int | None = None, group_size: int | None = None
    ) -> Int4Weight:
        """Itself, or one specific error: TypeError for a dtype, ValueError for a shape, a truncated tensor, a scale
        that is NaN, Inf, zero or negative, or a zero point beyond 15. Without ``group_size`` the shapes tell it."""
        self.require_dtypes((torch.uint8, torch.float16, torch.uint8), "int4")
        packed, scale = list(self.weight_packed.shape), list(self.weight_scale.shape)
        if len(packed) != 2 or len(scale) != 2 or not scale[1]:
            raise ValueError(
                f"{self.name}: weight_packed has shape {packed} and weight_scale {scale}, both must have two axes, "
                "[out, in / 2] and [out, in / group]"
            )
        expected = [out_features or packed[0], (in_features or packed[1] * 2) // 2]
        require_size(self.name, "weight_packed", self.weight_packed, expected)
        group = group_size or packed[1] * 2 // scale[1]
        if group not in GROUP_SIZES or packed[1] * 2 % group:
            raise ValueError(
                f"{self.name}: {scale[1]} scales a row for in_features {packed[1] * 2}: int4 needs in_features / 32, "
                "/ 64 or / 128 of them"
            )
        require_size(self.name, "weight_scale", self.weight_scale, [packed[0], packed[1] * 2 // group])
        if self.weight_zero is not None:
            require_size(self.name, "weight_zero", self.weight_zero, scale)
        require_positive(self.name, "weight_scale", self.weight_scale)
        if self.weight_zero is not None:
            require_zero_points(self.name, "weight_zero", self.weight_zero)
        return self


def zeros(
    shape: tuple[int, ...], device: torch.device, group_size: int = 128, symmetric: bool = True, **options: Any
) -> Int4Parts:
    """The parts on disk of a weight ``[..., out, in]`` whose values are all 0."""
    *outer, in_features = shape
    code = SYMMETRIC_ZERO * 0x11 if symmetric else 0
    packed = torch.full((*outer, in_features // 2), code, dtype=torch.uint8, device=device)
    scale = torch.ones(*outer, in_features // group_size, dtype=torch.float16, device=device)
    return Int4Parts(packed, scale, None if symmetric else torch.zeros_like(scale, dtype=torch.uint8))


GROUP_OPTION = Option(
    "group_size", 128, "32, 64 or 128 weights that share a scale", GROUP_SIZES, shapes=True, read=int
)
FORMAT = Format(
    word="int4",
    title="int4",
    weight=Int4Weight,
    zeros=zeros,
    value_checks={"scale": require_positive, "zero": require_zero_points},
    group=lambda group_size=128, **options: group_size,
    require_group=require_group_size,
    bits_per_weight=lambda group_size=128, symmetric=True, **options: 4 + (16 if symmetric else 24) / group_size,
    families=(
        Family(
            "w",
            tuple([(bits, activations) for bits in range(1, 9) for activations in (4, 8, 16)]),
            tells_activations=True,
            examples=("w4a16", "w4a8", "w4a4"),
        ),
    ),
    bit_choices=lambda stored: (Bits(4, 16), Bits(4, 8), Bits(4, 4)),
    weights_called="4-bit weights",
    remedy=(
        "load it with from_pretrained(..., quantization_config=hf_mlspec.MLSpecConfig(format='int4')), or draft with "
        "'mxfp4', its cast"
    ),
    level_examples=("w4a8", "w4a4"),
    options=(
        GROUP_OPTION,
        Option("symmetric", True, "a zero point for every group too", (True, False), shapes=True, off="asymmetric"),
    ),
    multiplies=("fused", "dequant"),
    experts=True,
)
