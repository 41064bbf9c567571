"""Does every int4 code mean its number, and does the search find the scale it promises?"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mlspec.formats import Int4Weight, int4
from hf_mlspec.formats.packing import pack_nibbles, unpack_nibbles


def group_of(*values, size=32) -> torch.Tensor:
    group = torch.zeros(1, size)
    group[0, : len(values)] = torch.tensor(values)
    return group


def randn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_docstrings_example_byte_for_byte():
    packed, scales, zeros = int4.quantize(group_of(-8.0, 7.0, 6.2, 5.1), 32)
    assert bytes(packed[0].tolist()).hex() == "f0de" + "88" * 14
    assert (scales.tolist(), zeros) == ([[1.0]], None)
    assert int4.dequantize(packed, scales)[0, :4].tolist() == [-8.0, 7.0, 6.0, 5.0]


def test_an_asymmetric_group_byte_for_byte():
    packed, scales, zeros = int4.quantize(group_of(-1.0, 6.5, 0.5, 2.2), 32, symmetric=False)
    assert (scales.tolist(), zeros.tolist()) == ([[0.5]], [[2]])
    assert bytes(packed[0].tolist()).hex() == "f063" + "22" * 14
    assert int4.dequantize(packed, scales, zeros)[0, :5].tolist() == [-1.0, 6.5, 0.5, 2.0, 0.0]


@pytest.mark.parametrize("zero", [None, *range(16)])
def test_every_code_means_its_number_under_every_zero_point(zero):
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(1, 2))
    scales = torch.tensor([[0.375]], dtype=torch.float16)
    zeros = None if zero is None else torch.tensor([[zero]], dtype=torch.uint8)
    values = int4.dequantize(packed, scales, zeros)[0, :16]
    assert values.tolist() == [(code - (8 if zero is None else zero)) * 0.375 for code in range(16)]


def test_ties_go_to_even_codes():
    integers = torch.arange(-8.0, 8.0).repeat(2)  # two of each hold the scale at 1
    rows = integers.repeat(15, 1)
    rows[:, 9] = torch.arange(-7.5, 7.0)
    packed, scales, _ = int4.quantize(rows, 32)
    assert scales.eq(1).all()
    codes = unpack_nibbles(packed)[:, 9].to(torch.int8) - 8
    assert codes.tolist() == [-8, -6, -6, -4, -4, -2, -2, 0, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", int4.GROUP_SIZES)
def test_no_proposal_of_the_docstring_beats_the_search(group_size, symmetric):
    weight = randn(16, 256, seed=group_size)
    quantized = int4.quantize(weight, group_size, symmetric)
    groups = weight.view(16, -1, group_size)
    error = (int4.dequantize(*quantized) - weight).view_as(groups).square().sum(-1)
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    chosen = []
    for divisor in (7, 7.5, 8, 8.5, 9) if symmetric else (15, 16, 17):
        span = torch.maximum(high, -low) if symmetric else high.clamp(min=0) - low.clamp(max=0)
        scale = (span / divisor).half().float()
        zero = (-low.clamp(max=0) / scale - (divisor - 15) / 2).round().clamp(0, 15)
        zero = torch.full_like(zero, 8.0) if symmetric else zero
        values = (((groups / scale).round() + zero).clamp(0, 15) - zero) * scale
        assert (error <= (values - groups).square().sum(-1) * (1 + 1e-5)).all(), divisor
        chosen.append((quantized[1] == scale.squeeze(-1)).sum().item())
    assert sum(chosen) == quantized[1].numel()  # no scale but a proposed one
    assert sum(count > 0 for count in chosen) >= 2


def test_the_search_removes_the_share_of_the_error_that_the_docstring_claims():
    weight = randn(256, 1024) * 0.02
    for group_size, symmetric, ratio in ((128, True, 0.75), (32, True, 0.81), (128, False, 0.91)):
        groups = weight.view(256, -1, group_size)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = (torch.maximum(high, -low) / 7 if symmetric else (high - low) / 15).half().float()
        zero = 8 if symmetric else (-low / scale).round().clamp(0, 15)
        plain = ((((groups / scale).round() + zero).clamp(0, 15) - zero) * scale - groups).square().sum()
        ours = (int4.dequantize(*int4.quantize(weight, group_size, symmetric)) - weight).square().sum()
        assert float(ours / plain) == pytest.approx(ratio, abs=0.02)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(-14, 11), st.sampled_from(int4.GROUP_SIZES), st.booleans(), st.booleans())
def test_canonical_codes_round_trip(seed, exponent, group_size, symmetric, narrow):
    """Codes whose ends are used make the first or the exact divisor propose their own scale, at no error."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (3, group_size), dtype=torch.uint8, generator=generator)
    codes[:, 0], codes[:, 1], codes[:, 2] = 0, 15, 9
    scales = torch.full((3, 1), 1.75 * 2.0**exponent, dtype=torch.float16)
    zeros = None if symmetric else torch.randint(0, 16, (3, 1), dtype=torch.uint8, generator=generator)
    packed = pack_nibbles(codes)
    dense = int4.dequantize(packed, scales, zeros, torch.bfloat16 if narrow else torch.float32)
    again = int4.quantize(dense, group_size, symmetric)
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], scales)
    assert zeros is None if again[2] is None else torch.equal(again[2], zeros)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**18), 2.0**18, width=32), min_size=32, max_size=32), st.booleans())
