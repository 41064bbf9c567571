"""What is a weight in two parts to the kernels: planes of the low part, and the op that adds the sparse high part?

    on disk    planes [K, out, in / 8], scale [out, 1], split [4]                    (formats/zipper/weight.py)
    in tiles   planes, scale of the low part, with the row's scale in every group: of 4 bits as int4 weights are
               (int4.py), in groups of the inputs that share a scale as integers; else as bit-planes are (planes/);
               split int32 [n]: the four integers, 1 where the cells are wide, a step of the high part for each row
               (the bits of float32), the starts of its cells, and at a multiple of 16 their words
               (formats/zipper/sparse.py): packed where a kernel of a GPU reads them, else in slots
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import zipper
from ..formats.packing import pack_nibbles, unpack_nibbles
from ..formats.planes import GROUP_SIZES, pack_planes, unpack_planes
from ..formats.zipper import HEADER, MODES, SparseCells, Split, Values, ZipperParts, cells_of
from .cuda_library import serves
from .int4 import int4_linear, int4_sums, prepack_int4, unprepack_int4
from .operator import REFERENCES, Operands, operator
from .planes import bitplane_integers, bitplane_linear, bitplane_sums, prepack_planes, unprepack_planes
from .products import bias_of, finish, in_slices, rounded
from .tiles import TILE_BYTES

MOST_JOINED = 3  # weights that a kernel of a GPU reads at once: queries, keys, values
_ROWS = 64  # of x, whose products are gathered together
_LINE = 16  # integers of a cache line, where words begin


class HighCells(NamedTuple):
    """``split`` of a weight in tiles, taken apart. step float32 ``[out]``."""

    step: Tensor
    cells: SparseCells


def words_begin(out_features: int, in_features: int) -> int:
    """Where in ``split`` the words of the cells begin."""
    down, across = cells_of(out_features, in_features)
    return -(-(HEADER + 2 + out_features + down * across) // _LINE) * _LINE


def _taken_apart(split: Tensor, out_features: int, in_features: int) -> HighCells:
    down, across = cells_of(out_features, in_features)
    first = HEADER + 1 + out_features
    starts, words = split[first : first + down * across + 1], split[words_begin(out_features, in_features) :]
    step = split[HEADER + 1 : first].view(torch.float32)
    return HighCells(step, SparseCells(starts, words, bool(split[HEADER])))


def put_together(header: Tensor, step: Tensor, high: Tensor, *, for_cpu: bool = False) -> Tensor:
    """``split`` as it stands in tiles (above), of int32 ``[4]``, float32 ``[out]`` and int8 ``[out, in]``; for_cpu: as
    tiles of a CPU have it, wherever it is made."""
    cells = zipper.to_packed(high) if serves(high) and not for_cpu else zipper.to_slots(high)
    begin = words_begin(*high.shape)
    split = torch.zeros(begin + len(cells.words), dtype=torch.int32, device=high.device)
    split[:HEADER], split[HEADER], first = header[:HEADER], int(cells.is_wide), HEADER + 1 + len(high)
    split[HEADER + 1 : first] = step.float().view(torch.int32)
    split[first : first + len(cells.starts)] = cells.starts
    split[begin:] = cells.words
    return split


def values_of(split: Tensor, out_features: int, in_features: int) -> Values:
    """What ``put_together`` was given that is not 0."""
    cells = _taken_apart(split, out_features, in_features).cells
    return (zipper.of_packed if serves(split) else zipper.of_slots)(cells, out_features, in_features)


def dense_high(split: Tensor, out_features: int, in_features: int) -> Tensor:
    """int8 ``[out, in]``: what ``put_together`` was given."""
    return zipper.to_dense(values_of(split, out_features, in_features), out_features, in_features)


def _check_rows(given: Operands) -> int:
    """How many outputs."""
    given.require_float("x")
    _require_inputs(given)
    given.require_dtype("low", torch.float32)
    given.require_contiguous("low")
    out = given.low.shape[-1] if given.low.ndim else 0
    given.require_shape("low", (*given.x.shape[:-1], out))
    given.require_dtype("high", torch.int32)
    given.require_contiguous("high")
    if given.bias is not None:
        given.require_float("bias")
        given.require_shape("bias", (out,))
    return out


def _require_inputs(given: Operands) -> None:
    if given.x.ndim == 0 or given.x.shape[-1] % zipper.BLOCK:
        shape = list(given.x.shape)
        raise ValueError(f"{given.op}: x has shape {shape}, a high part has multiples of {zipper.BLOCK} inputs")


def _require_high(given: Operands, out: int, length: int) -> None:
    least = words_begin(out, given.x.shape[-1])
    if given.high.ndim != 1 or length < least:
        raise ValueError(
            f"{given.op}: high has shape {list(given.high.shape)}, expected [{least} + words] from prepack_zipper"
        )


def _check(given: Operands) -> None:
    out = _check_rows(given)
    _require_high(given, out, given.high.numel())


@operator(_check, lambda given: given.x.new_empty(given.low.shape))
def _zipper_high_linear(x: Tensor, low: Tensor, high: Tensor, bias: Tensor | None) -> Tensor:
    out_features, in_features = low.shape[-1], x.shape[-1]
    values, step = values_of(high, out_features, in_features), _taken_apart(high, out_features, in_features).step
    some = zip(x.reshape(-1, in_features).split(_ROWS), low.reshape(-1, out_features).split(_ROWS), strict=True)
    parts = [_high_of_rows(rows, own, values, step, bias) for rows, own in some]
    return torch.cat(parts).reshape(low.shape) if parts else x.new_empty(low.shape)


def _high_of_rows(x: Tensor, low: Tensor, values: Values, step: Tensor, bias: Tensor | None) -> Tensor:
    """``[rows, in]`` -> ``[rows, out]``: memory for the values of a slice of outputs times these rows."""
    columns = rounded(x).T.contiguous()  # [in, rows]

    def part(rows: slice) -> Tensor:
        edges = torch.tensor([rows.start, rows.stop], device=x.device)
        first, last = torch.searchsorted(values.outputs, edges).tolist()
        outputs, inputs, own = (each[first:last] for each in values)
        lengths = torch.bincount(outputs - rows.start, minlength=rows.stop - rows.start)
        products = columns[inputs] * own.to(columns.dtype).unsqueeze(1)
        sums = torch.segment_reduce(products, "sum", lengths=lengths, axis=0, initial=0.0).T * step[rows]
        return finish(low[:, rows] + sums, bias_of(bias, rows), x.dtype)

    return in_slices(part, low.shape[-1], x.shape[-1])


def zipper_high_linear(x: Tensor, low: Tensor, high: Tensor, bias: Tensor | None = None) -> Tensor:
    """float32 ``low [..., out]``, what the low part gave, plus float x ``[..., in]`` times the sparse high part of a
    weight from ``prepack_zipper`` -> ``[..., out]`` in x.dtype.

    x is rounded to bfloat16. Values of the high part are integers, so that products are exact; an output adds them in
    float32 in an order that is its own (ZipperQuant).
    """
    return _zipper_high_linear(x, low, high, bias)


def _check_sums(given: Operands) -> None:
    given.require_dtype("x", torch.bfloat16)
    if given.x.ndim != 2:
        raise ValueError(f"{given.op}: x has shape {list(given.x.shape)}, expected [n, in]")
    _require_inputs(given)
    given.require_contiguous("x")
    given.require_dtype("sums", torch.float32)
    sums, rows = given.sums, len(given.x)
    if sums.ndim != 2 or len(sums) != rows:
        raise ValueError(f"{given.op}: sums has shape {list(sums.shape)}, expected [{rows}, out]")
    if sums.stride(1) != 1:
        shape, strides = list(sums.shape), list(sums.stride())
        raise ValueError(f"{given.op}: sums of shape {shape} has strides {strides}, the last must be 1")
    given.require_dtype("high", torch.int32)
    given.require_contiguous("high")
    _require_high(given, sums.shape[1], given.high.numel())


@operator(_check_sums, lambda given: None, writes=("sums",))
def _zipper_high_sums(x: Tensor, high: Tensor, sums: Tensor) -> None:
    sums.copy_(REFERENCES["zipper_high_linear"](x.float(), torch.zeros(sums.shape, device=x.device), high, None))


def zipper_high_sums(x: Tensor, high: Tensor, sums: Tensor) -> None:
    """Write bfloat16 x ``[n, in]`` times a high part to float32 ``sums [n, out]``, whose rows may lie apart: the bits
    of ``zipper_high_linear`` without a low part. Memory is the caller's."""
    _zipper_high_sums(x, high, sums)


