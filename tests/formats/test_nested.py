"""Does a nested weight give back every finite BF16 bit, and is its draft the nearest level?"""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mlspec.formats import nested
from hf_mlspec.formats.nested import codebooks, fields
from hf_mlspec.formats.packing import unpack_nibbles

LLOYD_MAX = codebooks.codebook_of("lloyd_max")
WORDS = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
FINITE = WORDS[(WORDS & 0x7F80) != 0x7F80].to(torch.int16)  # all 65,280


def weight_of(words: torch.Tensor) -> torch.Tensor:
    return words.to(torch.int16).contiguous().view(torch.bfloat16)


def assert_exact(weight: torch.Tensor) -> nested.Nested:
    parts = nested.split(weight, LLOYD_MAX)
    assert torch.equal(nested.join(*parts).view(torch.int16), weight.view(torch.int16))
    return parts


def number(word: int) -> Fraction:
    """What a BF16 word is worth, exactly."""
    exponent, mantissa = word >> 7 & 255, word & 127
    whole = Fraction(mantissa + (128 if exponent else 0), 128) * Fraction(2) ** (max(exponent, 1) - 127)
    return -whole if word & 0x8000 else whole


def expected_block(words: list[int], levels: list[int]) -> tuple[int, list[int], list[int], list[int]]:
    """S, fields, nibbles and escaped places of 32 words: the layout's sentences, weight by weight."""
    top = max(max(word >> 7 & 255 for word in words), 31)
    base, fields, nibbles, escapes = top - 31, [], [], []
    for place, word in enumerate(words):
        exponent, mantissa = word >> 7 & 255, word & 127
        if base == 0:
            field = exponent << 7 | mantissa
        elif exponent > base:
            field = (exponent - base) << 7 | mantissa
        else:
            field = 0
            escapes += [place] if word & 0x7FFF else []
        units = abs(number(word)) / Fraction(2) ** (top - 132)
        distance = [abs(units - level) for level in levels]
        nibbles.append((word >> 15 & 1) << 3 | (0 if place in escapes else distance.index(min(distance))))
        fields.append(field)
    return top, fields, nibbles, escapes


def test_there_are_65280_finite_words():
    assert len(FINITE) == 65280
    assert weight_of(FINITE).isfinite().all()


@pytest.mark.parametrize("place", [0, 7, 31])
def test_every_word_alone_among_zeros(place):
    words = torch.zeros(len(FINITE), 32, dtype=torch.int16)
    words[:, place] = FINITE
    assert assert_exact(weight_of(words)).escape_index.numel() == 0


def test_every_word_alone_among_negative_zeros():
    words = torch.full((len(FINITE), 32), -(1 << 15), dtype=torch.int16)
    words[:, 3] = FINITE
    assert assert_exact(weight_of(words)).escape_index.numel() == 0


@pytest.mark.parametrize("partners", [range(0, 64), range(64, 128), range(128, 192), range(192, 255)])
def test_every_word_beside_every_exponent(partners):
    """31 words of one exponent and a partner of another: each word meets each of the 255 exponents."""
    magnitudes = FINITE[FINITE >= 0].view(255, 128)
    signed = torch.cat([magnitudes, magnitudes | -(1 << 15)], 1)  # [exponent, 256]
    rows = torch.nn.functional.pad(signed, (0, -256 % 31)).view(-1, 31)
    for partner in partners:
        beside = torch.full((len(rows), 1), partner << 7, dtype=torch.int16)
        words = torch.cat([rows, beside], 1)
        exponent = (words & 0x7FFF) >> 7
        base = exponent.amax(1, keepdim=True).clamp(min=31) - 31
        tiny = (words & 0x7FFF != 0) & (exponent <= base) & (base > 0)
        assert torch.equal(assert_exact(weight_of(words)).escape_index, tiny.flatten().nonzero().flatten())


def test_random_words_equal_words_and_zeros():
    generator = torch.Generator().manual_seed(0)
    random = FINITE[torch.randint(len(FINITE), (2000, 96), generator=generator)]
    equal = FINITE[::7].unsqueeze(1).expand(-1, 64)
    for words in (random, equal, torch.zeros(3, 32), torch.full((3, 32), -(1 << 15))):
        parts = assert_exact(weight_of(words))
        assert parts.escape_index.tolist() == sorted(set(parts.escape_index.tolist()))
    assert len(nested.split(weight_of(random), LLOYD_MAX).escape_index) > 1000
    assert nested.split(weight_of(torch.zeros(1, 32)), LLOYD_MAX).scale.item() == 31


def test_subnormals_stay_under_flushing():
    words = torch.arange(128, dtype=torch.int16).view(4, 32)
    words[1::2] |= -(1 << 15)
    torch.set_flush_denormal(True)
    try:
        assert_exact(weight_of(words))
    finally:
        torch.set_flush_denormal(False)


BLOCKS = st.one_of(
    st.lists(st.sampled_from(FINITE.tolist()), min_size=32, max_size=32),
    st.lists(st.integers(0x3C00, 0x3F80), min_size=32, max_size=32),
    st.lists(st.integers(0, 0x1100), min_size=32, max_size=32),  # around the exponent 31
)


