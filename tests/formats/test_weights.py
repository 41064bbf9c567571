"""Is a damaged packed weight refused, with the tensor and the numbers named?"""

import dataclasses

import pytest
import torch

from hf_mlspec.formats import mxfp4
from hf_mlspec.formats.weights import MXFP4_TENSORS, Mxfp4Weight


@pytest.fixture
def weight() -> Mxfp4Weight:
    dense = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    return Mxfp4Weight.from_dense(dense, name="model.q_proj")


def test_names_shapes_and_dtypes(weight):
    assert MXFP4_TENSORS == ("weight_packed", "weight_scale")
    assert [getattr(weight, name).shape for name in MXFP4_TENSORS] == [(6, 32), (6, 2)]
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
        dataclasses.replace(weight, **change).validate()


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
