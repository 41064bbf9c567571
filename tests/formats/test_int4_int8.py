"""Are int4 weights with int8 outliers what their file says, and is damage of each part named?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import FORMATS, Int4Int8Weight, Int4Weight

OUT, IN = 20, 384


@pytest.fixture
def dense() -> torch.Tensor:
    wide = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    wide[:, -128:] *= 9
    return wide


def test_first_inputs_are_int4_and_the_last_128_int8(dense):
    dense[3, -128:] = 0
    weight = Int4Int8Weight.from_dense(dense).validate(OUT, IN)
    plain = Int4Weight.from_dense(dense[:, :-128])
    assert torch.equal(weight.weight_packed, plain.weight_packed)
    assert torch.equal(weight.weight_scale, plain.weight_scale)
    scale = (dense[:, -128:].double().abs().amax(1) / 119).half()
    scale[3] = 1
    assert torch.equal(weight.weight_outlier_scale, scale)
    codes = (dense[:, -128:].double() / scale.double()[:, None]).round()
    assert torch.equal(weight.weight_outlier.double(), codes.clamp(-119, 119))
    values = weight.weight_outlier.double() * scale.double()[:, None]
    assert torch.equal(weight.dequantize(torch.float64), torch.cat([plain.dequantize(torch.float64), values], 1))
    assert (weight.out_features, weight.in_features) == (OUT, IN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_and_back_bit_for_bit(dense, dtype):
    weight = Int4Int8Weight.from_dense(dense.to(dtype))
    weight.weight_outlier[0, :120] = torch.arange(-119, 1, dtype=torch.int8)
    weight.weight_outlier[1, :120] = torch.arange(119, -1, -1, dtype=torch.int8)
    tiles = ops.prepack_int4_int8(*weight.parts)
    assert [list(part.shape) for part in tiles] == [[2, (IN + 128) // 32, 256], [2, 4, 16]]
    back = ops.unprepack_int4_int8(*tiles, OUT)
    assert all(torch.equal(part, own) for part, own in zip(back, weight.parts, strict=True))


@pytest.mark.parametrize("size", [128, 320, 64])
def test_too_few_inputs_are_refused_by_name(size):
    with pytest.raises(ValueError, match=rf"up: in_features is {size}, int4-int8 takes multiples of 128 from 256 on"):
        Int4Int8Weight.from_dense(torch.zeros(4, size), name="up")


@pytest.mark.parametrize(("column", "value", "words"), [
    (0, torch.nan, "up: int4: row 5, group 0 holds NaN"),
    (-1, torch.inf, "up: int4-int8: row 5 holds an outlier of inf"),
    (-1, 119 * 4100.0, "row 5 holds an outlier of 487900, there are 119 steps of at most 4094:")])
def test_what_cannot_be_quantized_is_named(dense, column, value, words):
    dense[5, column] = value
    with pytest.raises(ValueError, match=words):
        Int4Int8Weight.from_dense(dense, name="up")


@pytest.mark.parametrize(("part", "change", "error", "words"), [
    ("outlier", lambda t: t.index_fill(0, torch.tensor([2]), -128), ValueError, "128 codes beyond 119"),
    ("outlier", lambda t: t.index_fill(1, torch.tensor([2]), 120), ValueError, "20 codes .* to 127: quantize"),
    ("outlier", lambda t: t[:, :64], ValueError, r"weight_outlier has shape \[20, 64\], expected \[20, 128\]"),
    ("outlier", lambda t: t.short(), TypeError, r"weight_outlier is torch\.int16"),
    ("outlier_scale", lambda t: t * 0, ValueError, "20 values that are NaN, Inf, zero or negative"),
    ("outlier_scale", lambda t: t * 0 + 5000, ValueError, "20 scales above 4094"),
    ("scale", lambda t: -t, ValueError, "weight_scale holds 40 values"),
    ("scale", lambda t: t[:, :1], ValueError, r"weight_scale has shape \[20, 1\], expected \[20, 2\]"),
    ("packed", lambda t: t[:, :96], ValueError, "in_features is 320, int4-int8 takes")])
def test_damage_is_named(dense, part, change, error, words):
    weight = Int4Int8Weight.from_dense(dense, name="up")
    with pytest.raises(error, match=rf"up: .*{words}"):
        replace(weight, **{f"weight_{part}": change(getattr(weight, f"weight_{part}"))}).validate()


@pytest.mark.parametrize("size", [256, 384, 4096])
def test_bits_of_a_weight_are_those_on_disk(size):
    record = FORMATS["int4_int8"]
    bits = sum(part.nbytes * 8 for part in record.zeros((OUT, size), torch.device("meta")))
    assert record.bits_per_weight(in_features=size) == bits / (OUT * size)
    assert record.bits_per_weight() == 4.25


def test_zeros_are_a_weight_of_zeros():
    weight = Int4Int8Weight(*FORMATS["int4_int8"].zeros((OUT, IN), torch.device("cpu"))).validate(OUT, IN)
    assert not weight.dequantize().any()