@settings(max_examples=150, deadline=None)
@given(BLOCKS, st.sampled_from(["lloyd_max", "mxfp4"]))
def test_fields_nibbles_and_escapes_are_those_of_the_layout(words, name):
    weight = weight_of(torch.tensor([words], dtype=torch.int16))
    parts = nested.split(weight, codebooks.codebook_of(name))
    top, fields, nibbles, escapes = expected_block([word & 0xFFFF for word in words], list(codebooks.CODEBOOKS[name]))
    assert parts.scale.item() == top
    assert nested.fields_of(parts.low, parts.high)[0].tolist() == fields
    assert unpack_nibbles(parts.packed)[0].tolist() == nibbles
    assert parts.escape_index.tolist() == escapes
    assert torch.equal(parts.escape_value.view(torch.int16), weight.view(torch.int16)[0, escapes])
    draft = nested.dequantize_draft(parts.packed, parts.scale, codebooks.codebook_of(name), torch.float64)
    levels = codebooks.CODEBOOKS[name]
    expected = [(-1.0) ** (n >> 3) * levels[n & 7] * 2.0 ** (top - 132) for n in nibbles]
    assert draft[0].tolist() == expected


def test_worked_example():
    weight = torch.zeros(1, 32, dtype=torch.bfloat16)
    weight[0, :2] = torch.tensor([0.75, -0.3125])
    parts = nested.split(weight, LLOYD_MAX)
    assert parts.scale.item() == 126
    assert nested.fields_of(parts.low, parts.high)[0, 1].item() == 3872
    assert unpack_nibbles(parts.packed)[0, 1].item() == 0b1100
    assert nested.dequantize_draft(parts.packed, parts.scale, LLOYD_MAX)[0, 1].item() == -0.34375


@pytest.mark.parametrize("codebook", ["lloyd_max", "mxfp4"])
def test_every_field_gets_the_nearest_level_the_lower_of_two(codebook):
    """All 4096 - 128 fields a shifted block can hold, beside 2^(base + 31)."""
    fields = torch.cat([torch.zeros(1), torch.arange(128, 4096)]).to(torch.int16)
    words = torch.zeros(len(fields), 32, dtype=torch.int16)
    words[:, 0], words[:, 1] = 130 << 7, torch.where(fields > 0, fields + (99 << 7), 0)
    levels = list(codebooks.CODEBOOKS[codebook])
    index = unpack_nibbles(nested.split(weight_of(words), codebooks.codebook_of(codebook)).packed)[:, 1].tolist()
    for got, word in zip(index, words[:, 1].tolist(), strict=True):
        distance = [abs(number(word) * 4 - level) for level in levels]  # in units of 2^(130 - 132)
        assert got == distance.index(min(distance))


def test_the_draft_is_exact_in_bfloat16_and_rounds_once_in_float16():
    parts = nested.split(weight_of(FINITE.view(-1, 32)), LLOYD_MAX)
    wide = nested.dequantize_draft(parts.packed, parts.scale, LLOYD_MAX)
    assert wide.isfinite().all()
    assert torch.equal(nested.dequantize_draft(parts.packed, parts.scale, LLOYD_MAX, torch.bfloat16).float(), wide)
    assert torch.equal(nested.dequantize_draft(parts.packed, parts.scale, LLOYD_MAX, torch.float16), wide.half())


def test_what_is_no_codebook_is_refused_before_anything_is_computed():
    with pytest.raises(ValueError, match="must ascend"):
        nested.split(torch.zeros(1, 32).bfloat16(), torch.zeros(8, dtype=torch.uint8))


def test_strides_chunks_and_no_rows(monkeypatch):
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[[1, 30, 44], [3, 64, 95]] = 1e-30
    whole = nested.split(weight, LLOYD_MAX)
    assert whole.escape_index.tolist() == [99, 30 * 96 + 64, 44 * 96 + 95]
    for other in (weight.T.contiguous().T, torch.cat([weight, weight], 1)[:, :96]):
        assert all(torch.equal(a, b) for a, b in zip(nested.split(other, LLOYD_MAX), whole, strict=True))
    monkeypatch.setattr(fields, "_CHUNK", 7 * 96)
    assert all(torch.equal(a, b) for a, b in zip(nested.split(weight, LLOYD_MAX), whole, strict=True))
    assert torch.equal(nested.join(*whole), weight)
    assert nested.join(*assert_exact(torch.empty(0, 64, dtype=torch.bfloat16))).shape == (0, 64)
    assert nested.join(*assert_exact(torch.empty(4, 0, dtype=torch.bfloat16))).shape == (4, 0)


@pytest.mark.parametrize(("value", "said"), [(torch.nan, "nan"), (torch.inf, "inf"), (-torch.inf, "-inf")])
def test_nan_and_inf_are_named_with_their_place(value, said, monkeypatch):
    monkeypatch.setattr(fields, "_CHUNK", 64 * 100)
    weight = torch.ones(300, 64, dtype=torch.bfloat16)
    weight[217, 41] = value
    for take in (lambda: nested.split(weight, LLOYD_MAX, "up.w"), lambda: nested.count_fields(weight, "up.w")):
        with pytest.raises(ValueError, match=rf"up\.w holds {said} at row 217, column 41: repair"):
            take()


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (torch.zeros(2, 32).half(), TypeError, r"q is torch\.float16: .*only two exponent bits would be left"),
        (torch.zeros(2, 32), TypeError, r"q is torch\.float32: .*cast it to bfloat16 first"),
        (torch.zeros(2, 32, dtype=torch.int8), TypeError, r"q is torch\.int8: only bfloat16"),
        (torch.zeros(2, 48).bfloat16(), ValueError, r"q has shape \[2, 48\]: in_features is 48, .* 32 .* BF16"),
        (torch.zeros(64).bfloat16(), ValueError, r"q has shape \[64\]: expected \[out, in\]"),
    ],
)
def test_what_cannot_be_nested_is_told_why(weight, error, message):
    for take in (lambda: nested.split(weight, LLOYD_MAX, "q"), lambda: nested.count_fields(weight, "q")):
        with pytest.raises(error, match=message):
            take()
