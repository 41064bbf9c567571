"""Do rows of an int8 cache hold what they say, to the bit, and come back as they were?"""

import pytest
import torch

from hf_mlspec.formats import CACHE_FORMATS, cache_format, stored_format
from hf_mlspec.formats.cache import INT8, dequantize, quantize

EXPONENTS = (-100, -99, -64, -20, -1, 0, 1, 9, 60, 126, 127)


def test_codes_of_a_row_by_hand():
    """The example of the module's docstring, a tie to even, and the sign."""
    row = quantize(torch.tensor([2.0, 1.0, -2.0, 2.5 / 127 * 2, 0.0]))
    assert row[:5].tolist() == [127, 64, -127, 2, 0]
    assert row[5:].clone().view(torch.float32).item() == torch.tensor(2.0).div(127).item()
    assert torch.equal(dequantize(row), torch.tensor([127, 64, -127, 2, 0]) * torch.tensor(2.0).div(127))


def test_the_largest_magnitude_is_rounded_to_bfloat16():
    row = quantize(torch.tensor([1.0 + 2.0**-8 + 2.0**-20, 0.25]))  # above half way to the next bfloat16
    assert row[2:].clone().view(torch.float32).item() == torch.tensor(1.0 + 2.0**-7).div(127).item()
    assert row[0].item() == 127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_values_have_the_codes_and_the_scale_they_came_from(dtype, exponent):
    """Every code at every largest magnitude: mantissas of bfloat16 are 128, codes 255."""
    largest = (1 + torch.arange(128) / 128.0) * 2.0**exponent
    codes = torch.arange(-127, 128, dtype=torch.int8).expand(128, 255)
    rows = torch.cat([codes, (largest / 127)[:, None].contiguous().view(torch.int8)], dim=1)
    assert torch.equal(quantize(dequantize(rows, dtype)), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rows_come_back(dtype):
    x = torch.randn(4, 3, 50, 72, generator=torch.Generator().manual_seed(0)) * 10
    rows = quantize(x.to(dtype))
    assert rows.shape == (4, 3, 50, 76)
    assert torch.equal(quantize(dequantize(rows, dtype)), rows)
    off = (dequantize(rows) - x.to(dtype).float()).abs()
    half_a_code = x.abs().amax(-1, keepdim=True) * (1 + 2.0**-8) / 254
    assert (off <= half_a_code * 1.01).all()
    assert off.max() > 0


def test_rows_that_hold_nothing_and_rows_that_hold_too_much():
    zeros = quantize(torch.tensor([[0.0, -0.0], [2.0**-101, 0.0], [1e-45, -1e-45]]))
    assert not zeros.any()
    assert not dequantize(zeros).any()
    assert quantize(torch.tensor([2.0**-100])).any()
    bad = quantize(torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [1.0, -torch.inf], [3.4e38, 1.0]]))
    assert not bad[:, :2].any()
    assert dequantize(bad).isnan().all()


@pytest.mark.parametrize(("call", "error", "said"), [
    (lambda: quantize(torch.zeros(3, dtype=torch.int32)), TypeError, "not torch.int32"),
    (lambda: quantize(torch.tensor(1.0)), ValueError, r"shape \[\]"),
    (lambda: quantize(torch.zeros(3, 0)), ValueError, r"shape \[3, 0\]"),
    (lambda: dequantize(torch.zeros(3, 8)), TypeError, "torch.int8, not torch.float32"),
    (lambda: dequantize(torch.zeros(3, 4, dtype=torch.int8)), ValueError, r"shape \[3, 4\]"),
    (lambda: cache_format("int5", "kv_cache"), ValueError, "kv_cache is 'int5', choose 'int8', or None"),
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
    assert stored_format(torch.bfloat16) is None
    assert len({record.dtype for record in CACHE_FORMATS.values()}) == len(CACHE_FORMATS)
    for word, record in CACHE_FORMATS.items():
        assert record.word == word
        for dim in (1, 40, 64, 128):
            assert record.head_dim(record.width(dim)) == dim
            assert quantize(torch.ones(dim)).shape == (record.width(dim),)
