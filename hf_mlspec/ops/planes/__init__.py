"""What is a weight of bit-planes to the kernels: its op, its plain torch, and its tiles on every device?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...formats import planes as bitplanes
from ...formats.mxfp4 import BLOCK
from ...formats.planes import GROUP_SIZES, MAX_PLANES, zeros_doubled
from ..cuda_library import serves
from ..operator import REFERENCES, Operands, like_x, operator
from ..products import bias_of, finish, in_slices, integer_product, rounded, tiles_of
from ..tiles import TILE_OUTPUTS, num_tiles
from . import tiles, tiles_cuda
from .tiles import PLANE_BYTES

INTEGER_PLANES = 7  # the most that integers meet


class PlaneTiles(NamedTuple):
    """On the CPU uint8 ``[planes, ceil(out / 16), in / 32, 64]`` and float16 ``[ceil(out / 16), in / group, 16]``
    (tiles.py beside this); on a GPU that kernels serve as tiles_cuda.py says."""

    planes: Tensor
    scale: Tensor


def _check_weight(given: Operands) -> tuple[int, int]:
    """in_features and stored planes."""
    planes, group_size, out_features = given.plane_tiles, given.group_size, given.out_features
    given.require_dtype("plane_tiles", torch.uint8)
    if out_features < 0:
        raise ValueError(f"{given.op}: out_features is {out_features}, it cannot be negative")
    if planes.is_cuda and tiles_cuda.is_packed(planes):
        in_features = tiles_cuda.in_features(planes, given.scale_tiles, group_size)
        stored = tiles_cuda.stored_planes(planes)
        plane_shape, scale_shape = tiles_cuda.shapes(out_features, in_features, stored, group_size)
    else:
        if planes.ndim != 4 or not 1 <= planes.shape[0] <= MAX_PLANES:
            raise ValueError(
                f"{given.op}: plane_tiles has shape {list(planes.shape)}, expected [1 to {MAX_PLANES} planes, out / "
                f"16, in / {BLOCK}, {PLANE_BYTES}] from prepack_planes"
            )
        stored, count, in_features = planes.shape[0], num_tiles(out_features), planes.shape[2] * BLOCK
        if in_features % group_size:
            raise ValueError(f"{given.op}: group_size {group_size} does not divide in_features = {in_features}")
        plane_shape = [stored, count, planes.shape[2], PLANE_BYTES]
        scale_shape = [count, in_features // group_size, TILE_OUTPUTS]
    given.require_part("plane_tiles", torch.uint8, plane_shape)
    given.require_part("scale_tiles", torch.float16, scale_shape)
    return in_features, stored


def _check_linear(given: Operands) -> None:
    given.require_choice("group_size", GROUP_SIZES)
    in_features, stored = _check_weight(given)
    _check_numbers(given, in_features, stored, stored)


def _check_numbers(given: Operands, in_features: int, stored: int, total: int) -> None:
    """Of a weight of ``total`` planes whose tiles store the first ``stored``."""
    require_planes(given, stored, total)
    given.require_rows(in_features, given.out_features)


def require_planes(given: Operands, stored: int, total: int | None = None) -> None:
    """ValueError unless num_planes and zero_doubled are those of a weight of ``total`` planes, None: of those that its
    tiles store."""
    total = total or stored
    if not 1 <= given.num_planes <= stored:
        raise ValueError(
            f"{given.op}: num_planes is {given.num_planes}, the weight stores {stored}: choose 1 to {stored}"
        )
    least, most = zeros_doubled(total)
    if not least <= given.zero_doubled <= most:
        raise ValueError(
            f"{given.op}: zero_doubled is {given.zero_doubled}, twice a code of {total} planes is 0 to "
            f"{2 * (2**total - 1)}, and bfloat16 holds every level from {least} to {most}"
        )


@operator(_check_linear, like_x)
def _bitplane_linear(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, group_size: int,
    zero_doubled: int, num_planes: int,
) -> Tensor:  # fmt: skip
    plane_tiles, scale_tiles = on_cpu_order(plane_tiles, scale_tiles, out_features)

    def part(rows: slice) -> Tensor:
        cut = tiles_of(rows)
        planes, scale = tiles.unpack(plane_tiles[:, cut], scale_tiles[cut], rows.stop - rows.start)
        dense = bitplanes.dequantize(planes, scale, zero_doubled, num_planes)  # level x scale does not fit bfloat16
        return finish(F.linear(rounded(x), dense), bias_of(bias, rows), x.dtype)

    return in_slices(part, out_features, x.shape[-1])


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
    total_planes: int | None = None,
    outputs_of_weight: int = 0,
    apart: Sequence[Tensor] = (),
) -> Tensor:
    """float x ``[..., in]`` times the first ``num_planes`` planes of a weight from ``prepack_planes`` -> ``[...,
    out]``.

    x is rounded to bfloat16; products are exact, sums float32 within each group of group_size 32, 64 or 128, which is
    then scaled. zero_doubled: twice the code that means 0 (formats/planes/). total_planes: of the weight where its
    tiles store the first few alone. outputs_of_weight: where these are but some outputs of a weight, all of it: then
    they have its order of sums, and so its bits; 0: these are all. apart: planes behind those of tiles of a GPU, uint8
    ``[planes, bytes of one]`` (tiles_cuda.plane_bytes): those that are resident, or None, and those that were fetched,
    which work in front of this product may still write.
    """
    tiles_and_shape = x, plane_tiles, scale_tiles, out_features, bias, group_size, zero_doubled, num_planes
    if any(own is not None for own in apart) and num_planes > stored_planes(plane_tiles):
        resident, fetched = (*apart, None)[:2]
        total = total_planes or stored_planes(plane_tiles)
        return _bitplane_apart(
            *tiles_and_shape[:3], resident, fetched, *tiles_and_shape[3:], total, outputs_of_weight
        )
    if total_planes in (None, stored_planes(plane_tiles)) and outputs_of_weight in (0, out_features):
        return _bitplane_linear(*tiles_and_shape)
    return _bitplane_part(*tiles_and_shape, total_planes or stored_planes(plane_tiles), outputs_of_weight)


def _check_whole(given: Operands, stored: int) -> None:
    """Of the weight of which these are some planes, or some outputs."""
    if not stored <= given.total_planes <= MAX_PLANES:
        raise ValueError(
            f"{given.op}: total_planes is {given.total_planes}, the tiles store {stored}: it is that to {MAX_PLANES}"
        )
    if 0 != given.outputs_of_weight < given.out_features:
        raise ValueError(
            f"{given.op}: outputs_of_weight is {given.outputs_of_weight}, and out_features, some of them, "
            f"{given.out_features}"
        )


def _check_part(given: Operands) -> None:
    given.require_choice("group_size", GROUP_SIZES)
    in_features, stored = _check_weight(given)
    _check_whole(given, stored)
    _check_numbers(given, in_features, stored, given.total_planes)


@operator(_check_part, like_x, composed_on_cpu=True)
def _bitplane_part(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, group_size: int,
    zero_doubled: int, num_planes: int, total_planes: int, outputs_of_weight: int,
) -> Tensor:  # fmt: skip
    planes, scale = on_cpu_order(plane_tiles, scale_tiles, out_features)
    if len(planes) < total_planes:  # the others are not read
        planes = torch.cat([planes, planes.new_zeros(total_planes - len(planes), *planes.shape[1:])])
    multiply = REFERENCES["bitplane_linear"] if x.is_cuda else _bitplane_linear
    return multiply(x, planes, scale, out_features, bias, group_size, zero_doubled, num_planes)


def _check_weight_apart(given: Operands) -> tuple[int, int, int]:
    """in_features, planes stored in the tiles, and those that lie apart."""
    if not tiles_cuda.is_packed(given.plane_tiles):
        raise ValueError(f"{given.op}: plane_tiles has shape {list(given.plane_tiles.shape)}, expected those of a GPU")
    in_features = tiles_cuda.in_features(given.plane_tiles, given.scale_tiles, given.group_size)
    stored = tiles_cuda.stored_planes(given.plane_tiles)
    plane_shape, scale_shape = tiles_cuda.shapes(given.out_features, in_features, stored, given.group_size)
    given.require_part("plane_tiles", torch.uint8, plane_shape)
    given.require_part("scale_tiles", torch.float16, scale_shape)
    beside = 0
    for name in ("resident", "fetched"):
        if (planes := vars(given)[name]) is not None:
            count = len(planes) if planes.ndim else 0
            given.require_part(name, torch.uint8, (count, tiles_cuda.plane_bytes(given.plane_tiles)))
            beside += count
    return in_features, stored, beside


def _check_apart(given: Operands) -> None:
    given.require_choice("group_size", GROUP_SIZES)
    in_features, stored, beside = _check_weight_apart(given)
    _check_whole(given, stored)
    _check_numbers(given, in_features, min(stored + beside, given.total_planes), given.total_planes)


@operator(_check_apart, like_x, composed_on_cpu=True)
def _bitplane_apart(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, resident: Tensor | None, fetched: Tensor | None,
    out_features: int, bias: Tensor | None, group_size: int, zero_doubled: int, num_planes: int, total_planes: int,
    outputs_of_weight: int,
) -> Tensor:  # fmt: skip
    tiles = with_apart(plane_tiles, resident, fetched, total_planes)
    multiply = REFERENCES["bitplane_part"] if x.is_cuda else _bitplane_part
    how = group_size, zero_doubled, num_planes, total_planes, outputs_of_weight
    return multiply(x, *on_cpu_order(tiles, scale_tiles, out_features), out_features, bias, *how)


def with_apart(plane_tiles: Tensor, resident: Tensor | None, fetched: Tensor | None, total_planes: int) -> Tensor:
    """Tiles of a GPU with the planes that lie apart in their place; as many as a weight has."""
    found = [own for own in (resident, fetched) if own is not None]
    if not found:
        return plane_tiles
    return tiles_cuda.joined(plane_tiles, torch.cat(found)[: total_planes - tiles_cuda.stored_planes(plane_tiles)])


def _check_sums(given: Operands) -> None:
    vars(given)["bias"] = None
    _check_linear(given)


@operator(
    _check_sums,
    lambda given: given.x.new_empty((*given.x.shape[:-1], given.out_features), dtype=torch.float32),
    composed_on_cpu=True,
)
def _bitplane_sums(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, out_features: int, group_size: int, zero_doubled: int,
    num_planes: int,
) -> Tensor:  # fmt: skip
    multiply = REFERENCES["bitplane_linear"] if x.is_cuda else _bitplane_linear  # the kernel on a GPU rounds
    return multiply(x.float(), plane_tiles, scale_tiles, out_features, None, group_size, zero_doubled, num_planes)


def bitplane_sums(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, out_features: int, *, group_size: int, zero_doubled: int,
    num_planes: int,
) -> Tensor:  # fmt: skip
    """``bitplane_linear`` of x of any float dtype without the last rounding -> float32 ``[..., out]``."""
    return _bitplane_sums(x, plane_tiles, scale_tiles, out_features, group_size, zero_doubled, num_planes)


def _check_integers(given: Operands) -> None:
    given.require_choice("group_size", GROUP_SIZES)
    in_features, stored = _check_weight(given)
    given.require_choice("activation_group", GROUP_SIZES)
    given.require_choice("activation_bits", (4, 8))
    if stored > INTEGER_PLANES:
        raise ValueError(f"{given.op}: the weight stores {stored} planes, integers meet 1 to {INTEGER_PLANES}")
    if given.activation_group > given.group_size:
        raise ValueError(
            f"{given.op}: activation_group is {given.activation_group}, more than group_size = {given.group_size}"
        )
    given.require_rows(in_features, given.out_features)


@operator(_check_integers, like_x)
def _bitplane_integers(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None, group_size: int,
    activation_group: int, activation_bits: int,
) -> Tensor:  # fmt: skip
    plane_tiles, scale_tiles = on_cpu_order(plane_tiles, scale_tiles, out_features)
    zero, copies = 2 ** (len(plane_tiles) - 1), group_size // activation_group

    def part(rows: slice) -> Tensor:
        cut = tiles_of(rows)
        planes, scale = tiles.unpack(plane_tiles[:, cut], scale_tiles[cut], rows.stop - rows.start)
        codes = (bitplanes.unpack_planes(planes).to(torch.int16) - zero).to(torch.int8)
        own = scale.double().repeat_interleave(copies, 1)
        return integer_product(x, codes, own, activation_group, activation_bits, bias_of(bias, rows))

    return in_slices(part, out_features, x.shape[-1])


def bitplane_integers(
    x: Tensor, plane_tiles: Tensor, scale_tiles: Tensor, out_features: int, bias: Tensor | None = None, *,
    group_size: int, activation_group: int, activation_bits: int,
) -> Tensor:  # fmt: skip
    """float x ``[..., in]`` as integers of 8 or 4 bits times all 1 to 7 planes of a weight from ``prepack_planes``,
    whose middle code means 0 -> ``[..., out]`` in x.dtype.

    x is quantized in groups of activation_group inputs (formats/activations.py), which are not larger than the
    weight's. Dot products of a group are exact, in float32 they are scaled and added group after group. There is no
    kernel for GPUs: plain torch there.
    """
    multiply = REFERENCES["bitplane_integers"] if x.is_cuda else _bitplane_integers
    return multiply(
        x, plane_tiles, scale_tiles, out_features, bias, group_size, activation_group, activation_bits
    )


def prepack_planes(planes: Tensor, scale: Tensor) -> PlaneTiles:
    """uint8 ``[B, out, in / 8]``, float16 ``[out, in / group]`` -> plane_tiles, scale_tiles. Errors as
    ``prepack_nested``."""
    layout = tiles_cuda if serves(planes) else tiles
    return PlaneTiles(*layout.pack(planes, scale))


def unprepack_planes(plane_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``prepack_planes``, bit for bit."""
    layout = tiles_cuda if tiles_cuda.is_packed(plane_tiles) else tiles
    return layout.unpack(plane_tiles, scale_tiles, out_features)


def stored_planes(plane_tiles: Tensor) -> int:
    """Planes of a weight from ``prepack_planes``."""
    if tiles_cuda.is_packed(plane_tiles):
        return tiles_cuda.stored_planes(plane_tiles)
    return plane_tiles.shape[0]


def on_cpu_order(plane_tiles: Tensor, scale_tiles: Tensor, out_features: int) -> PlaneTiles:
    """A weight from ``prepack_planes`` in the tiles of the CPU."""
    if not tiles_cuda.is_packed(plane_tiles):
        return PlaneTiles(plane_tiles, scale_tiles)
    return PlaneTiles(*tiles.pack(*tiles_cuda.unpack(plane_tiles, scale_tiles, out_features)))


def planes_fit_device(plane_tiles: Tensor) -> bool:
    """The same of a weight of bit-planes."""
    return tiles_cuda.is_packed(plane_tiles) == serves(plane_tiles)
