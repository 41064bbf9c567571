"""Do packed layers hold 4-bit codes, in one layout at a time, and compute what their weights say?"""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from threaded import in_four_threads
from torch import nn

from hf_mlspec import ops
from hf_mlspec.formats import Int4Weight, Mxfp4Weight
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.replace import resident_bytes
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.ops.operator import REFERENCES


@dataclass(frozen=True)
class Kind:
    """One of the packed layers and its parameters for the linear below; `multiply` is its op."""

    layer: type[PackedLinear]
    settings: dict
    on_disk: dict
    tile_bytes: int  # of scales and zeros of a tile's 16 outputs
    multiply: Callable[..., torch.Tensor]

    def of(self, linear: nn.Linear, bits: int = 16, **settings) -> PackedLinear:
        switch = PrecisionSwitch(self.layer.format, bits)
        return self.layer.from_linear(linear, switch=switch, **{**self.settings, **settings})


def multiply_mxfp4(x, layer, bits):
    return ops.mxfp4_linear(x, layer.weight_tiles, layer.scale_tiles, 43, layer.bias, bits)


def multiply_int4(x, layer, bits):
    tiles = layer.weight_tiles, layer.scale_tiles, layer.zero_tiles
    return ops.int4_linear(x, *tiles, 43, layer.bias, group_size=32, activation_bits=bits)


_CODES = {"weight_packed": (43, 32), "weight_scale": (43, 2), "bias": (43,)}
KINDS = {
    "mxfp4": Kind(Mxfp4Linear, {}, _CODES, 2, multiply_mxfp4),
    "int4": Kind(Int4Linear, {"group_size": 32}, _CODES, 4, multiply_int4),
    "asymmetric": Kind(
        Int4Linear, {"group_size": 32, "symmetric": False}, {**_CODES, "weight_zero": (43, 2)}, 6, multiply_int4
    ),
}
WIDTHS = [(kind, bits) for kind in KINDS for bits in ((16, 8) if kind == "mxfp4" else (16, 8, 4))]


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


def shapes(layer) -> dict:
    return {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}


def same_weight(one: PackedLinear, other: PackedLinear) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a if name != "bias")


def test_holds_codes_and_the_very_bias(linear, kind):
    layer = kind.of(linear)
    assert layer.bias is linear.bias
    assert shapes(layer) == kind.on_disk
    assert (layer.in_features, layer.out_features, layer.activation_bits) == (64, 43, 16)
    assert "in_features=64, out_features=43, bias=True, activation_bits=16" in repr(layer)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_int4_knows_its_groups(linear):
    layer = Int4Linear.from_linear(linear, group_size=64, symmetric=False)
    assert (layer.group_size, layer.symmetric, layer.format) == (64, False, "int4")
    assert "group_size=64, symmetric=False" in repr(layer)
    expected = Int4Weight.from_dense(linear.weight, 64, False)
    for name in ("weight_packed", "weight_scale", "weight_zero"):
        assert torch.equal(getattr(layer, name), getattr(expected, name))
    assert Int4Linear.from_linear(linear, group_size=64).weight_zero is None


@pytest.mark.parametrize(("name", "bits"), WIDTHS)
def test_forward_is_the_product_with_the_dequantized_weight(linear, x, name, bits):
    layer = KINDS[name].of(linear, bits)
    y = layer(x.view(5, 1, 64))
    expected = nn.functional.linear(x.float(), layer.dequantized(), linear.bias.float())
    assert (y.dtype, y.shape) == (torch.bfloat16, (5, 1, 43))
    assert torch.allclose(y.view(5, 43).float(), expected, rtol=2**-7, atol={16: 1e-3, 8: 2e-2, 4: 0.3}[bits])
    assert torch.equal(y.view(5, 43), KINDS[name].multiply(x, layer, bits))


