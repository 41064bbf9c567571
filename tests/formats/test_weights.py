"""Is a damaged packed weight refused, with the tensor and the numbers named?"""

from dataclasses import replace

import pytest
import torch

from hf_mlspec.formats import FORMATS, Int4Weight, Mxfp4Weight, mxfp4
from hf_mlspec.formats.damage import require_finite, require_zero_points


@pytest.fixture
def weight() -> Mxfp4Weight:
    dense = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    return Mxfp4Weight.from_dense(dense, name="model.q_proj")


def test_names_shapes_and_dtypes(weight):
    assert weight.parts._fields == ("packed", "scale")
    assert [part.shape for part in weight.parts] == [(6, 32), (6, 2)]
    assert weight.validate(6, 64) is weight
    assert (weight.out_features, weight.in_features) == (6, 64)
    assert torch.equal(weight.dequantize(), mxfp4.dequantize(weight.weight_packed, weight.weight_scale))


def test_nan_weight_is_named():
    dense = torch.zeros(2, 64)
    dense[1, 3] = torch.nan
    with pytest.raises(ValueError, match=r"lm_head\.weight: 1 of its 4 blocks"):
        Mxfp4Weight.from_dense(dense, name="lm_head.weight")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_packed": torch.zeros(5, 32, dtype=torch.uint8)}, ValueError, r"weight_scale has shape \[6, 2\]"),
        ({"weight_scale": torch.zeros(6, 1, dtype=torch.uint8)}, ValueError, r"expected \[6, 2\].*truncated"),
        ({"weight_scale": torch.zeros(6, 3, dtype=torch.uint8)}, ValueError, r"expected \[6, 2\].*another layer"),
        ({"weight_packed": torch.zeros(192, dtype=torch.uint8)}, ValueError, r"shape \[192\]"),
        ({"weight_packed": torch.zeros(6, 32, dtype=torch.int8)}, TypeError, r"weight_packed is torch\.int8"),
        ({"weight_scale": torch.zeros(6, 2)}, TypeError, r"weight_scale is torch\.float32"),
    ],
)
def test_what_does_not_fit_is_named(weight, change, error, message):
    with pytest.raises(error, match=rf"model\.q_proj: .*{message}"):
        replace(weight, **change).validate()


def test_truncated_against_the_layer(weight):
    with pytest.raises(ValueError, match=r"weight_packed has shape \[6, 32\], expected \[8, 32\]: .* truncated"):
        weight.validate(8, 64)


def test_half_a_block_is_refused():
    packed, scale = torch.zeros(2, 24, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="in_features is 48"):
        Mxfp4Weight(packed, scale).validate()


def test_nan_scale_is_located(weight):
    weight.weight_scale[4, 1] = 255
    with pytest.raises(ValueError, match="1 NaN codes \\(255\\), the first \\(255\\) at row 4, block 1"):
        weight.validate()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0, -0.5])
def test_an_int4_scale_no_quantizer_writes_is_located(value):
    dense = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight = Int4Weight.from_dense(dense, group_size=32, name="q_proj")
    weight.weight_scale[4, 1] = value
    said = rf"weight_scale holds 1 values that are NaN, Inf, zero or negative, the first \({value:g}\) at row 4, gr"
    with pytest.raises(ValueError, match=said):
        weight.validate()


def test_a_group_of_zeros_has_a_scale_that_is_no_damage():
    weight = Int4Weight.from_dense(torch.zeros(2, 64), group_size=32)
    assert torch.equal(weight.validate().dequantize(), torch.zeros(2, 64))


def test_a_zero_point_beyond_15_names_the_expert():
    zeros = torch.zeros(3, 4, 2, dtype=torch.uint8)
    zeros[2, 1, 0], zeros[2, 3, 1] = 16, 255
    with pytest.raises(ValueError, match=r"experts: down_proj_zero holds 2 zero points above 15, the first \(16\) at "
                                         r"expert 2, row 1, group 0"):
        require_zero_points("experts", "down_proj_zero", zeros)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float8_e4m3fn, torch.nan), (torch.float32, torch.inf)])
@pytest.mark.parametrize(("shape", "place"), [((4,), r"index \[2\]"), ((4, 2), "row 2, group 0")])
def test_floating_parts_of_a_format_that_says_nothing_are_finite(dtype, most, shape, place):
    check = replace(FORMATS["int4"], value_checks=None).value_check("scale", dtype)
    held = torch.zeros(shape)
    check("q_proj", "weight_scale", held.to(dtype))
    held[(2, 0)[: len(shape)]] = most
    with pytest.raises(ValueError, match=rf"q_proj: weight_scale holds 1 values .* NaN or Inf, the first .* {place}:"):
        check("q_proj", "weight_scale", held.to(dtype))


def test_values_that_no_check_is_for_are_not_looked_at():
    assert replace(FORMATS["int4"], value_checks=None).value_check("packed", torch.uint8) is None
    checked = {(word, part) for word in FORMATS for part in FORMATS[word].parts
               if FORMATS[word].value_check(part, torch.float16)}  # fmt: skip
    scaled = {(word, "scale") for word in ("mxfp4", "int4", "nested", "planes", "int4_int8")}
    outliers = {("int4_int8", "outlier"), ("int4_int8", "outlier_scale")}
    assert checked == {("int4", "zero"), ("lut", "tables"), ("zipper", "scale"), *scaled, *outliers}
    require_finite("q_proj", "weight_scale", torch.empty(2, 2, dtype=torch.float16, device="meta"))
