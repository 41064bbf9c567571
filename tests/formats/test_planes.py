"""Is every prefix of planes the weight that its formula says, and every scale a good one?"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mlspec.formats.planes import codes as bitplanes

EVERY = (*range(1, 9), "int3", "int2", "ternary")


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(weight: torch.Tensor, planes: int | str, group: int) -> float:
    values = bitplanes.dequantize(*bitplanes.quantize(weight, planes, group), dtype=torch.float64)
    return float((values - weight.double()).norm() / weight.double().norm())


def test_what_words_and_numbers_of_planes_mean():
    assert [bitplanes.cast_of(b) for b in range(1, 9)] == [(1, 1), (2, 3), (3, 7), (4, 16), (5, 32), (6, 64), (7, 128),
                                                           (8, 256)]  # fmt: skip
    assert [bitplanes.cast_of(word) for word in ("int3", "int2", "ternary")] == [(3, 7), (2, 3), (2, 2)]


@pytest.mark.parametrize("planes", EVERY)
def test_every_prefix_of_every_code_is_the_formula(planes):
    total, zero_doubled = bitplanes.cast_of(planes)
    codes = torch.arange(2**total, dtype=torch.uint8).repeat(-(-64 // 2**total) * 1)[: max(64, 2**total)].view(1, -1)
    packed = bitplanes.pack_planes(codes, total)
    scale = torch.tensor([[0.1, 3.0, 2.0**-24, 65504.0]]).half()[:, : 1 if codes.shape[1] < 128 else 2]
    for used in range(1, total + 1):
        values = bitplanes.dequantize(packed, scale, zero_doubled, used)
        width = 2 ** (total - used)
        for place, code in enumerate(codes[0].tolist()):
            bracket = Fraction(code >> (total - used)) * width + Fraction(width - 1, 2) - Fraction(zero_doubled, 2)
            exact = bracket * Fraction(scale[0, place * scale.shape[1] // codes.shape[1]].item())
            assert Fraction(values[0, place].item()) == exact
        levels = bitplanes.prefix_levels(total, zero_doubled, used)
        assert torch.equal(levels.bfloat16().float(), levels)  # what the kernels multiply with


@pytest.mark.parametrize("total", range(1, 9))
def test_a_prefix_is_the_middle_of_the_codes_that_begin_with_it(total):
    whole = bitplanes.prefix_levels(total, bitplanes.cast_of(total).zero_doubled, total)
    for used in range(1, total + 1):
        middles = whole.view(2**used, -1).mean(1)
        assert torch.equal(bitplanes.prefix_levels(total, bitplanes.cast_of(total).zero_doubled, used), middles)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 12), st.integers(0, 10**6))
def test_planes_round_trip(total, out, octets, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**total, (out, octets * 8), dtype=torch.uint8, generator=generator)
    planes = bitplanes.pack_planes(codes, total)
    assert planes.shape == (total, out, octets)
    assert torch.equal(bitplanes.unpack_planes(planes), codes)
    for used in range(1, total + 1):
        assert torch.equal(bitplanes.unpack_planes(planes[:used]), codes >> (total - used))
    plane, row, column = (int(torch.randint(n, (1,), generator=generator)) for n in (total, out, octets * 8))
    bit = planes[plane, row, column // 8] >> column % 8 & 1
    assert bit == codes[row, column] >> (total - 1 - plane) & 1


@pytest.mark.parametrize("total", range(1, 9))
def test_levels_are_bfloat16_where_the_zero_is_one_of_those_allowed(total):
    least, most = bitplanes.zeros_doubled(total)
    for zero_doubled in range(2 * 2**total):
        levels = [bitplanes.prefix_levels(total, zero_doubled, used) for used in range(1, total + 1)]
        exact = all(torch.equal(level.bfloat16().float(), level) for level in levels)
        assert exact or not least <= zero_doubled <= most
        assert total < 8 or exact == (least <= zero_doubled <= most)


def test_worked_example():
    weight = torch.zeros(1, 32)
    weight[0, :2] = torch.tensor([37.0, -127.0])
    parts = bitplanes.quantize(weight, 8, 32)
    assert parts.scale.item() == 1
    assert bitplanes.unpack_planes(parts.planes)[0, :3].tolist() == [165, 1, 128]
    assert bitplanes.dequantize(*parts, num_planes=4)[0, 0].item() == 39.5
    high, low = bitplanes.split_nibbles(parts.planes)
    assert (high[0, 0] & 15, low[0, 0] & 15) == (10, 5)


def test_nibbles_join_again():
    parts = bitplanes.quantize(seeded(40, 256), 8, 64)
    high, low = bitplanes.split_nibbles(parts.planes)
    assert high.shape == low.shape == (40, 128)
    assert torch.equal(bitplanes.join_nibbles(high, low), parts.planes)
    with pytest.raises(ValueError, match="split_nibbles: 6 planes, two nibbles are 8"):
        bitplanes.split_nibbles(parts.planes[:6])


@pytest.mark.parametrize("planes", [4, 5, 6, 7, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_symmetric_codes_round_to_the_nearest_step(planes, group):
    weight = seeded(20, 256, seed=1) * 0.03
    weight[3, :128] = 0
    parts = bitplanes.quantize(weight, planes, group)
    assert parts.scale.shape == (20, 256 // group)
    codes = bitplanes.unpack_planes(parts.planes).int() - 2 ** (planes - 1)
    assert codes.abs().max() == 2 ** (planes - 1) - 1
    step = parts.scale.double().repeat_interleave(group, 1)
    values = bitplanes.dequantize(*parts, dtype=torch.float64)
    assert ((values - weight.double()).abs() <= step * 0.5 * (1 + 2.0**-9 * 2**planes)).all()  # float16 rounds scales
    assert values[3, :128].eq(0).all()


@pytest.mark.parametrize(
    ("planes", "below"),
    [(8, 0.009), (6, 0.035), (4, 0.13), ("int3", 0.19), ("int2", 0.345), ("ternary", 0.44), (1, 0.61)],
)
def test_errors_on_gaussian_weights(planes, below):
    error = relative_error(seeded(64, 512) * 0.02, planes, 64)
    assert below * 0.6 < error < below


@pytest.mark.parametrize("planes", [1, "int2", "int3"])
def test_a_searched_scale_is_no_worse_than_the_largest_magnitudes(planes):
    weight = seeded(32, 256, seed=5) ** 3  # heavy tails
    total, zero_doubled = bitplanes.cast_of(planes)
    scale = weight.view(32, 4, 64).abs().amax(-1, keepdim=True) / (zero_doubled / 2)
    steps = (weight.view(32, 4, 64) / scale + zero_doubled / 2).round().clamp(0, 2**total - 1) - zero_doubled / 2
    plain = float((steps * scale - weight.view(32, 4, 64)).norm() / weight.norm())
    assert relative_error(weight, planes, 64) < 0.9 * plain


def test_ternary_is_the_best_of_all_thresholds():
    weight = seeded(6, 64, seed=2) ** 3
    values = bitplanes.dequantize(*bitplanes.quantize(weight, "ternary", 32), dtype=torch.float64)
    for group, found in zip(weight.double().view(-1, 32), values.view(-1, 32), strict=True):
        largest = group.abs().sort(descending=True).values
        errors = []
        for count in range(1, 33):
            kept = group.abs() >= largest[count - 1]
            mean = group.abs()[kept].mean()
            errors.append(float((group - torch.where(kept, group.sign() * mean, 0.0)).square().sum()))
        assert float((group - found).square().sum()) <= min(errors) * (1 + 1e-5)


@pytest.mark.parametrize("planes", EVERY)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-7, 1.0, 9000.0])
def test_zeros_and_extreme_magnitudes(planes, magnitude):
    weight = seeded(4, 64) * magnitude
    weight[1] = 0
    parts = bitplanes.quantize(weight, planes, 64)
    values = bitplanes.dequantize(*parts)
    assert values.isfinite().all()
    assert (parts.scale > 0).all()
    assert values[1].abs().max() <= 2.0**-24  # mid-rise codes have no zero
    assert (values - weight).abs().max() <= max(weight.abs().max(), 2.0**-21)


@pytest.mark.parametrize("planes", EVERY)
def test_chunks_dtypes_and_no_rows(planes, monkeypatch):
    weight = seeded(50, 128, seed=9).bfloat16()
    whole = bitplanes.quantize(weight, planes, 32)
    wide = bitplanes.quantize(weight.float(), planes, 32)
    monkeypatch.setattr(bitplanes, "_CHUNK", 7 * 128)
    cut = bitplanes.quantize(weight, planes, 32)
    for other in (wide, cut):
        assert torch.equal(other.planes, whole.planes)
        assert torch.equal(other.scale, whole.scale)
    values = bitplanes.dequantize(*cut)
    assert torch.equal(bitplanes.dequantize(*cut, dtype=torch.bfloat16), values.bfloat16())
    none = bitplanes.quantize(weight[:0], planes, 32)
    assert bitplanes.dequantize(*none).shape == (0, 128)


@pytest.mark.parametrize(
    ("weight", "planes", "group", "error", "message"),
    [
        (torch.zeros(2, 64), 9, 64, ValueError, "9 planes, choose 1 to 8 or one of int3, int2, ternary"),
        (torch.zeros(2, 64), True, 64, ValueError, "True planes"),
        (torch.zeros(2, 64), "int5", 64, ValueError, "'int5' planes"),
        (torch.zeros(2, 64), 8, 48, ValueError, "hold 32, 64 or 128 elements, not 48"),
        (torch.zeros(2, 96), 8, 64, ValueError, "is 96, no multiple of the group of 64: use group_size=32"),
        (torch.zeros(2, 40), 8, 32, ValueError, "40, no multiple of the group of 32: keep this layer in 16 bits"),
        (torch.zeros(64), 8, 64, ValueError, r"a matrix \[out, in\], not a tensor of shape \[64\]"),
        (torch.zeros(2, 64).double(), 8, 64, TypeError, r"not torch\.float64"),
        (torch.full((2, 64), 1e7), "ternary", 64, ValueError, "row 0, group 0 reaches 1e[+]07 and needs a scale"),
    ],
)
def test_what_cannot_be_quantized_is_named(weight, planes, group, error, message):
    with pytest.raises(error, match=message):
        bitplanes.quantize(weight, planes, group)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("planes", [8, "int3", "ternary"])
def test_nan_and_inf_are_located(planes, bad, monkeypatch):
    monkeypatch.setattr(bitplanes, "_CHUNK", 640)
    weight = seeded(30, 64)
    weight[17, 40] = bad
    with pytest.raises(ValueError, match="row 17, group 1 holds NaN or Inf"):
        bitplanes.quantize(weight, planes, 32)


def test_more_planes_than_stored_are_refused():
    parts = bitplanes.quantize(torch.ones(2, 32), 4, 32)
    for asked in (0, 5):
        with pytest.raises(ValueError, match=f"{asked} planes asked for, the weight has 4: choose 1 to 4"):
            bitplanes.dequantize(*parts, num_planes=asked)
    with pytest.raises(ValueError, match="holds 12 codes, 8 of a plane share a byte"):
        bitplanes.pack_planes(torch.zeros(1, 12, dtype=torch.uint8), 2)
