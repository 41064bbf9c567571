"""Is what is saved of a weight in bit-planes whole, and is damage named?"""

import dataclasses

import pytest
import torch

from hf_mlspec.formats import PlanesWeight
from hf_mlspec.formats import planes as bitplanes


def dense() -> torch.Tensor:
    return torch.randn(6, 128, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.fixture
def weight() -> PlanesWeight:
    return PlanesWeight.from_dense(dense(), 6, 64, name="model.q_proj")


def test_names_shapes_and_dtypes(weight):
    assert PlanesWeight.PARTS._fields == ("planes", "scale", "zero_doubled")
    assert [tuple(part.shape) for part in weight.parts] == [(6, 6, 16), (6, 2), (1,)]
    assert weight.weight_zero_doubled.dtype == torch.int32
    assert weight.validate(6, 128, 64) is weight
    assert (weight.out_features, weight.in_features, weight.num_planes, weight.group_size) == (6, 128, 6, 64)
    assert weight.zero_doubled == 64
    parts = bitplanes.quantize(dense(), 6, 64)
    assert torch.equal(weight.dequantize(), bitplanes.dequantize(*parts))
    assert torch.equal(weight.dequantize(num_planes=2), bitplanes.dequantize(*parts, num_planes=2))


def test_groups_by_default():
    assert PlanesWeight.from_dense(dense()).group_size == 128
    assert PlanesWeight.from_dense(dense()).num_planes == 8
    assert [PlanesWeight.from_dense(dense(), word).group_size for word in ("int3", "int2", "ternary")] == [64] * 3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight_planes": torch.zeros(6, 5, 16, dtype=torch.uint8)}, ValueError, r"weight_scale .*expected \[5, 2\]"),
        ({"weight_planes": torch.zeros(6, 96, dtype=torch.uint8)}, ValueError, r"weight_planes has shape \[6, 96\]"),
        ({"weight_planes": torch.zeros(9, 6, 16, dtype=torch.uint8)}, ValueError, "expected .1 to 8 planes"),
        ({"weight_planes": torch.zeros(6, 6, 16)}, TypeError, r"weight_planes is torch\.float32"),
        ({"weight_scale": torch.ones(6, 2)}, TypeError, r"weight_scale is torch\.float32, bit-planes saves it"),
        ({"weight_scale": torch.ones(6, 3).half()}, ValueError, "3 scales a row for in_features 128"),
        ({"weight_zero_doubled": torch.tensor(64, dtype=torch.int32)}, ValueError, r"shape \[\], expected \[1\]"),
        ({"weight_zero_doubled": torch.tensor([64])}, TypeError, r"weight_zero_doubled is torch\.int64"),
        ({"weight_zero_doubled": torch.tensor([127]).int()}, ValueError, r"127, of 6 planes it is 0\.\.126"),
        ({"weight_zero_doubled": torch.tensor([-1]).int()}, ValueError, r"is -1, of 6 planes"),
    ],
)
def test_damage_is_named(weight, change, error, message):
    with pytest.raises(error, match=rf"model\.q_proj: .*{message}"):
        dataclasses.replace(weight, **change).validate()


def test_of_another_layer(weight):
    with pytest.raises(ValueError, match=r"weight_planes has shape \[6, 6, 16\], expected \[6, 8, 16\]: .* truncated"):
        weight.validate(8, 128)
    with pytest.raises(ValueError, match=r"weight_scale has shape \[6, 2\], expected \[6, 4\]"):
        weight.validate(6, 128, 32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -0.5])
def test_a_scale_no_quantizer_writes_is_located(weight, value):
    weight.weight_scale[4, 1] = value
    with pytest.raises(ValueError, match=rf"NaN, Inf, zero or negative, the first \({value:g}\) at row 4, group 1"):
        weight.validate()


def test_what_cannot_be_quantized_is_named():
    with pytest.raises(ValueError, match="lm_head: in_features is 48"):
        PlanesWeight.from_dense(torch.zeros(2, 48), 8, 32, "lm_head")
    with pytest.raises(TypeError, match=r"lm_head: .*not torch\.float64"):
        PlanesWeight.from_dense(dense().double(), name="lm_head")


def test_shapes_alone_are_checked_without_storage(weight):
    meta = {f"weight_{name}": part.to("meta") for name, part in weight.parts._asdict().items()}
    assert PlanesWeight(**meta).validate(6, 128, 64).group_size == 64
