"""Does a nested linear multiply by the very BF16 weight it was made of, or by the draft inside it, and keep both?"""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from hf_mlspec import ops
from hf_mlspec.formats import NestedWeight
from hf_mlspec.formats.nested.codebooks import CODEBOOKS
from hf_mlspec.nn.nested import NestedLinear
from hf_mlspec.nn.replace import resident_bytes
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
ESCAPES = [(3, 5, 2.0**-60), (7, 1, -(2.0**-70)), (7, 63, 2.0**-100), (42, 0, 1e-40)]  # 1e-40: a BF16 subnormal


@pytest.fixture(params=["plain", "escapes"])
def linear(request) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(64, 43).to(torch.bfloat16).requires_grad_(False)  # 43: the last tile is short
    linear.weight[:, 20] = 0.0
    linear.weight[11, 20] = -0.0
    if request.param == "escapes":
        for row, column, value in ESCAPES:
            linear.weight[row, column] = value
    return linear


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Bits of bfloat16: 0 is not -0."""
    return tensor.detach().view(torch.int16)


def same_state(one: nn.Module, saved: dict) -> bool:
    own = one.state_dict()
    return own.keys() == saved.keys() and all(torch.equal(own[n], saved[n]) for n in saved if n != "bias")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_exact_is_the_product_with_the_original(linear, x, dtype):
    layer = NestedLinear.from_linear(linear)
    assert (len(layer.weight_escape_index) if layer.weight_escape_index is not None else 0) in (0, len(ESCAPES))
    x = x.to(dtype)
    expected = ops.bf16_linear(x.view(5, 1, 64), linear.weight, linear.bias)
    y = layer(x.view(5, 1, 64))
    assert (y.dtype, y.shape) == (dtype, (5, 1, 43))
    assert torch.equal(y, expected)
    assert torch.equal(words(layer.dequantized()), words(linear.weight))
    linear.bias = None
    assert torch.equal(NestedLinear.from_linear(linear)(x), ops.bf16_linear(x, linear.weight))


@pytest.mark.parametrize("codebook", [*CODEBOOKS, "fitted"])
def test_the_draft_is_the_product_with_the_draft_weight(linear, x, codebook):
    layer = NestedLinear.from_linear(linear, codebook=codebook)
    exact, draft = layer(x), layer.dequantized_draft()
    assert 0.02 < ((draft - linear.weight.float()).norm() / linear.weight.float().norm()) < 0.15
    expected = nn.functional.linear(x.float(), draft, linear.bias.float())
    with layer.switch.at("nested4"):
        assert torch.allclose(layer(x).float(), expected, rtol=2**-7, atol=1e-3)
    with layer.switch.at("nested4a8"):
        eight = layer(x)
    assert torch.allclose(eight.float(), expected, rtol=2**-7, atol=2e-2)
    assert not torch.equal(eight, exact)
    tiles = layer.weight_tiles, layer.scale_tiles, layer.weight_low, layer.weight_codebook
    with layer.switch.at(Bits(4, 8)):
        assert torch.equal(
            layer(x), ops.nested_linear(x, *tiles, 43, linear.bias, weight_bits=4, activation_bits=8)
        )


def test_the_bias_is_shared_and_nothing_is_there_twice(linear, x):
    layer = NestedLinear.from_linear(linear)
    assert layer.bias is linear.bias
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    parameters, before = [id(p) for p in layer.parameters()], resident_bytes(layer)
    bytes_of = 43 * 64 * 2 + 43 * 2 + 8 + 2 * 43  # planes and nibbles, scales, codebook, bias
    escapes = 0 if layer.weight_escape_index is None else len(ESCAPES)
    assert before == bytes_of + 10 * escapes
    layer(x)
    assert layer.is_prepacked
    assert [id(p) for p in layer.parameters()] == parameters
    rows = 3 if escapes else 0
    tiles = 48 * 64 * 2 + 48 * 2 + 8 + 2 * 43  # the outputs 43 to 47 of the last tile
    assert resident_bytes(layer) == tiles + rows * (8 + 128)
    layer.unprepack_()
    assert resident_bytes(layer) == before


@pytest.mark.parametrize("prepacked", [False, True])
def test_copies_moves_and_casts(linear, x, prepacked):
    layer = NestedLinear.from_linear(linear)
    saved = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    y = layer(x)
    assert same_state(layer, saved)
    if not prepacked:
        layer.unprepack_()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(layer))):
        assert twin.is_prepacked is prepacked
        assert twin.switch is not layer.switch
        assert torch.equal(twin(x), y)
        assert same_state(twin, saved)
    for change in (nn.Module.half, nn.Module.double, nn.Module.float, lambda m: m.to(torch.bfloat16), nn.Module.cpu):
        assert change(layer) is layer
        assert same_state(layer, saved)
        assert all(layer.state_dict()[name].dtype == saved[name].dtype for name in saved if name != "bias")
    assert torch.equal(layer(x), y)
    assert layer.to("meta").weight_low.is_meta


def test_a_blind_cast_of_escapes_is_refused(linear):
    layer = NestedLinear.from_linear(linear)
    if layer.weight_escape_value is None:
        assert layer._apply(lambda tensor: tensor) is layer
        return
    with pytest.raises(TypeError, match=r"its weight_escape_value is torch\.bfloat16 and cannot be cast"):
        layer._apply(lambda tensor: tensor.float())


def test_checkpoints_of_another_number_of_escapes_are_loaded(linear, x):
    saved = NestedLinear.from_linear(linear).state_dict()
    escapes = "weight_escape_index" in saved
    few = nn.Linear(64, 43).to(torch.bfloat16)
    with torch.no_grad():
        few.weight[0, 0] = 2.0**-60
    none, nine = NestedLinear.empty(few), NestedLinear.empty(few, escapes=9)
    for other in (NestedLinear.from_linear(few).prepack_(), none, nine):
        other.load_state_dict({name: tensor.clone() for name, tensor in saved.items()})
        assert same_state(other, saved)
        assert (other.weight_escape_index is not None) is escapes
        assert torch.equal(other(x), ops.bf16_linear(x, linear.weight, linear.bias))


def test_empty_has_the_shape_and_device_of_the_linear():
    switch = PrecisionSwitch("nested")
    layer = NestedLinear.empty(nn.Linear(96, 8, device="meta"), switch=switch, escapes=5)
    assert layer.switch is switch
    assert {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()} == {
        "weight_packed": (8, 48), "weight_scale": (8, 3), "weight_low": (8, 96), "weight_high": (8, 48),
        "weight_codebook": (8,), "weight_escape_index": (5,), "weight_escape_value": (5,), "bias": (8,),
    }  # fmt: skip
    assert layer.weight_low.is_meta
    on_cpu = NestedLinear.empty(nn.Linear(96, 8).to(torch.bfloat16))
    assert on_cpu.dequantized().eq(0).all()
    assert on_cpu(torch.randn(2, 96).bfloat16()).equal(on_cpu.bias.expand(2, 8))


def test_views_that_share_a_weight_change_together(linear, x):
    layer = NestedLinear.from_linear(linear)
    view = copy.deepcopy(layer, {id(p): p for p in layer.parameters()})
    y = layer(x)
    assert view.is_prepacked
    assert torch.equal(view(x), y)
    layer.unprepack_()
    assert torch.equal(words(view.dequantized()), words(linear.weight))


def test_a_thread_drafts_while_another_is_exact(linear, x):
    layer = NestedLinear.from_linear(linear)
    exact = layer(x)
    inside, done, seen = threading.Event(), threading.Event(), []

    def draft() -> None:
        with layer.switch.at("nested4"):
            seen.append(layer(x))
            inside.set()
            done.wait(10)
            seen.append(layer(x))

    thread = threading.Thread(target=draft)
    thread.start()
    assert inside.wait(10)
    assert torch.equal(layer(x), exact)
    done.set()
    thread.join()
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], exact)


def test_what_does_not_fit_is_refused(linear):
    with pytest.raises(TypeError, match=r"q_proj is torch\.float16: .* only two exponent bits would be left"):
        NestedLinear.from_linear(nn.Linear(64, 8).half(), name="q_proj")
    with pytest.raises(ValueError, match="down_proj: in_features is 40, nested BF16 needs a multiple of 32"):
        NestedLinear.empty(nn.Linear(40, 8), name="down_proj")
    weight = NestedWeight.from_dense(linear.weight, name="up_proj")
    with pytest.raises(ValueError, match="up_proj: the weight is nested, its switch is for mxfp4 weights"):
        NestedLinear(weight, switch=PrecisionSwitch("mxfp4"))
    with pytest.raises(ValueError, match=r"unnest\(model\) makes it dense"):
        NestedLinear(weight).materialize(torch.bfloat16)
    layer = NestedLinear(weight)
    for bits in ((16, 8), (4, 4), (8, 16), (3, 16)):
        with pytest.raises(ValueError, match=rf"bits are {bits[0]} of weights and {bits[1]} of activations: nested w"):
            layer.switch.at(Bits(*bits))
    with pytest.raises(ValueError, match="precision planes4: this model's weights are nested, choose one of nested, "):
        layer.switch.at("planes4")
