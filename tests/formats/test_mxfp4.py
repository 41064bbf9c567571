"""Is every MXFP4 bit the one that its rounding rule prescribes?"""

import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mlspec.formats import mxfp4
from hf_mlspec.formats.packing import pack_nibbles, unpack_nibbles

RULES = tuple(mxfp4.RULES)
# One block, checked against microxcaling (round="even") for ocp_floor.
GOLDEN_BLOCK = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5, 6, 6.5, 7, 7.5]
GOLDEN_BLOCK += [-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -7.99, 0.1, -0.1, 1e-9, -0.0]
GOLDEN = {
    "ocp_floor": (127, "00212243446566767777a8caecfe8080", "d80cd8354a382c30", "d3a3a2652c7d8e9f"),
    "even_bump": (128, "0010112222434454556698a9caec8080", "ecb54baf2223fce5", "8ba0beaa93b5d509"),
    "ceil": (128, "0011112232434455556698a9cbed8080", "f81457f815e3338f", "b59ef047ba59dcab"),
}


def codes_of(values, rule="ocp_floor", anchor=4.0):
    """Codes of a block that holds ``anchor`` (the largest value) and then ``values``."""
    block = torch.zeros(32)
    block[0] = anchor
    block[1 : 1 + len(values)] = torch.as_tensor(values)
    packed, scales = mxfp4.quantize(block, rule)
    return unpack_nibbles(packed)[1 : 1 + len(values)].tolist(), scales.item()


def congruential_block() -> torch.Tensor:
    state, values = 12345, []
    for _ in range(2048):
        state = (1103515245 * state + 12345) & 0x7FFFFFFF
        values.append(((state >> 8) % 2001 - 1000) / 1000 * 2.0 ** (((state >> 20) % 9) - 4))
    return torch.tensor(values, dtype=torch.float64).float().bfloat16().view(64, 32)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes(tensor.flatten().tolist())).hexdigest()[:16]


@pytest.mark.parametrize("rule", RULES)
def test_golden_vector(rule):
    packed, scales = mxfp4.quantize(torch.tensor(GOLDEN_BLOCK), rule)
    assert (scales.item(), bytes(packed.tolist()).hex()) == GOLDEN[rule][:2]


@pytest.mark.parametrize("rule", RULES)
def test_bulk_digest(rule):
    packed, scales = mxfp4.quantize(congruential_block(), rule)
    assert (digest(scales), digest(packed)) == GOLDEN[rule][2:]


def test_every_code_and_scale_means_its_number():
    packed = pack_nibbles(torch.arange(16, dtype=torch.uint8).repeat(2)).expand(256, 16)
    values = mxfp4.dequantize(packed, torch.arange(256, dtype=torch.uint8).unsqueeze(1), torch.float64)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for scale in range(254):  # at 254 the value 4 leaves float32
        expected = [sign * m * 2.0 ** (scale - 127) for sign in (1, -1) for m in magnitudes]
        overflow = [math.copysign(math.inf, v) if abs(v) >= 2.0**128 else v for v in expected]
        assert values[scale, :16].tolist() == overflow, scale
    assert values[255].isnan().all()
    assert torch.signbit(values[127, 8])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("ocp_floor", [0, 2, 2, 4, 4, 6, 6]), ("even_bump", [0, 2, 2, 4, 4, 6, 6]), ("ceil", [1, 2, 3, 4, 5, 6, 7])],
)
def test_ties_and_their_neighbours(rule, expected):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    anchor = 6.0  # scale 1 under every rule
    assert codes_of(ties, rule, anchor) == (expected, 127)
    assert codes_of(-ties, rule, anchor) == ([code + 8 for code in expected], 127)
    below, above = torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9.0))
    assert codes_of(below, rule, anchor) == ([0, 1, 2, 3, 4, 5, 6], 127)
    assert codes_of(above, rule, anchor) == ([1, 2, 3, 4, 5, 6, 7], 127)


@pytest.mark.parametrize("power", [-120, -3, 0, 3, 60, 126])
def test_the_exponent_just_below_a_power_of_two(power):
    """floor(log2(x)) in float32 rounds up here and would give the next scale."""
    value = torch.nextafter(torch.tensor(2.0**power), torch.tensor(0.0))
    _, scale = codes_of([], anchor=float(value))
    assert scale == max(power - 1 - 2 + 127, 0)
    _, scale = codes_of([], anchor=2.0**power)
    assert scale == power - 2 + 127


@pytest.mark.parametrize(("amax", "ocp", "bump", "ceiling"), [(7.0, 127, 128, 128), (6.0, 127, 127, 127)])
def test_the_rules_choose_different_scales(amax, ocp, bump, ceiling):
    assert [codes_of([], rule, amax)[1] for rule in RULES] == [ocp, bump, ceiling]
    just_below_bump = float(torch.nextafter(torch.tensor(7.0), torch.tensor(0.0)))
    assert [codes_of([], rule, just_below_bump)[1] for rule in RULES] == [127, 127, 128]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_spoil_their_block_only(rule, bad):
    w = torch.ones(2, 64)
    w[0, 40] = bad
    packed, scales = mxfp4.quantize(w, rule)
    assert scales[0].tolist()[1] == 255
    assert packed[0, 16:].eq(0).all()
    values = mxfp4.dequantize(packed, scales)
    assert values[0, 32:].isnan().all()
    assert torch.equal(values[1], torch.ones(64))
    assert torch.equal(values[0, :32], torch.ones(32))


