"""How can the first bits of an integer weight be a weight of their own?

A group is 32, 64 or 128 consecutive elements along the last (input) axis, with one float16 scale. Codes have B bits
(1..8); bit B - 1 - p of all codes is plane p, so that plane 0 is the most significant:

    weight_planes uint8 [B, out, in / 8]     bit i of byte j of plane p: bit B - 1 - p of element 8 j + i
    value   = (code - zero_doubled / 2) * scale
    value_b = (c * 2^(B - b) + (2^(B - b) - 1) / 2 - zero_doubled / 2) * scale     c = code >> (B - b): b planes alone,
              put in the middle of the codes that begin with them. The bracket is a multiple of 1/2, exact in bfloat16.

    planes        codes                      zero_doubled   scale
    4 ... 8       q + 2^(B - 1), |q| below   2^B            largest magnitude / (2^(B - 1) - 1)
    1, 2, 3       0 ... 2^B - 1, mid-rise    2^B - 1        of least squared error over a grid
    "ternary"     0, 1, 2, in two planes     2              of least squared error over all thresholds

"int3" and "int2" are 3 and 2 planes; codes that are mid-rise have no zero. Example, B = 8, scale 1: 37 is code 165 =
1010 0101. Four planes hold 1010: 10 * 16 + 7.5 - 128 = 39.5. Its last four planes, 0101, are the other nibble: an
8-bit weight is a 4-bit one and what that one lacks (split_nibbles, join_nibbles).

Sources: Any-Precision LLM (arXiv 2402.10517) reads prefixes of planes, of codes it clusters; BitNest (arXiv
2610.02800) drafts with one nibble of two; ternary thresholds as in Ternary Weight Networks (arXiv 1605.04711),
searched instead of estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..packing import pack_nibbles, unpack_nibbles
from ..weight import require_float_matrix

GROUP_SIZES = (32, 64, 128)
MAX_PLANES = 8
_LARGEST_SCALE = torch.finfo(torch.float16).max
_SMALLEST_SCALE = 2.0**-24  # float16's smallest subnormal
_RATIOS = tuple(0.30 + 0.05 * step for step in range(15))  # of largest magnitude / largest level: 0.30 ... 1.00
_CHUNK = (1 << 15) - 1  # elements in flight, below torch's grain: why is said in formats/int4.py
_GPU_CHUNK = 1 << 24  # on a GPU launches cost more than memory


class Cast(NamedTuple):
    """Planes and ``zero_doubled`` of a word."""

    num_planes: int
    zero_doubled: int


CASTS = {"int3": Cast(3, 7), "int2": Cast(2, 3), "ternary": Cast(2, 2)}
CAST_GROUP = 64


class Planes(NamedTuple):
    """A quantized weight ``[out, in]``. Shapes and dtypes are those on disk (weight.py)."""

    planes: Tensor  # uint8 [B, out, in / 8]
    scale: Tensor  # float16 [out, in / group]
    zero_doubled: int


def cast_of(planes: int | str) -> Cast:
    """Planes and ``zero_doubled`` of a number of planes 1..8, or of "int3", "int2" or "ternary"; else ValueError."""
    if isinstance(planes, str) and planes in CASTS:
        return CASTS[planes]
    if isinstance(planes, bool) or not isinstance(planes, int) or not 1 <= planes <= MAX_PLANES:
        raise ValueError(f"bit-planes: {planes!r} planes, choose 1 to {MAX_PLANES} or one of {', '.join(CASTS)}")
    return Cast(planes, 2**planes if planes > 3 else 2**planes - 1)


def default_group(planes: int | str) -> int:
    """Weights that share a scale by default: 64 for the words, else 128."""
    return CAST_GROUP if planes in CASTS else GROUP_SIZES[-1]


def zeros_doubled(num_planes: int) -> tuple[int, int]:
    """The least and the greatest ``zero_doubled`` of so many planes with which bfloat16 holds the levels of every
    prefix."""
    return (254, 256) if num_planes == MAX_PLANES else (0, 2 * (2**num_planes - 1))


def require_group_size(group_size: int, in_features: int) -> None:
    """ValueError when ``group_size`` is not 32, 64 or 128, or does not divide ``in_features``."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"bit-plane groups hold 32, 64 or 128 elements, not {group_size!r}: choose one of these")
    if in_features % group_size:
        fitting = [size for size in GROUP_SIZES if in_features % size == 0]
        remedy = f"use group_size={fitting[-1]}" if fitting else "keep this layer in 16 bits"
        raise ValueError(f"in_features is {in_features}, no multiple of the group of {group_size}: {remedy}")


