"""Does Mxfp4Linear hold 4.25 bits a weight, in one layout at a time, and compute what its weight says?"""

import copy
import io
import threading

import pytest
import torch
from torch import nn

from hf_mlspec import ops
from hf_mlspec.formats.weights import Mxfp4Weight
from hf_mlspec.nn.linear import Mxfp4Linear
from hf_mlspec.nn.replace import resident_bytes
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.ops import reference

ON_DISK = {"weight_packed": (43, 32), "weight_scale": (43, 2), "bias": (43,)}


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 43).to(torch.bfloat16).requires_grad_(False)  # 43: the last tile is short


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def shapes(layer) -> dict:
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}


def same_weight(one: Mxfp4Linear, other: Mxfp4Linear) -> bool:
    a, b = one.packed_weight(), other.packed_weight()
    return torch.equal(a.weight_packed, b.weight_packed) and torch.equal(a.weight_scale, b.weight_scale)


def test_holds_codes_and_the_very_bias(linear):
    layer = Mxfp4Linear.from_linear(linear)
    assert layer.bias is linear.bias
    assert shapes(layer) == ON_DISK
    assert (layer.in_features, layer.out_features, layer.activation_bits) == (64, 43, 16)
    assert "in_features=64, out_features=43, bias=True, activation_bits=16" in repr(layer)


@pytest.mark.parametrize("bits", [16, 8])
def test_forward_is_the_product_with_the_dequantized_weight(linear, x, bits):
    layer = Mxfp4Linear.from_linear(linear, "even_bump", switch=PrecisionSwitch("mxfp4", bits))
    y = layer(x.view(5, 1, 64))
    expected = nn.functional.linear(x.float(), layer.dequantized(), linear.bias.float())
    assert (y.dtype, y.shape) == (torch.bfloat16, (5, 1, 43))
    assert torch.allclose(y.view(5, 43).float(), expected, rtol=2**-7, atol=1e-3 if bits == 16 else 2e-2)
    tiles = layer.weight_tiles, layer.scale_tiles
    assert torch.equal(y.view(5, 43), ops.mxfp4_linear(x, *tiles, 43, layer.bias, bits))


def test_the_first_forward_turns_the_one_copy_into_tiles(linear, x):
    layer = Mxfp4Linear.from_linear(linear)
    untouched = copy.deepcopy(layer)
    parameters, before = [id(p) for p in layer.parameters()], resident_bytes(layer)
    with pytest.raises(RuntimeError, match=r"call prepack_\(\) first"):
        _ = layer.weight_tiles
    y = layer(x)
    assert layer.is_prepacked
    assert (tuple(layer.weight_tiles.shape), tuple(layer.scale_tiles.shape)) == ((3, 2, 256), (3, 2, 16))
    assert [id(p) for p in layer.parameters()] == parameters
    assert resident_bytes(layer) == before + 5 * (32 + 2)  # the outputs 43 to 47 of the last tile
    tiles = layer.weight_tiles.data_ptr()
    assert torch.equal(layer.prepack_()(x), y)
    assert layer.weight_tiles.data_ptr() == tiles
    assert same_weight(layer, untouched)
    assert torch.equal(layer.unprepack_().weight_packed, untouched.weight_packed)
    assert resident_bytes(layer) == before


def test_checkpoints_hold_the_layout_on_disk(linear, x):
    layer = Mxfp4Linear.from_linear(linear)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    y = layer(x)
    state = layer.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert layer.is_prepacked
    other = Mxfp4Linear.from_linear(nn.Linear(64, 43).to(torch.bfloat16)).prepack_()
    other.load_state_dict(saved)
    assert torch.equal(other(x), y)
    other.load_state_dict({name: tensor.clone() for name, tensor in saved.items()}, assign=True)
    assert torch.equal(other(x), y)
    with pytest.raises(RuntimeError, match="size mismatch for weight_packed"):
        other.load_state_dict({**saved, "weight_packed": layer.weight_tiles})


