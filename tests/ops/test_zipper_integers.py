"""Does the low part of a zipper weight meet integers, and the high part the inputs as they are?"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import zipper_cases
from cases import seeded

from hf_mlspec import ops
from hf_mlspec.formats import activations, zipper
from hf_mlspec.formats.zipper import ACTIVATION_GROUP, MODES


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", MODES)
def test_only_the_low_part_meets_integers(mode, bits):
    weight = zipper_cases.weight_of(50, 192, mode=mode)
    tiles, x, bias = ops.prepack_zipper(*weight.parts), seeded(9, 192, seed=4), seeded(50, seed=1)
    coded = activations.quantize_rows(x, ACTIVATION_GROUP, bits)
    integers = activations.dequantize_rows(*coded, ACTIVATION_GROUP).double()
    low = weight.dequantize(torch.float64, low_only=True)
    high = weight.dequantize(torch.float64) - low
    assert high.any()
    for low_only in (False, True):
        exact = integers @ low.T + bias.double() + (0 if low_only else x.bfloat16().double() @ high.T)
        magnitude = integers.abs() @ low.abs().T + x.double().abs() @ high.abs().T + bias.double().abs()
        y = ops.zipper_linear(x, tiles, 50, bias, how=weight.how, low_only=low_only, activation_bits=bits)
        assert ((y.double() - exact).abs() <= 2.0**-20 * magnitude).all(), (mode, bits, low_only)


def test_an_outlier_of_the_inputs_reaches_the_high_part_unrounded():
    """Beside an input of 1000 a step of 4 bits is 143: what is left of the others is what the high part adds."""
    weight = zipper_cases.weight_of(16, 64, mode="clamp")
    x = seeded(1, 64, seed=2).bfloat16().float()
    x[0, 5] = 1000.0
    coded = activations.quantize_rows(x, ACTIVATION_GROUP, 4)
    assert coded[0].count_nonzero() == 1
    tiles = ops.prepack_zipper(*weight.parts)
    high = weight.dequantize() - weight.dequantize(low_only=True)
    both = ops.zipper_linear(x, tiles, 16, how=weight.how, activation_bits=4)
    low = ops.zipper_linear(x, tiles, 16, how=weight.how, activation_bits=4, low_only=True)
    torch.testing.assert_close(both - low, x @ high.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("bits", "low_bits"), [(6, 2), (6, 3), (8, 4), (8, 5), (8, 6)])
@pytest.mark.parametrize("mode", MODES)
def test_low_parts_of_every_number_of_bits_meet_integers(mode, bits, low_bits):
    """With integers for inputs, whose sums float32 holds, a result is a whole number times the row's scale."""
    weight = zipper_cases.weight_of(50, 192, bits=bits, low_bits=low_bits, mode=mode)
    x = torch.randint(-127, 128, (9, 192), generator=torch.Generator().manual_seed(low_bits)).float()
    x[:, ::ACTIVATION_GROUP] = 127
    low = zipper.split(weight.codes(), weight.how)[0].long() * weight.how.low_unit
    weight = dataclasses.replace(weight, weight_scale=torch.full_like(weight.weight_scale, 0.25))
    how = {"how": weight.how, "low_only": True, "activation_bits": 8}
    y = ops.zipper_linear(x, ops.prepack_zipper(*weight.parts), 50, **how)
    assert torch.equal(y, (x.long() @ low.T).float() / 4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("mode", MODES)
def test_rows_stand_alone(mode, bits):
    weight = zipper_cases.weight_of(83, 128, mode=mode)
    tiles, x = ops.prepack_zipper(*weight.parts), seeded(17, 128, seed=3)
    whole = ops.zipper_linear(x, tiles, 83, how=weight.how, activation_bits=bits)
    for row in (0, 8, 16):
        alone = ops.zipper_linear(x[row : row + 1], tiles, 83, how=weight.how, activation_bits=bits)
        assert torch.equal(alone, whole[row : row + 1])


def test_groups_are_of_32_where_64_do_not_divide():
    weight, x = zipper_cases.weight_of(16, 96), seeded(2, 96)
    y = ops.zipper_linear(x, ops.prepack_zipper(*weight.parts), 16, how=weight.how, low_only=True, activation_bits=8)
    integers = activations.dequantize_rows(*activations.quantize_rows(x, 32, 8), 32)
    torch.testing.assert_close(y, integers @ weight.dequantize(low_only=True).T, rtol=1e-5, atol=1e-4)


def test_other_bits_of_activations_are_refused():
    weight = zipper_cases.weight_of(16, 64)
    with pytest.raises(ValueError, match=r"activation_bits is 5, choose one of \[4, 8\]"):
        ops.zipper_linear(seeded(1, 64), ops.prepack_zipper(*weight.parts), 16, how=weight.how, activation_bits=5)
