"""Do the weights of a model stay what they are, and where there is one copy of them, when linears are joined?"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from decoders import Lanes, packed_model, random_model
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.weights import joined
from hf_mlspec.formats import FORMATS
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.packed_formats import PACKINGS
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.ops import int4 as int4_tiles
from hf_mlspec.ops import mxfp4 as mxfp4_tiles
from hf_mlspec.precision import OWN_BITS

IDS = [[5, 9, 3, 77, 120]]
DENSE = ["llama", "llama-tied-biases", "qwen2-windows", "gemma3", "phi3"]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def addresses(model: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def logits(decoder: CudaDecoder) -> torch.Tensor:
    return Lanes(decoder, 1).feed(IDS)[0]


@pytest.mark.parametrize("name", DENSE)
def test_dense_weights_move_once_and_are_never_copied(name):
    model = random_model(name, torch.bfloat16)
    before, size = values_of(model), hf_mlspec.resident_bytes(model)
    first = CudaDecoder(model)
    assert_same(before, values_of(model))
    assert hf_mlspec.resident_bytes(model) == size
    assert first.extra_bytes == 0
    if name != "phi3":
        attention = model.model.layers[1].self_attn
        storages = {getattr(attention, f"{n}_proj").weight.untyped_storage().data_ptr() for n in "qkv"}
        assert len(storages) == 1
    if name == "llama-tied-biases":
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    moved = addresses(model)
    assert torch.equal(logits(CudaDecoder(model)), logits(first))
    assert addresses(model) == moved


@pytest.mark.parametrize("name", DENSE)
def test_a_model_whose_weights_are_views_is_saved_and_loaded(name, tmp_path):
    model = random_model(name, torch.bfloat16)
    CudaDecoder(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(values_of(model), values_of(again))
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 1.1 * hf_mlspec.resident_bytes(model)
    with torch.no_grad():
        stock = again(torch.tensor(IDS)).logits[0]
    CudaDecoder(again)
    with torch.no_grad():
        torch.testing.assert_close(again(torch.tensor(IDS)).logits[0], stock)


def test_copies_and_loads_of_a_joined_model_are_its_own():
    model = random_model("llama", torch.bfloat16)
    first = decoder_of(model, "cuda")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.k_proj.weight.zero_()
    assert torch.equal(logits(decoder_of(model, "cuda")), logits(first))
    assert not torch.equal(logits(decoder_of(twin, "cuda")), logits(first))
    model.load_state_dict(twin.state_dict())  # in place: the views stay views
    assert decoder_of(model, "cuda") is not first
    assert torch.equal(logits(decoder_of(model, "cuda")), logits(decoder_of(twin, "cuda")))
    with torch.no_grad():
        stock = model(torch.tensor(IDS)).logits[0]
    torch.testing.assert_close(logits(decoder_of(model, "cuda")), stock, atol=0.1, rtol=0.1)


def test_weights_may_be_inference_tensors():
    with torch.inference_mode():
        model = random_model("llama", torch.bfloat16)
        expected = logits(CudaDecoder(random_model("llama", torch.bfloat16)))
    assert torch.equal(logits(CudaDecoder(model)), expected)


def test_an_early_exit_shares_what_moved():
    model = random_model("llama", torch.bfloat16)
    view = hf_mlspec.early_exit(model, 2)
    CudaDecoder(model)
    moved = addresses(model)
    CudaDecoder(view)
    assert addresses(model) == moved
    assert hf_mlspec.resident_bytes(view, shared_with=model) == 0


@pytest.mark.parametrize(("weights", "settings"), [("mxfp4", {}), ("int4", {}), ("int4", {"symmetric": False})])
@pytest.mark.parametrize("name", ["llama-tied-biases", "phi3"])
def test_tiles_of_a_group_are_the_modules_own(name, weights, settings):
    model = packed_model(name, weights, **settings)
    before, size = values_of(model), hf_mlspec.resident_bytes(model)
    with torch.no_grad():
        modules = model(torch.tensor(IDS)).logits
    decoder = CudaDecoder(model)
    assert decoder.extra_bytes == 0
    assert hf_mlspec.resident_bytes(model) == size
    assert_same(before, values_of(model))
    with torch.no_grad():
        assert torch.equal(model(torch.tensor(IDS)).logits, modules)
    moved = addresses(model)
    assert torch.equal(logits(CudaDecoder(model)), logits(decoder))
    assert addresses(model) == moved


@pytest.mark.parametrize("weights", ["mxfp4", "int4"])
def test_outputs_that_do_not_fill_their_tiles_have_tiles_of_the_group(weights):
    """Two kv heads of 12: k ends in the middle of a tile, and v would begin there."""
    options = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 12}
    dense = random_model("llama", torch.float32, **options)
    kind = {"mxfp4": Mxfp4Linear, "int4": Int4Linear}[weights]
    settings, switch = ({"group_size": 32} if weights == "int4" else {}), PrecisionSwitch(weights)
    for layer in dense.model.layers:
        for name in "qkv":
            old = getattr(layer.self_attn, f"{name}_proj")
            setattr(layer.self_attn, f"{name}_proj", kind.from_linear(old, switch=switch, **settings))
    before, size = values_of(dense), hf_mlspec.resident_bytes(dense)
    decoder = CudaDecoder(dense)
    attention = dense.model.layers[0].self_attn
    codes = sum(getattr(attention, f"{name}_proj").weight_packed.nbytes for name in "qkv")
    assert decoder.extra_bytes > 3 * codes  # of three layers, scales included
    assert hf_mlspec.resident_bytes(dense) == size
    assert_same(before, values_of(dense))
    with torch.no_grad():
        modules = dense(torch.tensor(IDS)).logits[0]
    torch.testing.assert_close(logits(decoder), modules, atol=0.05, rtol=0.05)


def test_a_packed_model_is_loaded_into_and_joined_again():
    model, other = packed_model(), packed_model("llama3-rope")
    first = decoder_of(model, "cuda")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight_scale.mul_(2)
    model.load_state_dict(other.state_dict())
    again = decoder_of(model, "cuda")
    assert again is not first
    assert not torch.equal(logits(again), logits(first))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.is_prepacked
    assert_same(values_of(model), values_of(other))


def linear(inputs: int = 96, outputs: int = 32, **settings) -> nn.Linear:
    return nn.Linear(inputs, outputs, **settings)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([linear(), Mxfp4Linear.from_linear(linear())], "its x projections are 2 weights of 2 kinds"),
        ([Mxfp4Linear.from_linear(linear()), Mxfp4Linear.from_linear(linear())], "of 2 kinds .format, group size, ze"),
        ([linear(), linear(dtype=torch.bfloat16)], "its x projections are torch.float32, torch.bfloat16"),
        ([linear(dtype=torch.float16)], "its x is torch.float16; the compiled decoder takes bfloat16 and float32"),
        ([nn.Identity()], "its x is a Identity"),
    ],
)
def test_what_cannot_be_multiplied_as_one(modules, reason):
    before = [values_of(module) for module in modules]
    with pytest.raises(UnknownArchitecture, match=reason):
        joined(modules, "x")
    for module, values in zip(modules, before, strict=True):
        assert_same(values, values_of(module))


def test_a_bias_that_only_some_have():
    with_bias, without = linear(), linear(bias=False)
    x = torch.randn(3, 96)
    out = joined([with_bias, without], "x")(x, OWN_BITS)
    with torch.no_grad():
        torch.testing.assert_close(out, torch.cat([with_bias(x), without(x)], dim=1))


@pytest.mark.parametrize(("weights", "symmetric"), [("mxfp4", True), ("int4", True), ("int4", False)])
@pytest.mark.parametrize(("first", "shared"), [(256, True), (200, False)])
def test_tiles_of_a_gpu_are_shared_where_pairs_are_full(monkeypatch, weights, symmetric, first, shared):
    """With the layout of a GPU in memory of the CPU; scales that need a shift of exponents are the group's, too."""
    pack, unpack = {
        "mxfp4": (mxfp4_tiles.pack_cuda, mxfp4_tiles.unpack_cuda),
        "int4": (int4_tiles.pack_cuda, int4_tiles.unpack_cuda),
    }[weights]
    monkeypatch.setitem(PACKINGS, weights, replace(PACKINGS[weights], prepack=pack, unprepack=unpack))
    kind = {"mxfp4": Mxfp4Linear, "int4": Int4Linear}[weights]
    settings = {} if weights == "mxfp4" else {"group_size": 32, "symmetric": symmetric}
    switch, dense = PrecisionSwitch(weights), [linear(outputs=first), linear(outputs=72)]
    with torch.no_grad():
        dense[1].weight.mul_(2.0**12)
    modules = [kind.from_linear(one, switch=switch, **settings) for one in dense]
    before = [values_of(module) for module in modules]
    group = joined(modules, "x")
    for module, values in zip(modules, before, strict=True):
        assert_same(values, values_of(module))
        assert module.is_prepacked == shared
    assert (group.extra_bytes == 0) == shared
    whole = unpack(*group.tiles, first + 72)
    for part, values in zip(FORMATS[weights].parts, whole, strict=True):
        if values is not None:
            assert torch.equal(values, torch.cat([one[f"weight_{part}"] for one in before]))
    again = joined(modules, "x")
    assert (again.tiles[0].data_ptr() == group.tiles[0].data_ptr()) == shared
