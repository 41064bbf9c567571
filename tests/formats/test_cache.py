"""Do rows of codes hold what they say, to the bit, and come back as they were?"""

import itertools

import pytest
import torch

from hf_mlspec.formats import CACHE_FORMATS, cache_format, stored_format
from hf_mlspec.formats.cache import INT4, INT8
from hf_mlspec.formats.cache.int8 import dequantize, quantize
from hf_mlspec.formats.packing import unpack_nibbles

EXPONENTS = (-100, -99, -64, -20, -1, 0, 1, 9, 60, 126, 127)
RECORDS = pytest.mark.parametrize("record", CACHE_FORMATS.values(), ids=CACHE_FORMATS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def comes_back(record, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows of x, which stay as they are when their values are quantized again."""
    rows = record.quantize(x.to(dtype))
    assert rows.dtype == record.dtype
    assert rows.shape == (*x.shape[:-1], record.width(x.shape[-1]))
    assert torch.equal(record.quantize(record.dequantize(rows, dtype)), rows)
    return rows


def test_codes_of_a_row_by_hand():
    """The example of the module's docstring, a tie to even, and the sign."""
    row = quantize(torch.tensor([2.0, 1.0, -2.0, 2.5 / 127 * 2, 0.0]))
    assert row[:5].tolist() == [127, 64, -127, 2, 0]
    assert row[5:].clone().view(torch.float32).item() == torch.tensor(2.0).div(127).item()
    assert torch.equal(dequantize(row), torch.tensor([127, 64, -127, 2, 0]) * torch.tensor(2.0).div(127))


def test_nibbles_of_a_row_by_hand():
    row = INT4.quantize(torch.tensor([-1.0, 0.0, 0.5, 2.0]))
    assert row.tolist() == [0x50, 0xF8, 0x80, 0xBF, 0x00, 0x40]  # codes 0, 5, 8, 15; -1 and 2 as bfloat16
    assert torch.equal(INT4.dequantize(row, torch.float32), torch.tensor([-1.0, 0.0, 0.6, 2.0]))
    above = INT4.quantize(torch.tensor([3.0, 1.5, 0.25, 2.999]))  # zero is an end of it
    assert above.tolist() == [0x8F, 0xF1, 0, 0, 0x40, 0x40]  # 7.5 is a tie, to even
    below = INT4.quantize(torch.tensor([-3.0, -1.5]))
    assert below.tolist() == [0x80, 0x40, 0xC0, 0, 0]


def test_the_largest_magnitude_is_rounded_to_bfloat16():
    row = quantize(torch.tensor([1.0 + 2.0**-8 + 2.0**-20, 0.25]))  # above half way to the next bfloat16
    assert row[2:].clone().view(torch.float32).item() == torch.tensor(1.0 + 2.0**-7).div(127).item()
    assert row[0].item() == 127


@DTYPES
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_values_have_the_codes_and_the_scale_they_came_from(dtype, exponent):
    """Every code at every largest magnitude: mantissas of bfloat16 are 128, codes 255."""
    largest = (1 + torch.arange(128) / 128.0) * 2.0**exponent
    codes = torch.arange(-127, 128, dtype=torch.int8).expand(128, 255)
    rows = torch.cat([codes, (largest / 127)[:, None].contiguous().view(torch.int8)], dim=1)
    assert torch.equal(quantize(dequantize(rows, dtype)), rows)


@DTYPES
@pytest.mark.parametrize("exponent", [-100, -64, -1, 0, 60, 118])
@pytest.mark.parametrize("apart", [0, 1, 4, 7, 8, 23, 24, 30, 200])
def test_values_have_the_codes_and_the_ends_they_came_from(dtype, exponent, apart):
    """Every code between ends of every mantissa, of like and of unlike size; the other end's mantissas are eight."""
    one = (1 + torch.arange(128) / 128.0) * 2.0**exponent
    other = (1 + torch.tensor([0, 1, 2, 42, 64, 85, 126, 127]) / 128.0) * 2.0 ** (exponent - apart)
    other = other.where(other >= 2.0**-100, 0.0)
    ends = torch.tensor(list(itertools.product(one.tolist(), other.tolist())))
    codes = torch.arange(16, dtype=torch.uint8).view(8, 2)
    nibbles = (codes[:, 0] | codes[:, 1] << 4).expand(len(ends), 8)
    for low, high in ((-ends[:, 0], ends[:, 1]), (-ends[:, 1], ends[:, 0])):
        tail = torch.stack([low + 0.0, high], dim=1).bfloat16().view(torch.uint8)
        rows = torch.cat([nibbles, tail], dim=1)
        values = INT4.dequantize(rows, dtype)
        assert torch.equal(values[:, 0].float(), low + 0.0)
        assert torch.equal(values[:, 15].float(), high)
        assert torch.equal(INT4.quantize(values), rows)


@RECORDS
@DTYPES
def test_random_rows_come_back(record, dtype):
    x = torch.randn(4, 3, 50, 72, generator=torch.Generator().manual_seed(0)) * 10
    rows = comes_back(record, x, dtype)
    off = (record.dequantize(rows, torch.float32) - x.to(dtype).float()).abs()
    top, bottom = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    reach = torch.maximum(top, -bottom) / 127 if record is INT8 else (top - bottom) / 15
    assert (off <= reach / 2 * (1 + 2.0**-8) * 1.01 + 2.0**-8 * reach).all()
    assert off.max() > reach.min() / 3


@RECORDS
@DTYPES
def test_rows_of_every_kind_come_back(record, dtype):
    """One-sided, constant, shifted far from zero, of few distinct values, and of every size, subnormal ones too."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(4000, 16, generator=draw)
    x = x * 2.0 ** torch.randint(-150, 130, (4000, 1), generator=draw).clamp(-149, 126)
    shift = 2.0 ** torch.randint(-20, 8, (4000, 1), generator=draw)
    mixed = x * 2.0 ** torch.randint(-30, 1, (4000, 16), generator=draw)
    kinds = (x, x.abs(), -x.abs(), x[:, :1].expand(-1, 16), torch.randn(4000, 16, generator=draw) + 100 * shift,
             x.sign() * x.abs().amax(1, keepdim=True), mixed, mixed.where(x > 0, 0.0))  # fmt: skip
    for kind in kinds:
        comes_back(record, kind.contiguous(), dtype)
    for dim in (2, 4, 6, 30):  # of few elements often one is both ends' only one
        comes_back(record, torch.randn(2000, dim, generator=draw), dtype)


@RECORDS
def test_rows_that_hold_nothing_and_rows_that_hold_too_much(record):
    zeros = record.quantize(torch.tensor([[0.0, -0.0], [2.0**-101, 0.0], [1e-45, -1e-45]]))
    assert not zeros.any()
    assert not record.dequantize(zeros, torch.float32).any()
    assert record.quantize(torch.tensor([2.0**-100, 0])).any()
    bad = record.quantize(torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [1.0, -torch.inf], [3.4e38, 1.0]]))
    assert not bad[:, :-4].any()
    assert record.dequantize(bad, torch.float32).isnan().all()
    assert len({tuple(row) for row in bad.tolist()}) == 1


def test_ends_that_lie_too_far_apart_or_close_by():
    far = INT4.quantize(torch.tensor([[2.0**119, -(2.0**119)], [2.0**119, -1.0]]))
    assert INT4.dequantize(far, torch.float32).isnan().all(1).tolist() == [True, False]
    near = INT4.quantize(torch.tensor([2.0**-101, -(2.0**-100), 2.0**-100 / -3, 0.0]))  # the end above is 0
    assert unpack_nibbles(near[:2]).tolist() == [15, 0, 10, 15]


@pytest.mark.parametrize("dim", [1, 7, 33])
def test_an_odd_number_of_elements_has_no_whole_bytes(dim):
    for call in (lambda: INT4.width(dim), lambda: INT4.quantize(torch.zeros(3, dim))):
        with pytest.raises(ValueError, match=f"two elements of a head in a byte, and heads have {dim}: choose 'int8'"):
            call()


@pytest.mark.parametrize(("call", "error", "said"), [
    *((lambda one=one: one.quantize(torch.zeros(3, dtype=torch.int32)), TypeError, "not torch.int32")
      for one in CACHE_FORMATS.values()),
    (lambda: INT4.quantize(torch.tensor(1.0)), ValueError, r"shape \[\]"),
    (lambda: quantize(torch.zeros(3, 0)), ValueError, r"shape \[3, 0\]"),
    (lambda: dequantize(torch.zeros(3, 8)), TypeError, "an int8 cache are torch.int8, not torch.float32"),
    (lambda: INT4.dequantize(torch.zeros(3, 8), torch.float32), TypeError, "an int4 cache are torch.uint8, not"),
    (lambda: dequantize(torch.zeros(3, 4, dtype=torch.int8)), ValueError, r"shape \[3, 4\]"),
    (lambda: cache_format("int5", "kv_cache"), ValueError, "kv_cache is 'int5', choose 'int8' or 'int4', or None"),
    (lambda: cache_format("", "kv_cache"), ValueError, "kv_cache is ''"),
    (lambda: cache_format(8, "draft_cache"), TypeError, "draft_cache is 8, expected a word"),
    (lambda: cache_format(True, "draft_cache"), TypeError, "draft_cache is True"),
])  # fmt: skip
def test_bad_input(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_words_and_dtypes_name_one_format_each():
    assert cache_format(None, "kv_cache") is None
    assert cache_format("int8", "kv_cache") is INT8 is stored_format(torch.int8)
    assert cache_format("int4", "kv_cache") is INT4 is stored_format(torch.uint8)
    assert stored_format(torch.bfloat16) is None
    assert len({record.dtype for record in CACHE_FORMATS.values()}) == len(CACHE_FORMATS)
    for word, record in CACHE_FORMATS.items():
        assert record.word == word
        for dim in (2, 40, 64, 128):
            assert record.head_dim(record.width(dim)) == dim
            assert record.quantize(torch.ones(dim)).shape == (record.width(dim),)
