"""Do both parts keep the bounds of ZipperQuant's theorems 4.1 to 4.3, as the split's own definition gives them?

With a code q of K bits, s = 2^k1 and a row's step d (weight = d q, largest code 2^(K - 1) - 1):

    joining   the parts add up to q, in mode "paper" to at most one step beside it; |weight - d q| <= d / 2
    errors    y = d (low Q(x) + high x): only the low part meets the error e = Q(x) - x, so that
                   |y - d q x| <= d sum |low| |e|, and with steps t of the activations, |e| <= t / 2, at most
                   d s t in / 2 where 6-bit codes in one part could lose d 2^(K - 1) t in / 2: 2^(k2 - 1) times as much
    sparsity  a high part is not 0 only beyond s steps, that is beyond the share s / (2^(K - 1) - 1) of the row's
                   largest weight: of Gaussian rows of n weights the share erfc(m s / (31 sqrt(2))), m their largest,
                   and by Chebyshev, of any row of standard deviation c at most (c / (s d))^2
"""

from __future__ import annotations

import math

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import ZipperWeight, zipper
from hf_mlspec.formats.activations import dequantize_rows, quantize_rows
from hf_mlspec.formats.zipper import MODES, Split

SPLITS = [(bits, low) for bits in range(4, 9) for low in range(2, bits - 1)]
ROUNDED = 2.0**-11  # of a scale, to float16


def drawn(out: int, size: int, seed: int = 0, heavy: bool = False) -> torch.Tensor:
    rows = torch.randn(out, size, generator=torch.Generator().manual_seed(seed))
    return rows**3 if heavy else rows


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bits", "low_bits"), SPLITS)
def test_the_parts_join_and_weights_stay_within_half_a_step(bits, low_bits, mode, heavy):
    wide, how = drawn(16, 256, heavy=heavy), Split(bits, low_bits, mode)
    weight = ZipperWeight.from_dense(wide, bits=bits, low_bits=low_bits, mode=mode)
    low, high = zipper.split(weight.codes(), how)
    whole = low.double() * how.low_unit + high.double() * how.high_unit
    assert torch.equal(whole, weight.codes().double())
    reach = (1.5 if mode == "paper" else 0.5) + how.largest * ROUNDED
    errors = (wide.double() - whole * weight.weight_scale.double()).abs() / weight.weight_scale.double()
    assert errors.max() <= reach
    assert errors.max() > 0.4  # not an empty bound


@pytest.mark.parametrize("activation_bits", [8, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bits", "low_bits"), [(6, 4), (8, 4), (6, 3), (5, 3)])
def test_outputs_are_off_by_the_low_part_times_the_error_of_the_inputs(bits, low_bits, mode, activation_bits):
    how, x = Split(bits, low_bits, mode), drawn(8, 256, seed=1).bfloat16().float()
    x[:, 5] *= 32  # an outlier
    weight = ZipperWeight.from_dense(drawn(24, 256), bits=bits, low_bits=low_bits, mode=mode)
    tiles, step = ops.prepack_zipper(*weight.parts), weight.weight_scale.double().T
    y = ops.zipper_linear(x, tiles, 24, how=how, activation_bits=activation_bits).double()
    codes, steps = quantize_rows(x, 64, activation_bits)
    errors = (dequantize_rows(codes, steps, 64).double() - x.double()).abs()
    low = zipper.split(weight.codes(), how)[0].double().abs() * how.low_unit
    off = (y - x.double() @ weight.dequantize(torch.float64).T).abs()
    sums = 2.0**-20 * (x.double().abs() @ weight.dequantize(torch.float64).abs().T + 1)
    assert (off <= (errors @ low.T) * step + sums).all()
    half = steps.double().repeat_interleave(64, 1) / 2
    assert (errors <= half * (1 + 1e-4)).all()
    widest = half.sum(1, keepdim=True) * step  # an output of codes of size 1
    assert (off <= 2**low_bits * widest + sums).all()
    assert how.largest + 1 == 2 ** (how.high_bits - 1) * 2**low_bits  # 2^(k2 - 1) times the bound of one part
    assert off.max() > 0.002 * (2**low_bits * widest).max()


def test_one_part_that_meets_integers_is_off_by_more():
    wide, x = drawn(24, 1024), drawn(8, 1024, seed=1).bfloat16().float()
    wide[:, 7] *= 4  # an outlier of the weights where the inputs have one
    x[:, 7] *= 16
    read = dequantize_rows(*quantize_rows(x, 64, 4), 64).double()
    noise = []
    for mode in MODES:
        weight = ZipperWeight.from_dense(wide, mode=mode)
        whole = weight.dequantize(torch.float64)
        y = ops.zipper_linear(x, ops.prepack_zipper(*weight.parts), 24, how=weight.how, activation_bits=4).double()
        wanted = x.double() @ whole.T
        noise.append(float((y - wanted).square().sum() / (read @ whole.T - wanted).square().sum()))
    assert max(noise) < 0.95, noise


@pytest.mark.parametrize("size", [256, 1024, 4096, 16384])
def test_gaussian_rows_have_the_zeros_that_their_largest_weight_predicts(size):
    wide = drawn(64, size)
    weight = ZipperWeight.from_dense(wide)
    outside = [math.erfc(16 * (float(row.abs().max()) / float(row.std())) / 31 / math.sqrt(2)) for row in wide]
    assert weight.high_zeros() == pytest.approx(1 - sum(outside) / 64, abs=0.012)  # codes round: 15.5 steps and beyond


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize(("bits", "low_bits"), SPLITS)
def test_no_row_has_more_high_parts_than_its_deviation_allows(bits, low_bits, heavy):
    wide = drawn(32, 512, seed=3, heavy=heavy)
    weight = ZipperWeight.from_dense(wide, bits=bits, low_bits=low_bits)
    _, high = zipper.split(weight.codes(), weight.how)
    share = (high != 0).double().mean(1)
    edge = (2**low_bits - 0.5) * weight.weight_scale.double()[:, 0]  # the least of a code beyond the low part
    bound = wide.double().square().mean(1) / edge.square()
    assert (share <= bound).all()
    unsigned = (weight.codes().to(torch.int16) >> low_bits) != 0
    assert (unsigned | (weight.codes() >= 0)).all()  # two's complement as it is: every negative code has a high part
    assert (share <= unsigned.double().mean(1)).all()
