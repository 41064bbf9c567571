"""What must the product with lookup-table planes be, for every width stored and read? For any instruction set."""

from __future__ import annotations

import torch
from cases import seeded
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats import LutWeight
from hf_mlspec.formats.lut import table_columns
from hf_mlspec.ops.operator import REFERENCES

SHAPES = ((50, 128), (83, 160), (19, 1184), (16, 32))  # out, in: tiles and steps that are not full
WIDTHS = ((1, 1), (2, 1), (3, 3), (4, 3), (4, 1), (5, 4), (6, 6), (7, 2), (8, 3))  # stored, smallest table
ROWS = (1, 2, 3, 5, 6, 7, 9, 12, 13, 16, 17, 31)


def random_lut(stored: int, least: int, out: int, size: int) -> LutWeight:
    draw = torch.Generator().manual_seed(stored * 1000 + out)
    planes = torch.randint(0, 256, (stored, out, size // 8), dtype=torch.uint8, generator=draw)
    return LutWeight(planes, torch.randn(out, table_columns(stored, least), generator=draw).half())


def check_product(weight: LutWeight, read: int) -> None:
    """Within float32 sums of the exact value, by kernel and reference; nothing beyond the planes read is looked at."""
    out, size = weight.out_features, weight.in_features
    tiles = ops.prepack_lut(*weight.parts)
    others = tiles.planes.clone()
    others[read:] ^= 0xFF
    x, bias = seeded(11, size, seed=read), seeded(out, seed=1)
    dense = weight.dequantize(torch.bfloat16, read).double()
    seen = x.bfloat16().double()
    exact, magnitude = seen @ dense.T + bias.double(), seen.abs() @ dense.abs().T + bias.double().abs()
    y = ops.lut_linear(x, *tiles, out, bias, num_planes=read)
    refer = REFERENCES["lut_linear"](x, *tiles, out, bias, read)
    bound = 2.0**-24 * (size / 8 + 12) * magnitude
    for name, result in (("kernel", y), ("reference", refer)):
        assert ((result.double() - exact).abs() <= bound).all(), (name, weight.num_planes, read, out, size)
    again = ops.lut_linear(x, others, tiles.tables, out, bias, num_planes=read)
    assert torch.equal(again, y), ("planes that are not read", weight.num_planes, read)


def check_values() -> None:
    """One element at a time: every number of every width is the very value of its table, rounded to bfloat16."""
    for stored in range(1, 9):
        weight = random_lut(stored, 1, 18, 256)
        tiles = ops.prepack_lut(*weight.parts)
        for read in range(1, stored + 1):
            y = ops.lut_linear(torch.eye(256), *tiles, 18, None, num_planes=read)
            assert torch.equal(y.T, weight.dequantize(torch.bfloat16, read).float()), (stored, read)


def check_rows_stand_alone(weight: LutWeight, read: int) -> None:
    """A row's bits: alone, among others, and with other outputs."""
    out = weight.out_features
    tiles = ops.prepack_lut(*weight.parts)
    x = seeded(max(ROWS), weight.in_features, seed=3)
    whole = ops.lut_linear(x, *tiles, out, None, num_planes=read)
    for n in ROWS:
        for rows in (slice(0, n), slice(len(x) - n, len(x))):
            assert torch.equal(ops.lut_linear(x[rows], *tiles, out, None, num_planes=read), whole[rows]), (read, n)
    for first, last in ((0, 16), (16, 80), (32, 83), (80, 83)):
        part = _rows(weight, slice(first, last))
        y = ops.lut_linear(x, *ops.prepack_lut(*part), last - first, None, num_planes=read)
        assert torch.equal(y, whole[:, first:last]), (read, first, last)


def _rows(weight: LutWeight, rows: slice) -> tuple[Tensor, Tensor]:
    return weight.weight_planes[:, rows].contiguous(), weight.weight_tables[rows]


def check_all() -> None:
    check_values()
    for number, (stored, least) in enumerate(WIDTHS):
        for read in range(least, stored + 1):
            check_product(random_lut(stored, least, *SHAPES[(number + read) % len(SHAPES)]), read)
    weight = random_lut(8, 2, 83, 416)
    for read in (2, 3, 4, 5, 8):
        check_rows_stand_alone(weight, read)
