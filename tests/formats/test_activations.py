"""Does a row of activations become the integers that its rule prescribes?"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mlspec.formats.activations import dequantize_rows, num_groups, quantize_rows

WIDTHS = (8, 4)
LARGEST = {8: 127, 4: 7}


def group_of(*values, size=32) -> torch.Tensor:
    group = torch.zeros(size)
    group[: len(values)] = torch.tensor(values)
    return group


def test_the_docstrings_example():
    codes, scales = quantize_rows(group_of(2.0, 1.0, -1.0), 32)
    assert codes[:4].tolist() == [127, 64, -64, 0]
    assert scales.tolist() == [torch.tensor(2.0).div(127).item()]


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_and_every_tie(bits):
    largest = LARGEST[bits]
    steps = torch.arange(-2 * largest, 2 * largest + 1) / 2  # every code and the ties between neighbours
    for part in steps.split(31):  # with the anchor 32 elements, scale exactly 1
        codes, scales = quantize_rows(torch.cat((torch.tensor([float(largest)]), part)), 32, bits)
        assert scales.tolist() == [1.0]
        assert codes[1:].tolist() == [round(step) for step in part.tolist()]  # Python rounds ties to even


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70),
    st.sampled_from(WIDTHS),
)
def test_codes_and_scales_follow_the_rule_element_by_element(values, bits):
    x = torch.tensor(values)
    codes, scales = quantize_rows(x, 32, bits)
    largest = torch.tensor(float(LARGEST[bits]))
    for group, part in enumerate(x.split(32)):
        amax = part.abs().max()
        factor = largest / amax
        if not factor.isfinite():  # zeros, or too small for their factor
            assert scales[group] == 0
            assert codes[group * 32 : group * 32 + 32].eq(0).all()
            continue
        assert scales[group] == amax / largest
        for index, element in enumerate(part):
            product = (element * factor).item()
            assert codes[group * 32 + index].item() == round(product)  # Python rounds ties to even


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(-100, 100), st.sampled_from(WIDTHS), st.sampled_from((32, 64, 128)))
def test_canonical_codes_round_trip(seed, exponent, bits, group_size):
    largest = LARGEST[bits]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-largest, largest + 1, (3, 4 * group_size), dtype=torch.int8, generator=generator)
    codes[:, ::group_size] = -largest
    scales = torch.full((3, 4), 2.0**exponent)
    again = quantize_rows(dequantize_rows(codes, scales, group_size), group_size, bits)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_error_is_half_a_step(bits, group_size):
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(bits))
    codes, scales = quantize_rows(x, group_size, bits)
    error = (dequantize_rows(codes, scales, group_size) - x).abs()
    half_steps = scales.repeat_interleave(group_size, -1)[:, :300] * (0.5 + 1e-5)
    assert (error <= half_steps).all()
    assert codes.abs().amax() == LARGEST[bits]


@pytest.mark.parametrize("bits", WIDTHS)
def test_zeros_the_smallest_and_the_largest(bits):
    codes, scales = quantize_rows(group_of(0.0, -0.0), 32, bits)
    assert (codes.unique().tolist(), scales.tolist()) == ([0], [0.0])
    codes, scales = quantize_rows(group_of(2.0**-149, -(2.0**-130)), 32, bits)
    assert (codes.unique().tolist(), scales.tolist()) == ([0], [0.0])
    huge = torch.finfo(torch.float32).max
    codes, scales = quantize_rows(group_of(huge, -huge, huge / 4), 32, bits)
    assert codes[:4].tolist() == [LARGEST[bits], -LARGEST[bits], round(LARGEST[bits] / 4), 0]
    assert scales.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_spoil_their_group_only(bad):
    x = torch.ones(2, 96)
    x[0, 40] = bad
    codes, scales = quantize_rows(x, 32)
    assert scales.isnan().tolist() == [[False, True, False], [False, False, False]]
    assert codes[0, 32:64].eq(0).all()
    values = dequantize_rows(codes, scales, 32)
    assert values.isnan().sum() == 32
    assert torch.equal(values[1], torch.ones(96))


@pytest.mark.parametrize("size", [1, 31, 33, 100, 129])
def test_the_last_group_may_be_short(size):
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    for group_size in (32, 64, 128):
        codes, scales = quantize_rows(x, group_size)
        assert (codes.shape, scales.shape) == ((4, size), (4, math.ceil(size / group_size)))
        assert num_groups(size, group_size) == scales.shape[1]
        first = (size - 1) // group_size * group_size
        tail = quantize_rows(x[:, first:], group_size)
        assert torch.equal(tail[0], codes[:, first:])
        assert torch.equal(tail[1], scales[:, -1:])


def test_a_row_is_quantized_for_itself():
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 1e6, 1e-6]).view(3, 1)
    codes, scales = quantize_rows(x, 64)
    alone = quantize_rows(x[1, 2], 64)
    assert torch.equal(codes[1, 2], alone[0])
    assert torch.equal(scales[1, 2], alone[1])
    strided = quantize_rows(x.transpose(0, 1), 64)
    assert torch.equal(strided[0], codes.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_exactly(dtype):
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    for narrow, wide in zip(quantize_rows(x, 32), quantize_rows(x.float(), 32), strict=True):
        assert torch.equal(narrow, wide)
    codes, scales = quantize_rows(x, 32)
    assert torch.equal(dequantize_rows(codes, scales, 32, dtype), dequantize_rows(codes, scales, 32).to(dtype))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"32, 64 or 128 elements, not 16"):
        quantize_rows(torch.zeros(32), 16)
    with pytest.raises(ValueError, match=r"8 or 4 bits, not 6"):
        quantize_rows(torch.zeros(32), 32, bits=6)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        quantize_rows(torch.zeros(32, dtype=torch.float64), 32)
    with pytest.raises(ValueError, match="scalar"):
        quantize_rows(torch.tensor(1.0), 32)
    codes, scales = quantize_rows(torch.ones(2, 64), 32)
    with pytest.raises(ValueError, match=r"\[2, 64\] and scales \[2, 2\].*groups of 64 give scales \[2, 1\]"):
        dequantize_rows(codes, scales, 64)
    with pytest.raises(TypeError, match=r"codes are torch\.int32"):
        dequantize_rows(codes.int(), scales, 32)