def quantize(weight: Tensor, planes: int | str = 8, group_size: int = 128) -> Planes:
    """float32/bfloat16/float16 ``[out, in]`` -> planes and scales; ``planes``: 1..8, "int3", "int2" or "ternary".

    Works in chunks of rows. TypeError for another dtype; ValueError for no matrix, a group that does not divide
    ``in``, and a row with NaN, Inf or a group whose scale float16 cannot hold (row and group are named).
    """
    cast = cast_of(planes)
    out_features, in_features = require_float_matrix("bit-planes quantize", weight)
    require_group_size(group_size, in_features)
    search = _search_of(planes, cast)
    packed = weight.new_empty((cast.num_planes, out_features, in_features // 8), dtype=torch.uint8)
    scales = weight.new_empty((out_features, in_features // group_size), dtype=torch.float16)
    for part in _row_chunks(weight):
        groups = weight[part].float().unflatten(-1, (-1, group_size))
        largest = groups.abs().amax(-1)
        _require_range(largest, cast, part.start)
        scale = search(groups, largest).clamp(_SMALLEST_SCALE, _LARGEST_SCALE)
        scale = torch.where(largest > 0, scale, _SMALLEST_SCALE if cast.zero_doubled & 1 else 1.0).half()
        codes = _codes(groups, scale.float(), cast)
        packed[:, part], scales[part] = pack_planes(codes.flatten(-2), cast.num_planes), scale
    return Planes(packed, scales, cast.zero_doubled)


def _search_of(planes: int | str, cast: Cast) -> Callable[[Tensor, Tensor], Tensor]:
    """groups ``[rows, groups, size]`` and their largest magnitudes -> scales ``[rows, groups]``."""
    if planes == "ternary":
        return _ternary_scale
    if cast.num_planes <= 3:
        return partial(_grid_scale, cast=cast)
    return lambda groups, largest: largest / _largest_level(cast)


def _largest_level(cast: Cast) -> float:
    """In scales: 3.5 of "int3", 1 of "ternary", 127 of 8 planes, whose code 0 is not used."""
    return cast.zero_doubled / 2 - (cast.num_planes > 3)


def _grid_scale(groups: Tensor, largest: Tensor, cast: Cast) -> Tensor:
    unit = torch.where(largest > 0, largest, 1.0).unsqueeze(-1)
    normal = groups / unit  # squares of small weights would leave float32
    best_error, best = torch.full_like(largest, torch.inf), torch.zeros_like(largest)
    for ratio in _RATIOS:
        scale = torch.full_like(largest, ratio / _largest_level(cast))
        values = (_codes(normal, scale, cast).float() - cast.zero_doubled / 2) * scale.unsqueeze(-1)
        error = (values - normal).square().sum(-1)
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, scale, best)
    return best * largest


def _ternary_scale(groups: Tensor, largest: Tensor) -> Tensor:
    """The mean of the k largest magnitudes removes sum^2 / k of the squared error: the k that removes most."""
    unit = torch.where(largest > 0, largest, 1.0).unsqueeze(-1)
    sums = (groups.abs() / unit).sort(-1, descending=True).values.cumsum(-1)
    means = sums / torch.arange(1, groups.shape[-1] + 1, device=groups.device)
    return means.gather(-1, (sums * means).argmax(-1, keepdim=True)).squeeze(-1) * largest


def _codes(groups: Tensor, scale: Tensor, cast: Cast) -> Tensor:
    """The nearest codes, uint8; ties to the even one."""
    steps = groups / scale.unsqueeze(-1) + cast.zero_doubled / 2
    reach = _largest_level(cast)
    return steps.round_().clamp_(cast.zero_doubled / 2 - reach, cast.zero_doubled / 2 + reach).to(torch.uint8)


def _require_range(largest: Tensor, cast: Cast, first_row: int) -> None:
    fits = largest / _largest_level(cast) <= _LARGEST_SCALE  # NaN does not
    if fits.all():
        return
    row, group = (~fits).nonzero()[0].tolist()
    where, value = f"row {first_row + row}, group {group}", largest[row, group].item()
    if not largest[row, group].isfinite():
        raise ValueError(f"bit-planes: {where} holds NaN or Inf: repair the checkpoint or exclude this layer")
    raise ValueError(
        f"bit-planes: {where} reaches {value:g} and needs a scale that float16, which ends at {_LARGEST_SCALE:g}, "
        "cannot hold: keep this layer in 16 bits or rescale the weight"
    )


def pack_planes(codes: Tensor, num_planes: int) -> Tensor:
    """uint8 codes below 2^num_planes ``[out, in]`` -> planes uint8 ``[num_planes, out, in / 8]``."""
    if codes.shape[-1] % 8:
        raise ValueError(f"pack_planes: the last axis holds {codes.shape[-1]} codes, 8 of a plane share a byte")
    octets = codes.unflatten(-1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    planes = [((octets >> (num_planes - 1 - p) & 1) << places).sum(-1, dtype=torch.uint8) for p in range(num_planes)]
    return torch.stack(planes)


def unpack_planes(planes: Tensor) -> Tensor:
    """Planes uint8 ``[b, out, in / 8]`` -> codes uint8 ``[out, in]`` of b bits."""
    places = torch.arange(8, dtype=torch.uint8, device=planes.device)
    codes = planes.new_zeros((planes.shape[1], planes.shape[2], 8))
    for plane in planes:
        codes = codes << 1 | (plane.unsqueeze(-1) >> places & 1)
    return codes.flatten(-2)


def prefix_levels(total: int, zero_doubled: int, num_planes: int) -> Tensor:
    """float32 ``[2^num_planes]``: the bracket of value_b for each code of the first ``num_planes`` of ``total``
    planes. ValueError unless 1 <= num_planes <= total."""
    if not 1 <= num_planes <= total:
        raise ValueError(f"{num_planes} planes asked for, the weight has {total}: choose 1 to {total}")
    width = 2 ** (total - num_planes)
    return torch.arange(2**num_planes, dtype=torch.float32) * width + ((width - 1) / 2 - zero_doubled / 2)


def dequantize(
    planes: Tensor, scale: Tensor, zero_doubled: int, num_planes: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """uint8 ``[B, out, in / 8]``, float16 ``[out, in / group]`` -> the ``dtype`` ``[out, in]`` that the first
    ``num_planes`` planes mean (None: all). Exact in float32; narrower types round once."""
    used = len(planes) if num_planes is None else num_planes
    levels = prefix_levels(len(planes), zero_doubled, used).to(planes.device)
    out = planes.new_empty((planes.shape[1], planes.shape[2] * 8), dtype=dtype)
    for part in _row_chunks(out):
        values = levels[unpack_planes(planes[:used, part]).int()].unflatten(-1, (scale.shape[1], -1))
        out[part] = (values * scale[part].float().unsqueeze(-1)).flatten(-2).to(dtype)
    return out


def split_nibbles(planes: Tensor) -> tuple[Tensor, Tensor]:
    """Eight planes -> the 4-bit codes of planes 0..3 and of planes 4..7, uint8 ``[out, in / 2]``, low nibble first."""
    if len(planes) != 8:
        raise ValueError(f"split_nibbles: {len(planes)} planes, two nibbles are 8")
    return pack_nibbles(unpack_planes(planes[:4])), pack_nibbles(unpack_planes(planes[4:]))


def join_nibbles(high: Tensor, low: Tensor) -> Tensor:
    """The inverse of ``split_nibbles``: planes uint8 ``[8, out, in / 8]``."""
    return pack_planes(unpack_nibbles(high) << 4 | unpack_nibbles(low), 8)


def _row_chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, (_GPU_CHUNK if rows.is_cuda else _CHUNK) // max(rows.shape[1], 1))
    return (slice(first, min(first + step, len(rows))) for first in range(0, len(rows), step))
