"""Does Mxfp4Linear hold 4.25 bits a weight, and compute what its weight says?"""

import pytest
import torch
from torch import nn

from hf_mlspec import ops
from hf_mlspec.formats.weights import Mxfp4Weight
from hf_mlspec.nn.linear import Mxfp4Linear
from hf_mlspec.ops import reference


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 48).to(torch.bfloat16).requires_grad_(False)


def test_holds_codes_and_the_very_bias(linear):
    layer = Mxfp4Linear.from_linear(linear)
    assert layer.bias is linear.bias
    assert {name: tuple(t.shape) for name, t in layer.state_dict().items()} == {
        "weight_packed": (48, 32),
        "weight_scale": (48, 2),
        "bias": (48,),
    }
    assert (layer.in_features, layer.out_features) == (64, 48)
    assert "in_features=64, out_features=48, bias=True" in repr(layer)


def test_forward_is_the_product_with_the_dequantized_weight(linear):
    layer = Mxfp4Linear.from_linear(linear, "even_bump")
    x = torch.randn(2, 3, 64).bfloat16()
    expected = nn.functional.linear(x.float(), layer.dequantized(), linear.bias.float())
    assert layer(x).dtype == torch.bfloat16
    assert torch.allclose(layer(x).float(), expected, rtol=2**-7, atol=1e-3)
    assert torch.equal(layer(x), ops.mxfp4_linear(x, layer.weight_packed, layer.weight_scale, layer.bias))


def test_dtype_casts_leave_the_codes_alone(linear):
    layer = Mxfp4Linear.from_linear(linear)
    codes = layer.weight_packed.clone()
    for cast in (layer.half(), layer.float(), layer.to(torch.bfloat16)):
        assert cast.weight_packed.dtype == cast.weight_scale.dtype == torch.uint8
        assert torch.equal(cast.weight_packed, codes)
    assert layer.to("meta").weight_packed.is_meta


def test_materialized_has_the_bits_of_the_reference_path(linear):
    layer = Mxfp4Linear.from_linear(linear).materialize(torch.bfloat16)
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(layer(x), reference.mxfp4_linear(x, layer.weight_packed, layer.weight_scale, layer.bias))
    assert "weight_dense" not in layer.state_dict()
    assert "materialized=torch.bfloat16" in repr(layer)
    assert torch.equal(layer(x.half()), Mxfp4Linear.from_linear(linear)(x.half()))


def test_no_bias(linear):
    linear.bias = None
    layer = Mxfp4Linear.from_linear(linear)
    assert layer.bias is None
    assert layer(torch.zeros(1, 64, dtype=torch.bfloat16)).eq(0).all()


def test_empty_has_the_shape_and_device_of_the_linear():
    layer = Mxfp4Linear.empty(nn.Linear(96, 8, device="meta"))
    assert layer.weight_packed.is_meta
    assert layer.weight_packed.shape == (8, 48)
    assert layer.weight_scale.shape == (8, 3)
    with pytest.raises(ValueError, match="down_proj: in_features is 40"):
        Mxfp4Linear.empty(nn.Linear(40, 8, device="meta"), "down_proj")


def test_what_does_not_fit_is_refused(linear):
    weight = Mxfp4Weight.from_dense(linear.weight, name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj: bias has shape \[7\], the weight 48 rows"):
        Mxfp4Linear(weight, nn.Parameter(torch.zeros(7)))
    linear.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"up_proj\.weight: 1 of its 96 blocks"):
        Mxfp4Linear.from_linear(linear, name="up_proj.weight")