@pytest.mark.parametrize("prepacked", [False, True])
def test_copies_moves_and_casts(linear, x, prepacked):
    layer = Mxfp4Linear.from_linear(linear, switch=PrecisionSwitch("mxfp4", 8))
    y = layer(x)
    if not prepacked:
        layer.unprepack_()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert twin.is_prepacked is prepacked
        assert twin.activation_bits == 8
        assert torch.equal(twin(x), y)
    for cast in (layer.half(), layer.float(), layer.to(torch.bfloat16)):
        assert cast.weight_packed.dtype == cast.weight_scale.dtype == torch.uint8
        assert cast.bias.dtype == cast(x.to(cast.bias.dtype)).dtype
    assert shapes(layer) == ON_DISK
    moved = layer.to("meta")
    assert moved.weight_packed.is_meta
    assert moved(x.to("meta")).shape == (5, 43)
    assert shapes(moved) == ON_DISK


def test_layers_that_share_a_weight_change_together(linear, x):
    layer = Mxfp4Linear.from_linear(linear)
    memo = {id(p): p for p in layer.parameters()}
    view = copy.deepcopy(layer, memo)
    y = layer(x)
    assert view.is_prepacked
    assert view.weight_tiles.data_ptr() == layer.weight_tiles.data_ptr()
    assert torch.equal(view(x), y)


def test_first_forwards_from_several_threads_and_in_inference_mode(linear, x):
    expected = Mxfp4Linear.from_linear(linear)(x)
    for _ in range(10):
        layer, results = Mxfp4Linear.from_linear(linear), []
        threads = [threading.Thread(target=lambda la=layer, r=results: r.append(la(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4
        assert all(torch.equal(y, expected) for y in results)
    with torch.inference_mode():
        made_inside = Mxfp4Linear.from_linear(linear)
        layer = Mxfp4Linear.from_linear(linear)
        assert torch.equal(made_inside(x), expected)
    assert torch.equal(made_inside(x), expected)
    with torch.inference_mode():
        layer(x)
    assert torch.equal(layer(x), expected)


def test_materialized_has_the_bits_of_the_reference_path(linear, x):
    layer = Mxfp4Linear.from_linear(linear).materialize(torch.bfloat16)
    y = layer(x)
    assert not layer.is_prepacked
    layer.prepack_()
    expected = reference.mxfp4_linear(x, layer.weight_tiles, layer.scale_tiles, 43, layer.bias, 16)
    assert torch.equal(y, expected)
    assert "weight_dense" not in layer.state_dict()
    assert "materialized=torch.bfloat16" in repr(layer)
    assert torch.equal(layer(x.half()), Mxfp4Linear.from_linear(linear)(x.half()))


def test_no_bias(linear):
    linear.bias = None
    layer = Mxfp4Linear.from_linear(linear)
    assert layer.bias is None
    assert layer(torch.zeros(1, 64, dtype=torch.bfloat16)).eq(0).all()


def test_empty_has_the_shape_and_device_of_the_linear():
    layer = Mxfp4Linear.empty(nn.Linear(96, 8, device="meta"), switch=PrecisionSwitch("mxfp4", 8))
    assert layer.weight_packed.is_meta
    assert layer.weight_packed.shape == (8, 48)
    assert layer.weight_scale.shape == (8, 3)
    assert layer.activation_bits == 8
    with pytest.raises(ValueError, match="down_proj: in_features is 40"):
        Mxfp4Linear.empty(nn.Linear(40, 8, device="meta"), "down_proj")


def test_what_does_not_fit_is_refused(linear):
    weight = Mxfp4Weight.from_dense(linear.weight, name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj: bias has shape \[7\], the weight 43 rows"):
        Mxfp4Linear(weight, nn.Parameter(torch.zeros(7)))
    with pytest.raises(ValueError, match="activation_bits is 4: choose 16"):
        PrecisionSwitch("mxfp4", 4)
    linear.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"up_proj\.weight: 1 of its 86 blocks"):
        Mxfp4Linear.from_linear(linear, name="up_proj.weight")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles(linear, x):
    layer = Mxfp4Linear.from_linear(linear, switch=PrecisionSwitch("mxfp4", 8))
    expected = copy.deepcopy(layer)(x)
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
