"""What must the product with a weight in two parts be, in every split? For any instruction set."""

from __future__ import annotations

import hashlib

import torch
from cases import seeded

from hf_mlspec import ops
from hf_mlspec.formats import ZipperWeight, zipper
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.ops.operator import REFERENCES

SHAPES = ((50, 128), (83, 160), (19, 1184), (16, 32))  # out, in
SPLITS = ((6, 4), (8, 6), (8, 2), (5, 2), (4, 2), (7, 4))
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31)


def weight_of(out: int, size: int, seed: int = 0, **options) -> ZipperWeight:
    return ZipperWeight.from_dense(seeded(out, size, seed=seed), **options)


def check_product(weight: ZipperWeight) -> None:
    """Within float32 sums of the exact value of the whole codes, by kernel and reference; and the low part alone."""
    out, size, how = weight.out_features, weight.in_features, weight.how
    tiles = ops.prepack_zipper(*weight.parts)
    x, bias = seeded(11, size, seed=4), seeded(out, seed=1)
    seen = x.bfloat16().double()
    for low_only in (False, True):
        whole = weight.dequantize(torch.float64, low_only=low_only)
        # both parts add up on their own: what cancels between them is there in each
        apart = weight.dequantize(torch.float64, low_only=True).abs() + whole.abs()
        exact, magnitude = seen @ whole.T + bias.double(), seen.abs() @ (2 * apart).T + bias.double().abs()
        y = ops.zipper_linear(x, tiles, out, bias, how=how, low_only=low_only)
        bound = 2.0**-24 * (size / 8 + 16) * magnitude
        assert ((y.double() - exact).abs() <= bound).all(), (how, low_only, out, size)
    low = seeded(11, out, seed=9)
    kernel, refer = (
        ops.zipper_high_linear(x, low, tiles.split, bias),
        REFERENCES["zipper_high_linear"](x, low, tiles.split, bias),
    )
    torch.testing.assert_close(kernel, refer, rtol=1e-5, atol=1e-3)


def check_values() -> None:
    """One element at a time: every number of the high part is the very value."""
    for mode in MODES:
        weight = weight_of(18, 256, mode=mode)
        split = ops.prepack_zipper(*weight.parts).split
        high = zipper.split(weight.codes(), weight.how)[1].float() * weight.how.high_unit
        y = ops.zipper_high_linear(torch.eye(256), torch.zeros(256, 18), split)
        assert torch.equal(y.T, high * weight.weight_scale.float()), mode


def check_rows_stand_alone(weight: ZipperWeight) -> None:
    """A row's bits: alone, among others, and in another dtype of x that holds it."""
    out, how = weight.out_features, weight.how
    tiles = ops.prepack_zipper(*weight.parts)
    x = seeded(max(ROWS), weight.in_features, seed=3).bfloat16()
    whole = ops.zipper_linear(x.float(), tiles, out, how=how)
    assert torch.equal(ops.zipper_linear(x, tiles, out, how=how), whole.bfloat16())
    for n in ROWS:
        for rows in (slice(0, n), slice(len(x) - n, len(x))):
            assert torch.equal(ops.zipper_linear(x[rows].float(), tiles, out, how=how), whole[rows]), (how, n)


def check_all() -> str:
    """Returns a digest of high parts' products: the same on every instruction set."""
    check_values()
    digest = hashlib.sha256()
    for number, (bits, low_bits) in enumerate(SPLITS):
        for mode in MODES:
            weight = weight_of(*SHAPES[number % len(SHAPES)], bits=bits, low_bits=low_bits, mode=mode)
            check_product(weight)
            split = ops.prepack_zipper(*weight.parts).split
            x, low = seeded(9, weight.in_features), seeded(9, weight.out_features, seed=2)
            digest.update(ops.zipper_high_linear(x, low, split).numpy().tobytes())
    for mode in MODES:
        check_rows_stand_alone(weight_of(83, 416, mode=mode))
    return digest.hexdigest()