def _check_joined(given: Operands) -> None:
    out, outputs, begins = _check_rows(given), given.outputs, given.begins
    if not 1 <= len(outputs) == len(begins) <= MOST_JOINED or sum(outputs) != out or min(begins) < 0:
        raise ValueError(
            f"{given.op}: outputs are {outputs} and begins {begins}, expected those of 1 to {MOST_JOINED} weights, "
            f"with {out} outputs together"
        )
    for size, begin, end in zip(outputs, begins, [*begins[1:], given.high.numel()], strict=True):
        _require_high(given, size, end - begin)


@operator(_check_joined, lambda given: given.x.new_empty(given.low.shape), composed_on_cpu=True)
def _zipper_high_joined(
    x: Tensor, low: Tensor, high: Tensor, bias: Tensor | None, outputs: list[int], begins: list[int]
) -> Tensor:
    add = _zipper_high_linear if x.device.type == "cpu" else REFERENCES["zipper_high_linear"]
    ends = [*begins[1:], len(high)]
    biases = [None] * len(outputs) if bias is None else bias.split(outputs)
    lows = low.split(outputs, -1)
    parts = [
        add(x, own.contiguous(), high[begin:end], own_bias)
        for own, own_bias, begin, end in zip(lows, biases, begins, ends, strict=True)
    ]
    return torch.cat(parts, -1)