def test_the_rule_reaches_the_weight(linear):
    one, other = (Mxfp4Linear.from_linear(linear, rule=rule).weight_scale for rule in ("ocp_floor", "even_bump"))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantizing_first_multiplies_the_weight_in_bfloat16(linear, x, symmetric, dtype):
    layer = Int4Linear.from_linear(linear, group_size=32, symmetric=symmetric)
    layer.switch.multiply = "dequant"
    x = x.to(dtype)
    assert torch.equal(layer(x), ops.bf16_linear(x, layer.dequantized(torch.bfloat16), layer.bias))
    with layer.switch.at("w4a8"):  # only 16-bit calls
        eight = layer(x)
    layer.switch.multiply = "fused"
    with layer.switch.at("w4a8"):
        assert torch.equal(layer(x), eight)


def test_the_first_forward_turns_the_one_copy_into_tiles(linear, x, kind):
    layer = kind.of(linear)
    untouched = copy.deepcopy(layer)
    parameters, before = [id(p) for p in layer.parameters()], resident_bytes(layer)
    with pytest.raises(RuntimeError, match=r"call prepack_\(\) first"):
        _ = layer.weight_tiles
    y = layer(x)
    assert layer.is_prepacked
    assert (tuple(layer.weight_tiles.shape), tuple(layer.scale_tiles.shape)) == ((3, 2, 256), (3, 2, 16))
    assert [id(p) for p in layer.parameters()] == parameters
    assert resident_bytes(layer) == before + 5 * (32 + kind.tile_bytes)  # the outputs 43 to 47 of the last tile
    tiles = layer.weight_tiles.data_ptr()
    assert torch.equal(layer.prepack_()(x), y)
    assert layer.weight_tiles.data_ptr() == tiles
    assert same_weight(layer, untouched)
    assert torch.equal(layer.unprepack_().weight_packed, untouched.weight_packed)
    assert torch.equal(layer.weight_scale, untouched.weight_scale)
    assert resident_bytes(layer) == before


def test_checkpoints_hold_the_layout_on_disk(linear, x, kind):
    layer = kind.of(linear)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    y = layer(x)
    state = layer.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert layer.is_prepacked
    other = kind.of(nn.Linear(64, 43).to(torch.bfloat16)).prepack_()
    other.load_state_dict(saved)
    assert torch.equal(other(x), y)
    other.load_state_dict({name: tensor.clone() for name, tensor in saved.items()}, assign=True)
    assert torch.equal(other(x), y)
    with pytest.raises(RuntimeError, match="size mismatch for weight_packed"):
        other.load_state_dict({**saved, "weight_packed": layer.weight_tiles})


@pytest.mark.parametrize("prepacked", [False, True])
def test_copies_moves_and_casts(linear, x, kind, prepacked):
    layer = kind.of(linear, 8)
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
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items() if name != "bias"}
    for change in (nn.Module.half, nn.Module.double, nn.Module.float, lambda m: m.to(torch.bfloat16), nn.Module.cpu):
        cast = change(layer)
        assert cast is layer
        state = cast.state_dict()
        assert all(torch.equal(state[name], before[name]) for name in before)
        assert all(state[name].dtype == before[name].dtype for name in before)
    assert layer.half()(x.half()).dtype == layer.bias.dtype == torch.float16
    assert shapes(layer) == kind.on_disk
    moved = layer.to("meta", torch.bfloat16)
    assert moved.weight_packed.is_meta
    assert moved.weight_scale.is_meta
    assert moved.weight_scale.dtype == before["weight_scale"].dtype
    assert moved(x.to("meta")).shape == (5, 43)
    assert shapes(moved) == kind.on_disk
    assert moved.to_empty(device="cpu").weight_scale.dtype == before["weight_scale"].dtype


def test_a_blind_cast_is_refused(linear):
    layer = Int4Linear.from_linear(linear, group_size=32)
    with pytest.raises(TypeError, match=r"Int4Linear: its weight_scale is torch\.float16 and cannot be cast"):
        layer._apply(lambda tensor: tensor.float())


def test_layers_that_share_a_weight_change_together(linear, x, kind):
    layer = kind.of(linear)
    memo = {id(p): p for p in layer.parameters()}
    view = copy.deepcopy(layer, memo)
    y = layer(x)
    assert view.is_prepacked
    assert view.weight_tiles.data_ptr() == layer.weight_tiles.data_ptr()
    assert torch.equal(view(x), y)
    nn.ModuleList([layer, view]).half().bfloat16()
    assert view.weight_scale is layer.weight_scale
    assert torch.equal(view(x), y)


