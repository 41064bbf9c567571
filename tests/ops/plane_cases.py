"""What must the product with bit-planes be, for every count of planes stored and read? For any instruction set."""

from __future__ import annotations

import hashlib

import torch
from cases import seeded
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats import activations
from hf_mlspec.formats import planes as bitplanes
from hf_mlspec.ops.operator import REFERENCES

SHAPES = ((50, 128), (16, 256), (19, 1152))  # out, in: tiles that are not full; groups of every size
ROWS = (1, 2, 3, 5, 9, 12, 13, 16, 17, 31, 32, 33, 40)  # the last of a tile, of a part, and one more


def random_planes(stored: int, out: int, size: int, group: int) -> tuple[Tensor, Tensor]:
    """Every code, under scales from subnormal to large ones."""
    draw = torch.Generator().manual_seed(stored * 1000 + out)
    planes = torch.randint(0, 256, (stored, out, size // 8), dtype=torch.uint8, generator=draw)
    exponents = torch.randint(-24, 6, (out, size // group), generator=draw)
    return planes, torch.ldexp(torch.rand(out, size // group, generator=draw) + 1, exponents).half()


def zeros_of(stored: int) -> tuple[int, ...]:
    least, most = bitplanes.zeros_doubled(stored)
    return least, (least + most) // 2, most


def check_product(stored: int, read: int, out: int, size: int, group: int) -> None:
    """Within float32 sums of the exact value, by kernel and reference; nothing beyond the planes read is looked at."""
    planes, scale = random_planes(stored, out, size, group)
    tiles, scale_tiles = ops.prepack_planes(planes, scale)
    others = tiles.clone()
    others[read:] ^= 0xFF
    x = seeded(11, size, seed=read)
    for zero in zeros_of(stored):
        dense = bitplanes.dequantize(planes, scale, zero, read, torch.float64)
        seen = x.bfloat16().double()
        exact, magnitude = seen @ dense.T, seen.abs() @ dense.abs().T
        numbers = {"group_size": group, "zero_doubled": zero, "num_planes": read}
        y = ops.bitplane_linear(x, tiles, scale_tiles, out, None, **numbers)
        refer = REFERENCES["bitplane_linear"](x, tiles, scale_tiles, out, None, *numbers.values())
        bound = 2.0**-24 * (size / 16 + 8) * magnitude + 2.0**-40
        for name, result in (("kernel", y), ("reference", refer)):
            assert ((result.double() - exact).abs() <= bound).all(), (name, stored, read, out, size, group, zero)
        again = ops.bitplane_linear(x, others, scale_tiles, out, None, **numbers)
        assert torch.equal(again, y), ("planes that are not read", stored, read)


def check_levels() -> None:
    """One element at a time: every code of every count of planes is the very number that the formula says."""
    for stored in range(1, 9):
        codes = torch.arange(256).view(8, 32) % 2**stored  # [out, in]: every code
        planes = torch.stack([codes >> stored - 1 - p & 1 for p in range(stored)]).to(torch.uint8)
        packed = (planes.unflatten(-1, (4, 8)) << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
        tiles = ops.prepack_planes(packed, torch.ones(8, 1, dtype=torch.float16))
        for read in range(1, stored + 1):
            lost = 2 ** (stored - read)
            for zero in zeros_of(stored):
                level = (codes >> stored - read) * lost + (lost - 1) / 2 - zero / 2
                numbers = {"group_size": 32, "zero_doubled": zero, "num_planes": read}
                y = ops.bitplane_linear(torch.eye(32), *tiles, 8, None, **numbers)
                assert torch.equal(y.T, level), (stored, read, zero)


def check_rows_stand_alone(stored: int, read: int) -> None:
    """A row's bits: alone, among others, and with other outputs."""
    out, size, group = 83, 384, 64
    planes, scale = random_planes(stored, out, size, group)
    tiles, scale_tiles = ops.prepack_planes(planes, scale)
    numbers = {"group_size": group, "zero_doubled": zeros_of(stored)[1], "num_planes": read}
    x = seeded(max(ROWS), size, seed=3)
    whole = ops.bitplane_linear(x, tiles, scale_tiles, out, None, **numbers)
    for n in ROWS:
        for rows in (slice(0, n), slice(len(x) - n, len(x))):
            y = ops.bitplane_linear(x[rows], tiles, scale_tiles, out, None, **numbers)
            assert torch.equal(y, whole[rows]), (stored, read, n)
    for first, last in ((0, 16), (16, 64), (32, 83), (80, 83)):
        part = ops.prepack_planes(planes[:, first:last].contiguous(), scale[first:last])
        y = ops.bitplane_linear(x, *part, last - first, None, **numbers)
        assert torch.equal(y, whole[:, first:last]), (stored, read, first, last)


def check_top_planes_alone(stored: int, top: int) -> None:
    """Tiles that store the first few planes of a weight are, read no further, the weight; so are some outputs."""
    out, size, group = 48, 256, 64
    planes, scale = random_planes(stored, out, size, group)
    whole, few = ops.prepack_planes(planes, scale), ops.prepack_planes(planes[:top].contiguous(), scale)
    x, numbers = seeded(5, size, seed=7), {"group_size": group, "zero_doubled": zeros_of(stored)[1]}
    for read in range(1, top + 1):
        wanted = ops.bitplane_linear(x, *whole, out, None, **numbers, num_planes=read)
        y = ops.bitplane_linear(x, *few, out, None, **numbers, num_planes=read, total_planes=stored)
        assert torch.equal(y, wanted), (stored, top, read)
        part = ops.prepack_planes(planes[:top, 16:32].contiguous(), scale[16:32])
        how = {**numbers, "num_planes": read, "total_planes": stored, "outputs_of_weight": out}
        assert torch.equal(ops.bitplane_linear(x, *part, 16, None, **how), wanted[:, 16:32]), (stored, top, read)


def check_integers() -> str:
    """Products with integers: near the exact value, and that very number where float32 holds every sum; a row's bits
    are its own. Returns a digest of all results: the same on every instruction set."""
    digest = hashlib.sha256()
    for stored in range(1, 8):
        out, size = SHAPES[stored % len(SHAPES)]
        for group, own, bits in ((128, 64, 8), (128, 32, 4), (32, 32, 8), (64, 64, 4)):
            numbers = {"group_size": group, "activation_group": own, "activation_bits": bits}
            planes, scale = random_planes(stored, out, size, group)
            tiles, x, bias = ops.prepack_planes(planes, scale), seeded(max(ROWS), size, seed=bits), seeded(out, seed=1)
            y = ops.bitplane_integers(x, *tiles, out, bias, **numbers)
            dense = bitplanes.dequantize(planes, scale, 2**stored, stored, torch.float64)
            seen = activations.dequantize_rows(*activations.quantize_rows(x, own, bits), own).double()
            exact, magnitude = seen @ dense.T + bias.double(), seen.abs() @ dense.abs().T + bias.double().abs()
            bound = 2.0**-24 * (size / own + 4) * magnitude + 2.0**-40
            refer = REFERENCES["bitplane_integers"](x, *tiles, out, bias, *numbers.values())
            for name, result in (("kernel", y), ("reference", refer)):
                assert ((result.double() - exact).abs() <= bound).all(), (name, stored, out, size, numbers)
            for n in ROWS:
                rows = ops.bitplane_integers(x[len(x) - n :], *tiles, out, bias, **numbers)
                assert torch.equal(rows, y[len(x) - n :]), (stored, numbers, n)
            digest.update(y.numpy().tobytes())
            _check_whole_numbers(planes, out, size, numbers)
    return digest.hexdigest()


def _check_whole_numbers(planes: Tensor, out: int, size: int, numbers: dict[str, int]) -> None:
    """Integers that are their own codes, and scales of 1: no sum is rounded."""
    stored, largest = len(planes), 127 if numbers["activation_bits"] == 8 else 7
    scale = torch.ones(out, size // numbers["group_size"], dtype=torch.float16)
    draw = torch.Generator().manual_seed(stored)
    x = torch.randint(-largest, largest + 1, (13, size), generator=draw).float()
    x[:, :: numbers["activation_group"]] = largest
    codes = bitplanes.unpack_planes(planes).long() - 2 ** (stored - 1)
    tiles, expected = ops.prepack_planes(planes, scale), (x.long() @ codes.T).float()
    assert torch.equal(ops.bitplane_integers(x, *tiles, out, **numbers), expected)
    assert torch.equal(REFERENCES["bitplane_integers"](x, *tiles, out, None, *numbers.values()), expected)


def check_all() -> None:
    check_levels()
    for stored in range(1, 9):
        for read in range(1, stored + 1):
            out, size = SHAPES[(stored + read) % len(SHAPES)]
            check_product(stored, read, out, size, (32, 64, 128)[stored % 3])
            check_top_planes_alone(stored, read)
    for read in range(1, 9):
        check_rows_stand_alone(8, read)