def zipper_high_joined(
    x: Tensor, low: Tensor, high: Tensor, bias: Tensor | None = None, *, outputs: list[int], begins: list[int]
) -> Tensor:
    """``zipper_high_linear`` of up to three weights that read the same x, their ``split`` one behind the other in
    ``high``: where each begins, and its outputs."""
    return _zipper_high_joined(x, low, high, bias, outputs, begins)


def zipper_linear(
    x: Tensor, tiles: ZipperParts, out_features: int, bias: Tensor | None = None, *, how: Split,
    low_only: bool = False, activation_bits: int = 16,
) -> Tensor:  # fmt: skip
    """float x ``[..., in]`` times a weight from ``prepack_zipper``, split as ``how`` says -> ``[..., out]``; low_only:
    times its low part alone. x is rounded to bfloat16; products are exact, sums float32.

    activation_bits: 8 or 4: the low part meets x as integers, one scale a row and 64 inputs, or 32 where 64 do not
    divide (formats/activations.py), the high part x as before (ZipperQuant). ValueError for other bits.
    """
    if low_only:
        low = tiles.planes, tiles.scale, out_features, bias
        return zipper_low_linear(x, *low, how=how, activation_bits=activation_bits)
    low = zipper_low_sums(x, tiles.planes, tiles.scale, out_features, how=how, activation_bits=activation_bits)
    return zipper_high_linear(x, low, tiles.split, bias)


def zipper_low_linear(
    x: Tensor, planes: Tensor, scale: Tensor, out_features: int, bias: Tensor | None = None, *, how: Split,
    activation_bits: int = 16,
) -> Tensor:  # fmt: skip
    """The low part of ``zipper_linear`` alone, rounded once -> ``[..., out]`` in x.dtype.

    Integers meet a low part of 4 bits in the kernels of int4 weights, one of other bits in ``bitplane_integers``: on a
    GPU in plain torch.
    """
    if how.low_is_int4:
        own = {"group_size": zipper.activation_group(x.shape[-1]), "activation_bits": activation_bits}
        return int4_linear(x, planes, scale, None, out_features, bias, **own)
    if activation_bits != 16:
        return _on_integers(x, planes, scale, out_features, bias, how, activation_bits)
    return bitplane_linear(x, planes, scale, out_features, bias, **_plane_settings(x.shape[-1], how))


