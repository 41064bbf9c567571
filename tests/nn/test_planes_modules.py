"""Does a linear of bit-planes multiply by the planes it is asked for, and keep them all?"""

import copy
import io

import pytest
import torch
from torch import nn

from hf_mlspec import ops
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.replace import resident_bytes
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
KINDS = [(8, 32), (8, 64), (6, 32), (4, 64), (1, 32), ("int3", 64), ("int2", 64), ("ternary", 64)]


def same_state(one: nn.Module, saved: dict) -> bool:
    own = one.state_dict()
    return own.keys() == saved.keys() and all(torch.equal(own[n], saved[n]) for n in saved if n != "bias")


@pytest.mark.parametrize(("planes", "group"), KINDS)
def test_every_prefix_is_the_product_with_what_it_means(linear, x, planes, group):
    layer = PlanesLinear.from_linear(linear, num_planes=planes, group_size=group)
    assert layer.bias is linear.bias
    seen = []
    for count in range(layer.num_planes, 0, -1):
        with layer.switch.at(f"planes{count}"):
            y = layer(x.view(5, 1, 64))
        expected = nn.functional.linear(x.float(), layer.dequantized(num_planes=count), linear.bias.float())
        assert (y.dtype, y.shape) == (torch.bfloat16, (5, 1, 43))
        assert torch.allclose(y.view(5, 43).float(), expected, rtol=2**-7, atol=1e-3)
        planes_and_scales = layer.weight_tiles, layer.scale_tiles
        how = {"group_size": group, "zero_doubled": layer.zero_doubled, "num_planes": count}
        assert torch.equal(y.view(5, 43), ops.bitplane_linear(x, *planes_and_scales, 43, linear.bias, **how))
        seen.append(y)
    assert torch.equal(layer(x), seen[0].view(5, 43))
    assert not any(torch.equal(one, seen[0]) for one in seen[1:])


@pytest.mark.parametrize("prepacked", [False, True])
@pytest.mark.parametrize("planes", [8, "ternary"])
def test_copies_moves_casts_and_checkpoints(linear, x, planes, prepacked):
    layer = PlanesLinear.from_linear(linear, num_planes=planes, group_size=64)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    before, y = resident_bytes(layer), layer(x)
    assert same_state(layer, saved)
    if not prepacked:
        assert resident_bytes(layer.unprepack_()) == before
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert twin.is_prepacked is prepacked
        assert torch.equal(twin(x), y)
    for change in (nn.Module.half, nn.Module.double, nn.Module.float, lambda m: m.to(torch.bfloat16)):
        assert same_state(change(layer), saved)
        assert layer.weight_scale.dtype == torch.float16
    assert torch.equal(layer(x), y)
    other = PlanesLinear.empty(nn.Linear(64, 43).to(torch.bfloat16), num_planes=planes, group_size=64)
    assert other.dequantized().eq(0).all()
    other(x)
    other.load_state_dict(saved)  # zero_doubled is read anew
    assert torch.equal(other(x), y)
    view = copy.deepcopy(layer.unprepack_(), {id(p): p for p in layer.parameters()})
    layer(x)
    assert view.is_prepacked
    assert torch.equal(view(x), y)


def test_a_materialized_weight_stands_for_all_planes(linear, x):
    layer = PlanesLinear.from_linear(linear, group_size=32)
    with layer.switch.at("planes3"):
        three = layer(x.float())
    layer.materialize(torch.float32)
    expected = nn.functional.linear(x.float(), layer.dequantized(), linear.bias.float())
    assert torch.allclose(layer(x.float()), expected, rtol=1e-5, atol=1e-6)
    with layer.switch.at("planes3"):
        assert torch.equal(layer(x.float()), three)


def test_empty_has_the_shape_and_device_of_the_linear():
    layer = PlanesLinear.empty(nn.Linear(128, 8, device="meta"), num_planes="int3")
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "weight_planes": (3, 8, 16), "weight_scale": (8, 2), "weight_zero_doubled": (1,), "bias": (8,)
    }  # fmt: skip
    assert layer.weight_planes.is_meta
    assert layer.switch.num_planes == 3
    assert "num_planes=3, weight_bits=3" in repr(layer)


def test_what_does_not_fit_is_refused(linear):
    layer = PlanesLinear.from_linear(linear, num_planes=6, group_size=32)
    assert layer.switch.bit_choices == tuple(Bits(count, 16) for count in (6, 5, 4, 3, 2, 1))
    with pytest.raises(ValueError, match="precision planes7: this model's weights are planes, choose one of planes6"):
        layer.switch.at("planes7")
    with pytest.raises(ValueError, match="bits are 4 of weights and 8 of activations: planes weights are called at"):
        layer.switch.at(Bits(4, 8))
    with pytest.raises(ValueError, match="weight: the weight has 6 bit-planes, its switch is for 8: make it Prec"):
        PlanesLinear(layer.packed_weight(), switch=PrecisionSwitch("planes"))
    with pytest.raises(ValueError, match="num_planes is 9, choose 1 to 8"):
        PrecisionSwitch("planes", num_planes=9)
    with pytest.raises(ValueError, match=r"o_proj: in_features is 64, .* group of 128: use group_size=64"):
        PlanesLinear.from_linear(linear, "o_proj", group_size=128)
    with pytest.raises(ValueError, match=r"o_proj: in_features is 64, .* group of 128: use group_size=64"):
        PlanesLinear.empty(linear, "o_proj")
