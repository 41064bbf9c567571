"""How are rows of an embedding read whose codes lie in planes and places? The op, and the tables it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.zipper import BLOCK, HEADER, CodeRows, Split, ZipperParts, codes_of, lowest_of, of_rows, to_rows
from .operator import Operands, operator
from .zipper import split_of

_MOST_BITS = 8


class ZipperTable(NamedTuple):
    """What ``zipper_rows`` takes behind ids: uint8 ``[rows, P, in / 8]``, float16 ``[rows, 1]``, int32 ``[0]`` or
    ``[rows + 1 + n]`` (formats/zipper/rows.py), and how many bits below the planes are 0."""

    planes: Tensor
    step: Tensor
    places: Tensor
    lowest: int


def _check(given: Operands) -> None:
    given.require_numbers("ids", None)
    given.require_dtype("planes", torch.uint8)
    given.require_contiguous("planes")
    shape = list(given.planes.shape)
    if len(shape) != 3 or 0 in shape or shape[2] % (BLOCK // 8):
        expected = "expected [rows, planes, in / 8], a row or more, in a multiple of 32"
        raise ValueError(f"{given.op}: planes has shape {shape}, {expected}")
    given.require_part("step", torch.float16, (shape[0], 1))
    given.require_numbers("places", None)
    count = len(given.places)
    if 0 < count <= shape[0]:
        raise ValueError(f"{given.op}: places has shape [{count}], expected [0] or [{shape[0] + 1} + places]")
    if given.lowest < 0 or not 2 <= shape[1] + given.lowest + (count > 0) <= _MOST_BITS:
        told = f"lowest is {given.lowest} and there are {shape[1]} planes"
        raise ValueError(f"{given.op}: {told}, codes have 2 to {_MOST_BITS} bits")
    given.require_scale()


def _fake(given: Operands) -> Tensor:
    width = given.planes.shape[2] * 8
    return given.planes.new_empty((len(given.ids), width), dtype=torch.bfloat16)


@operator(_check, _fake)
def _zipper_rows(ids: Tensor, planes: Tensor, step: Tensor, places: Tensor, lowest: int, scale: float) -> Tensor:
    ids = ids.long().clamp(0, len(planes) - 1)
    rows = (codes_of(CodeRows(planes, places, lowest), ids).float() * step[ids].float()).to(torch.bfloat16)
    return rows if scale == 1 else (rows.float() * scale).to(rows.dtype)


def zipper_rows(
    ids: Tensor, planes: Tensor, step: Tensor, places: Tensor, lowest: int = 0, scale: float = 1.0
) -> Tensor:
    """Rows of a table of codes times its steps, rounded to bfloat16, times scale: ids int32 ``[n]`` -> ``[n, in]``.

    As ``embed_rows``: ids outside of the table count as the nearest one inside.
    """
    return _zipper_rows(ids, planes, step, places, lowest, scale)


def table_of(parts: ZipperParts, how: Split) -> ZipperTable:
    """The parts of an embedding in rows, as the op takes them."""
    return ZipperTable(parts.planes, parts.scale.flatten(1), parts.split[HEADER:], lowest_of(how))


def prepack_table(planes: Tensor, scale: Tensor, split: Tensor) -> ZipperParts:
    """A weight on disk -> in rows: ``split`` goes on behind its four integers with the places, and the scale gets a
    third axis, by which the layouts are told apart."""
    rows = to_rows(planes, split_of(split))
    return ZipperParts(rows.planes, scale.unsqueeze(2), torch.cat([split[:HEADER], rows.places]))


def unprepack_table(parts: ZipperParts) -> ZipperParts:
    """The inverse of ``prepack_table``, bit for bit."""
    how = split_of(parts.split)
    planes = of_rows(CodeRows(parts.planes, parts.split[HEADER:], lowest_of(how)))
    return ZipperParts(planes, parts.scale.flatten(1), parts.split[:HEADER].clone())
