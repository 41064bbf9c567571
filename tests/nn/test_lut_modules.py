"""Does a linear of lookup-table planes multiply by the width it is asked for, and keep its tensors?"""

import copy

import pytest
import torch
from torch import nn

from hf_mlspec.formats import LutWeight
from hf_mlspec.formats.lut import table_columns
from hf_mlspec.nn.lut import LutLinear
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def layer_of(stored: int = 4, least: int = 2) -> LutLinear:
    draw = torch.Generator().manual_seed(stored)
    planes = torch.randint(0, 256, (stored, 43, 8), dtype=torch.uint8, generator=draw)
    tables = torch.randn(43, table_columns(stored, least), generator=draw).half()
    return LutLinear(LutWeight(planes, tables, "q_proj"), nn.Parameter(torch.randn(43), requires_grad=False))


@pytest.mark.parametrize(("stored", "least"), [(4, 2), (8, 3), (3, 3)])
def test_every_width_is_the_product_with_what_it_means(x, stored, least):
    layer = layer_of(stored, least)
    for count in range(stored, least - 1, -1):
        with layer.switch.at(f"planes{count}"):
            y = layer(x.view(5, 1, 64))
        dense = layer.dequantized(torch.bfloat16, count).float()
        expected = nn.functional.linear(x.bfloat16().float(), dense, layer.bias.float())
        assert torch.allclose(y.view(5, 43).float(), expected, rtol=2**-7, atol=1e-3)
    assert layer.is_prepacked
    assert layer.switch.bit_choices == tuple(Bits(count, 16) for count in range(stored, least - 1, -1))


def test_copies_casts_and_checkpoints(x):
    layer = layer_of()
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    y = layer(x)
    assert all(torch.equal(layer.state_dict()[name], saved[name]) for name in saved)
    twin = copy.deepcopy(layer)
    assert twin.switch is not layer.switch
    assert twin.switch.least_planes == 2
    assert torch.equal(twin(x), y)
    layer.half()
    assert torch.equal(layer.state_dict()["weight_tables"], saved["weight_tables"])
    other = LutLinear.empty(nn.Linear(64, 43), num_planes=4, least_planes=2)
    assert other.dequantized().eq(0).all()
    other(x)
    other.load_state_dict(saved)
    assert torch.equal(other(x.float()), twin(x.float()))
    assert "num_planes=4, least_planes=2, weight_bits=4" in repr(layer)


def test_what_does_not_fit_is_refused():
    layer = layer_of()
    with pytest.raises(ValueError, match="precision planes1: this model's weights are lut, choose one of planes4, pl"):
        layer.switch.at("planes1")
    with pytest.raises(ValueError, match="bits are 4 of weights and 8 of activations: lut weights are called at one"):
        layer.switch.at(Bits(4, 8))
    with pytest.raises(ValueError, match="tables of 2 to 4 bits, its switch is for 1 to 4: make it PrecisionSwitch"):
        LutLinear(layer.packed_weight(), switch=PrecisionSwitch("lut", num_planes=4))
    with pytest.raises(ValueError, match="least_planes is 5, choose 1 to 4"):
        PrecisionSwitch("lut", num_planes=4, least_planes=5)
    with pytest.raises(ValueError, match=r"o_proj: in_features is 48, lookup-table planes needs a multiple of 32"):
        LutLinear.empty(nn.Linear(48, 8), "o_proj", num_planes=4, least_planes=2)