@pytest.mark.parametrize("rule", RULES)
def test_zero_block_and_negative_zero(rule):
    packed, scales = mxfp4.quantize(torch.zeros(32), rule)
    assert scales.tolist() == [0]
    assert packed.eq(0).all()
    values = mxfp4.dequantize(*mxfp4.quantize(torch.full((32,), -0.0), rule))
    assert values.eq(0).all()
    assert torch.signbit(values).all()


def test_tiny_blocks_clamp_to_scale_zero():
    for exponent in (-149, -130, -127, -126):
        packed, scales = mxfp4.quantize(torch.full((32,), 2.0**exponent))
        assert scales.tolist() == [0]
        expected = {-149: 0.0, -130: 0.0, -127: 2.0**-127, -126: 2.0**-126}[exponent]
        assert mxfp4.dequantize(packed, scales).tolist() == [expected] * 32
    assert mxfp4.quantize(torch.full((32,), 2.0**-124))[1].tolist() == [1]


@pytest.mark.parametrize("rule", RULES)
def test_the_largest_float_has_a_scale(rule):
    largest = torch.full((32,), torch.finfo(torch.float32).max)
    packed, scales = mxfp4.quantize(largest, rule)
    assert scales.item() == {"ocp_floor": 252, "even_bump": 253, "ceil": 253}[rule]
    assert unpack_nibbles(packed).unique().tolist() == [7 if rule == "ocp_floor" else 6]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_exactly(rule, dtype):
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    for narrow, wide in zip(mxfp4.quantize(w, rule), mxfp4.quantize(w.float(), rule), strict=True):
        assert torch.equal(narrow, wide)


def test_shapes_strides_and_chunks():
    w = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(2))
    packed, scales = mxfp4.quantize(w)
    assert packed.shape == (3, 5, 32)
    assert scales.shape == (3, 5, 2)
    strided = w.transpose(0, 1)
    assert torch.equal(mxfp4.quantize(strided)[0], packed.transpose(0, 1))
    values = mxfp4.dequantize(packed.transpose(0, 1), scales.transpose(0, 1))
    assert torch.equal(values, mxfp4.dequantize(packed, scales).transpose(0, 1))
    tall = w.reshape(-1, 64).repeat(1000, 1)  # more rows than one chunk
    assert torch.equal(mxfp4.quantize(tall)[0], packed.view(-1, 32).repeat(1000, 1))
    assert mxfp4.quantize(torch.empty(0, 64))[0].shape == (0, 32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 250), st.sampled_from(RULES))
def test_canonical_codes_round_trip(seed, scale, rule):
    """Codes are canonical for a rule when their largest magnitude makes it choose their scale: 4.0 does for all."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (4, 32), dtype=torch.uint8, generator=generator)
    codes = torch.where(codes & 7 == 7, codes - 1, codes)
    codes[:, 5] = 6  # 4.0; for ceil 4 / 6 needs the next power of two, which is the scale itself
    packed, scales = pack_nibbles(codes), torch.full((4, 1), scale, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        again = mxfp4.quantize(mxfp4.dequantize(packed, scales, dtype), rule)
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], scales)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=32, max_size=32), st.sampled_from(RULES))
def test_error_bound(values, rule):
    """A fifth of the block's largest magnitude (5 becomes 4), a quarter where ocp_floor saturates (7.99 becomes 6)."""
    block = torch.tensor(values)
    error = (mxfp4.dequantize(*mxfp4.quantize(block, rule)) - block).abs().max()
    amax = float(block.abs().max())
    assert float(error) <= amax * (0.25 if rule == "ocp_floor" else 0.2) * (1 + 1e-6) + 2.0**-128


def test_dequantize_to_float16_rounds_once():
    packed, scales = mxfp4.quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * 1e-4)
    wide = mxfp4.dequantize(packed, scales)
    assert torch.equal(mxfp4.dequantize(packed, scales, torch.float16), wide.half())


@pytest.mark.parametrize("size", [1, 31, 48, 100])
def test_in_features_must_be_whole_blocks(size):
    with pytest.raises(ValueError, match=rf"32 elements along the last axis, which is {size}"):
        mxfp4.quantize(torch.zeros(2, size))


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"'nearest'.*ocp_floor, even_bump, ceil"):
        mxfp4.quantize(torch.zeros(32), "nearest")
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        mxfp4.quantize(torch.zeros(32, dtype=torch.float64))
    with pytest.raises(ValueError, match="no axis"):
        mxfp4.quantize(torch.tensor(1.0))
    byte = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"\[2, 16\].*\[2, 2\]"):
        mxfp4.dequantize(byte, torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"scales torch\.int32"):
        mxfp4.dequantize(byte, torch.zeros(2, 1, dtype=torch.int32))