def zipper_low_sums(
    x: Tensor, planes: Tensor, scale: Tensor, out_features: int, *, how: Split, activation_bits: int = 16
) -> Tensor:
    """``zipper_low_linear`` without the last rounding -> float32 ``[..., out]``."""
    if how.low_is_int4:
        own = {"group_size": zipper.activation_group(x.shape[-1]), "activation_bits": activation_bits}
        return int4_sums(x, planes, scale, None, out_features, **own)
    if activation_bits != 16:
        return _on_integers(x.float(), planes, scale, out_features, None, how, activation_bits)
    return bitplane_sums(x, planes, scale, out_features, **_plane_settings(x.shape[-1], how))


def _on_integers(
    x: Tensor, planes: Tensor, scale: Tensor, out_features: int, bias: Tensor | None, how: Split, bits: int
) -> Tensor:
    in_features = x.shape[-1]
    groups = {"group_size": low_group(in_features, how), "activation_group": zipper.activation_group(in_features)}
    return bitplane_integers(x, planes, scale, out_features, bias, **groups, activation_bits=bits)


def prepack_zipper(planes: Tensor, scale: Tensor, split: Tensor) -> ZipperParts:
    """A weight on disk -> its tiles (above). ValueError for codes that do not fit its split."""
    how = split_of(split)
    low, _ = zipper.split(zipper.to_codes(planes), how)
    codes = (low.to(torch.int16) + 2 ** (how.low_planes - 1)).to(torch.uint8)
    in_features = planes.shape[2] * 8
    low_scale = (scale * how.low_unit).expand(-1, in_features // low_group(in_features, how)).contiguous()
    if how.low_is_int4:
        tiles = prepack_int4(pack_nibbles(codes), low_scale)[:2]
    else:
        tiles = prepack_planes(pack_planes(codes, how.low_planes), low_scale)
    return ZipperParts(*tiles, high_part(planes, scale, split))


def high_part(planes: Tensor, scale: Tensor, split: Tensor) -> Tensor:
    """``split`` as it stands in tiles (above), of a weight on disk."""
    how = split_of(split)
    _, high = zipper.split(zipper.to_codes(planes), how)
    return put_together(split, (scale.float() * how.high_unit).flatten(), high)


def unprepack_zipper(planes: Tensor, scale: Tensor, split: Tensor, out_features: int) -> ZipperParts:
    """The inverse of ``prepack_zipper``, bit for bit."""
    how = split_of(split)
    if how.low_is_int4:
        packed, low_scale, _ = unprepack_int4(planes, scale, None, out_features)
        codes = unpack_nibbles(packed)
    else:
        low_planes, low_scale = unprepack_planes(planes, scale, out_features)
        codes = unpack_planes(low_planes)
    low = (codes.to(torch.int16) - 2 ** (how.low_planes - 1)).to(torch.int8)
    codes = zipper.join(low, dense_high(split, *low.shape), how)
    own = (low_scale[:, :1].float() / how.low_unit).half()
    return ZipperParts(zipper.to_planes(codes, how.bits), own, split[:HEADER].clone())


def split_of(split: Tensor) -> Split:
    """What the first integers of ``split`` say, on disk or in tiles."""
    bits, low_bits, mode, _ = split[:HEADER].tolist()
    return Split(bits, low_bits, MODES[mode])


def zipper_fit_device(planes: Tensor) -> bool:
    """Whether a low part is in the tiles that ops on its device read. Those of a GPU have three axes, the last beyond
    a tile of int4 codes on a CPU; bit-planes there have four."""
    return (planes.ndim == 3 and planes.shape[2] > TILE_BYTES) == serves(planes)


def low_group(in_features: int, how: Split) -> int:
    """Inputs that share a copy of the row's scale among the tiles of the low part."""
    if how.low_is_int4:
        return zipper.activation_group(in_features)
    return next(size for size in reversed(GROUP_SIZES) if in_features % size == 0)


def _plane_settings(in_features: int, how: Split) -> dict[str, int]:
    planes = how.low_planes
    return {"group_size": low_group(in_features, how), "zero_doubled": 2**planes, "num_planes": planes}
