"""Do checks that look at the bits of numbers say what comparisons say, for every number there is?"""

import pytest
import torch

from hf_mlspec.formats.damage import all_positive, require_positive, require_zero_points

EVERY_HALF = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)


def numbers_of(dtype):
    """All of 16 bits; of float32 those with every upper half, and of float64 the same numbers."""
    if dtype.itemsize == 2:
        return EVERY_HALF.view(dtype)
    wide = (EVERY_HALF.to(torch.int32) << 16 | 1).view(torch.float32)
    return torch.cat((wide, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan]))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_number_is_positive_or_not(dtype):
    numbers = numbers_of(dtype)
    good = numbers.isfinite() & (numbers > 0)
    kept = numbers[good]
    assert all_positive(kept)
    assert all_positive(kept[:0])
    assert not all_positive(numbers)
    wrong = numbers[~good]
    some = wrong[:: max(1, len(wrong) // 500)].tolist()
    for number in [*some, 0.0, -0.0, torch.inf, -torch.inf, torch.nan, -1.0]:
        assert not all_positive(torch.cat((kept[:3], torch.tensor([number], dtype=dtype), kept[:3]))), number


@pytest.mark.parametrize("number", [0.0, -0.0, -1.0, torch.inf, torch.nan])
def test_a_scale_that_none_may_be_is_named(number):
    scale = torch.ones(4, 6, dtype=torch.float16)
    require_positive("layer", "weight_scale", scale)
    require_positive("layer", "weight_scale", scale.t())
    scale[2, 5] = number
    with pytest.raises(ValueError, match=r"layer: weight_scale holds 1 values that are NaN, Inf, zero or negative, .*"
                       r"row 2, group 5"):  # fmt: skip
        require_positive("layer", "weight_scale", scale)


def test_zero_points():
    zero = torch.full((3, 4), 15, dtype=torch.uint8)
    require_zero_points("layer", "weight_zero", zero)
    require_zero_points("layer", "weight_zero", zero[:0])
    zero[1, 2] = 16
    with pytest.raises(ValueError, match=r"weight_zero holds 1 zero points above 15, the first \(16\) at row 1"):
        require_zero_points("layer", "weight_zero", zero)