def test_first_forwards_from_several_threads_and_in_inference_mode(linear, x, kind):
    expected = kind.of(linear)(x)
    for _ in range(10):
        assert all(torch.equal(y, expected) for y in in_four_threads(kind.of(linear), x))
    with torch.inference_mode():
        made_inside = kind.of(linear)
        layer = kind.of(linear)
        assert torch.equal(made_inside(x), expected)
    assert torch.equal(made_inside(x), expected)
    with torch.inference_mode():
        layer(x)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("name", ["mxfp4", "int4"])
def test_materialized_has_the_bits_of_the_reference_path(linear, x, name):
    dtype = torch.bfloat16 if name == "mxfp4" else torch.float32  # code times scale does not fit bfloat16
    x = x.to(dtype)
    layer = KINDS[name].of(linear).materialize(dtype)
    y = layer(x)
    assert not layer.is_prepacked
    layer.prepack_()
    if name == "mxfp4":
        expected = REFERENCES["mxfp4_linear"](x, layer.weight_tiles, layer.scale_tiles, 43, layer.bias, 16)
    else:
        tiles = layer.weight_tiles, layer.scale_tiles, None
        expected = REFERENCES["int4_linear"](x, *tiles, 43, layer.bias, 32, 16, 1.0)
    assert torch.equal(y, expected) if name == "mxfp4" else torch.allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert "weight_dense" not in layer.state_dict()
    assert f"materialized={dtype}" in repr(layer)
    assert torch.equal(layer(x.half()), KINDS[name].of(linear)(x.half()))


def test_no_bias(linear, kind):
    linear.bias = None
    layer = kind.of(linear)
    assert layer.bias is None
    assert layer(torch.zeros(1, 64, dtype=torch.bfloat16)).eq(0).all()


def test_empty_has_the_shape_and_device_of_the_linear(kind):
    switch = PrecisionSwitch(kind.layer.format, 8)
    layer = kind.layer.empty(nn.Linear(96, 8, device="meta"), switch=switch, **kind.settings)
    assert layer.weight_packed.is_meta
    assert layer.weight_packed.shape == (8, 48)
    assert layer.weight_scale.shape == (8, 3)
    assert layer.switch is switch
    on_cpu = kind.layer.empty(nn.Linear(96, 8), **kind.settings)
    assert on_cpu.dequantized().eq(0).all()
    assert on_cpu(torch.randn(2, 96)).equal(on_cpu.bias.expand(2, 8))


def test_what_does_not_fit_is_refused(linear):
    weight = Mxfp4Weight.from_dense(linear.weight, name="q_proj")
    with pytest.raises(ValueError, match=r"q_proj: bias has shape \[7\], the weight 43 rows"):
        Mxfp4Linear(weight, nn.Parameter(torch.zeros(7)))
    with pytest.raises(ValueError, match="down_proj: in_features is 40"):
        Mxfp4Linear.empty(nn.Linear(40, 8), name="down_proj")
    with pytest.raises(ValueError, match=r"down_proj: in_features is 96, .* group of 128: use group_size=32"):
        Int4Linear.empty(nn.Linear(96, 8), name="down_proj")
    with pytest.raises(ValueError, match=r"o_proj: in_features is 64, .* group of 128: use group_size=64"):
        Int4Linear.from_linear(linear, "o_proj")
    linear.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"up_proj\.weight: 1 of its 86 blocks"):
        Mxfp4Linear.from_linear(linear, name="up_proj.weight")
    with pytest.raises(ValueError, match=r"up_proj\.weight: int4: row 0, group 0 holds NaN or Inf"):
        Int4Linear.from_linear(linear, name="up_proj.weight", group_size=64)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles(linear, x, kind):
    layer = kind.of(linear, 8)
    expected = copy.deepcopy(layer)(x)
    compiled = torch.compile(layer, backend="eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