def test_error_bound(values, symmetric):
    """The search never does worse than the divisor that clips nothing: half a step an element."""
    group = torch.tensor([values])
    error = (int4.dequantize(*int4.quantize(group, 32, symmetric)) - group).double().square().sum().sqrt()
    span = float(group.abs().max()) if symmetric else float(group.max().clamp(min=0) - group.min().clamp(max=0))
    step = span / (7 if symmetric else 15)
    # Beside half a step: float16 rounds the scale (15 steps times 2^-11), an asymmetric zero point half a step more.
    per_element = step * (0.5 + 0.008 + (0 if symmetric else 0.5)) + 2.0**-24 * 8
    assert float(error) <= 32**0.5 * per_element


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_of_both_signs(symmetric):
    weight = torch.zeros(2, 64)
    weight[0, 3] = -0.0
    packed, scales, zeros = int4.quantize(weight, 32, symmetric)
    assert scales.eq(1).all()
    assert packed.eq(0x88 if symmetric else 0).all()
    assert zeros is None if symmetric else zeros.eq(0).all()
    assert int4.dequantize(packed, scales, zeros).eq(0).all()


def test_one_sided_groups_use_all_sixteen_codes():
    ramp = torch.linspace(0.0, 15.0, 32).unsqueeze(0)
    packed, scales, zeros = int4.quantize(torch.cat((ramp, -ramp)), 32, symmetric=False)
    assert zeros.tolist() == [[0], [15]]
    assert [unpack_nibbles(row.unsqueeze(0)).unique().numel() for row in packed] == [16, 16]
    assert (int4.dequantize(packed, scales, zeros) - torch.cat((ramp, -ramp))).abs().max() <= 0.55


@pytest.mark.parametrize("symmetric", [True, False])
def test_tiny_weights_keep_the_smallest_scale(symmetric):
    smallest = 2.0**-24
    packed, scales, zeros = int4.quantize(group_of(3 * smallest, -smallest, smallest * 0.4), 32, symmetric)
    assert scales.item() == smallest
    values = int4.dequantize(packed, scales, zeros)[0, :4].tolist()
    assert values == [3 * smallest, -smallest, 0.0, 0.0]
    packed, scales, zeros = int4.quantize(torch.full((1, 32), 1e-40), 32, symmetric)
    assert int4.dequantize(packed, scales, zeros).eq(0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_largest_scale_and_the_first_beyond_it(symmetric):
    largest = 65504.0 * (7 if symmetric else 15)
    packed, scales, zeros = int4.quantize(torch.full((1, 32), largest), 32, symmetric)
    assert scales.item() == 65504.0
    assert int4.dequantize(packed, scales, zeros).eq(largest).all()
    weight = torch.ones(300, 4096)
    weight[290, 65] = -largest * 1.001
    with pytest.raises(ValueError, match=r"row 290, group 2 ranges from -\d+ to 1 and needs .* 655\d\d.*65504"):
        int4.quantize(weight, 32, symmetric)
    with pytest.raises(ValueError, match=r"row 0, group 0 .*float16 ends at 65504"):
        int4.quantize(torch.tensor([[3e38, -3e38] * 16]), 32, symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_with_their_row(bad, symmetric):
    weight = torch.zeros(600, 1024)
    weight[577, 129] = bad
    with pytest.raises(ValueError, match=r"row 577, group 1 holds NaN or Inf"):
        int4.quantize(weight, 128, symmetric)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_exactly_and_outputs_round_once(dtype):
    weight = randn(8, 128).to(dtype)
    narrow, wide = int4.quantize(weight, 64, False), int4.quantize(weight.float(), 64, False)
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))
    assert torch.equal(int4.dequantize(*wide, dtype), int4.dequantize(*wide).to(dtype))


@pytest.mark.parametrize("group_size", int4.GROUP_SIZES)
def test_shapes_strides_and_chunks(group_size):
    weight = randn(384, 2048)  # more rows than one chunk
    packed, scales, zeros = int4.quantize(weight, group_size, symmetric=False)
    assert packed.shape == (384, 1024)
    assert scales.shape == zeros.shape == (384, 2048 // group_size)
    strided = weight.t().contiguous().t()
    assert torch.equal(int4.quantize(strided, group_size, symmetric=False)[0], packed)
    rows = int4.quantize(weight[300:301], group_size, symmetric=False)
    assert torch.equal(rows[0], packed[300:301])
    assert int4.quantize(torch.empty(0, 128), group_size)[0].shape == (0, 64)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"32, 64, 128 elements, not 48"):
        int4.quantize(torch.zeros(2, 96), 48)
    with pytest.raises(ValueError, match=r"in_features is 96.*group of 128: use group_size=32"):
        int4.quantize(torch.zeros(2, 96))
    with pytest.raises(ValueError, match=r"in_features is 100.*keep this layer"):
        int4.quantize(torch.zeros(2, 100), 32)
    with pytest.raises(ValueError, match=r"matrix \[out, in\].*\[2, 2, 32\]"):
        int4.quantize(torch.zeros(2, 2, 32), 32)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        int4.quantize(torch.zeros(2, 32, dtype=torch.float64), 32)
    packed, scales, zeros = int4.quantize(randn(2, 64), 32, symmetric=False)
    with pytest.raises(TypeError, match=r"scales torch\.float32"):
        int4.dequantize(packed, scales.float())
    with pytest.raises(ValueError, match=r"\[1, 32\].*\[2, 2\]"):
        int4.dequantize(packed[:1], scales)
    with pytest.raises(ValueError, match=r"4 scales a row for 64 codes"):
        int4.dequantize(packed, scales.repeat(1, 2))
    with pytest.raises(TypeError, match=r"zeros is torch\.int8"):
        int4.dequantize(packed, scales, zeros.to(torch.int8))
    with pytest.raises(ValueError, match=r"zeros has shape \[2, 1\]"):
        int4.dequantize(packed, scales, zeros[:, :1])


@pytest.fixture
def weight() -> Int4Weight:
    return Int4Weight.from_dense(randn(6, 128), 32, symmetric=False, name="model.q_proj")


def test_a_weight_knows_its_sizes(weight):
    assert [part.shape for part in weight.parts] == [(6, 64), (6, 4), (6, 4)]
    assert weight.validate(6, 128, 32) is weight.validate()
    assert (weight.out_features, weight.in_features, weight.group_size, weight.symmetric) == (6, 128, 32, False)
    assert torch.equal(weight.dequantize(), int4.dequantize(*weight.parts))
    assert Int4Weight.from_dense(randn(6, 128)).validate().symmetric


def test_a_weight_that_cannot_be_quantized_is_named():
    with pytest.raises(ValueError, match=r"lm_head\.weight: int4: row 1, group 0 holds NaN"):
        Int4Weight.from_dense(torch.tensor([[1.0] * 32, [float("nan")] * 32]), 32, name="lm_head.weight")


def edited(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[4, 2] = value
    return changed


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: {"weight_packed": w.weight_packed[:5]}, ValueError, r"weight_scale has shape \[6, 4\]"),
        (lambda w: {"weight_scale": w.weight_scale[:, :3]}, ValueError, r"3 scales a row for in_features 128"),
        (lambda w: {"weight_scale": w.weight_scale[:5]}, ValueError, r"weight_scale has shape \[5, 4\].*truncated"),
        (lambda w: {"weight_zero": w.weight_zero[:, :2]}, ValueError, r"weight_zero has shape \[6, 2\].*truncated"),
        (lambda w: {"weight_zero": w.weight_zero[0]}, ValueError, r"weight_zero has shape \[4\]"),
        (lambda w: {"weight_packed": w.weight_packed.flatten()}, ValueError, r"shape \[384\]"),
        (lambda w: {"weight_packed": w.weight_packed.to(torch.int8)}, TypeError, r"weight_packed is torch\.int8"),
        (lambda w: {"weight_scale": w.weight_scale.float()}, TypeError, r"weight_scale is torch\.float32"),
        (lambda w: {"weight_zero": w.weight_zero.int()}, TypeError, r"weight_zero is torch\.int32"),
        (lambda w: {"weight_scale": edited(w.weight_scale, float("nan"))}, ValueError, r"1 values.*row 4, group 2"),
        (lambda w: {"weight_scale": edited(w.weight_scale, -1.0)}, ValueError, r"\(-1\) at row 4, group 2"),
        (lambda w: {"weight_zero": edited(w.weight_zero, 16)}, ValueError, r"above 15.*\(16\) at row 4, group 2"),
    ],
)
def test_damage_is_named(weight, change, error, message):
    with pytest.raises(error, match=r"model\.q_proj: .*" + message):
        dataclasses.replace(weight, **change(weight)).validate()


@pytest.mark.parametrize("sizes", [(7, 128, 32), (6, 256, 32), (6, 128, 64)])
def test_another_layers_weight_is_refused(weight, sizes):
    with pytest.raises(ValueError, match=r"model\.q_proj: weight_(packed|scale) has shape .*expected"):
        weight.validate(*sizes)
