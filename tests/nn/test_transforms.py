"""Does a packed layer transform its inputs at every precision, save how, and get refused where nobody reads it?"""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from models import prompts, tiny
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.formats.hadamard import Hadamard
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.nested import NestedLinear
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.transforms import (
    HADAMARD,
    NONE,
    TRANSFORMS,
    Transform,
    record_of,
    register_transform,
    unregister_transform,
)
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.ops.hadamard import matrix_on
from hf_mlspec.ops.operator import REFERENCES

PERMUTATION = Transform(
    "permutation",
    lambda in_features, device: {"order": torch.arange(in_features, device=device)},
    lambda x, tensors: x[..., tensors["order"]],
)
LAYERS = {
    "mxfp4": (Mxfp4Linear, {}),
    "int4": (Int4Linear, {"group_size": 32}),
    "nested": (NestedLinear, {}),
    "planes": (PlanesLinear, {"group_size": 32}),
}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture(autouse=True)
def permutation():
    register_transform(PERMUTATION)
    yield
    unregister_transform("permutation")


def order_of(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def layer_of(word: str, transformed: bool) -> PackedLinear:
    torch.manual_seed(0)
    kind, options = LAYERS[word]
    layer = kind.from_linear(nn.Linear(64, 48).bfloat16(), **options)
    return layer.transform_(PERMUTATION, {"order": order_of(64)}) if transformed else layer


@pytest.mark.parametrize("word", LAYERS)
def test_applied_before_the_product_at_every_precision(word):
    plain, permuted, x = layer_of(word, False), layer_of(word, True), torch.randn(5, 64).bfloat16()
    for bits in plain.switch.bit_choices:
        with plain.switch.at(bits), permuted.switch.at(bits):
            assert torch.equal(permuted(x), plain(x[:, order_of(64)]))
            assert not torch.equal(permuted(x), plain(x))
    if word != "nested":  # keeps no copy
        assert torch.equal(permuted.materialize(x.dtype)(x), plain.materialize(x.dtype)(x[:, order_of(64)]))


def test_none_is_nothing():
    layer = layer_of("int4", False)
    assert layer.transform is NONE
    assert list(TRANSFORMS) == ["none", "order", "hadamard", "permutation"]
    assert layer.state_dict().keys() == {"weight_packed", "weight_scale", "bias"}
    assert "transform" not in MLSpecConfig("int4").to_dict()
    assert "transform" not in repr(layer)


def test_a_layer_saves_what_its_transform_holds_and_can_give_it_up():
    layer = layer_of("int4", True)
    assert "transform=permutation" in repr(layer)
    other = layer_of("int4", False).transform_(PERMUTATION)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(other(x), layer(x))
    layer.transform_(NONE)
    assert layer.state_dict().keys() == {"weight_packed", "weight_scale", "bias"}
    assert torch.equal(layer(x), layer_of("int4", False)(x))


def test_copies_keep_the_kind():
    layer, x = layer_of("int4", True), torch.randn(2, 64).bfloat16()
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert copied.transform is PERMUTATION
        assert torch.equal(copied(x), layer(x))
    assert pickle.loads(pickle.dumps(layer_of("int4", False))).transform is NONE


def permuted_model(folder) -> nn.Module:
    """A model whose packed layers permute their inputs, and whose config says so."""
    model = tiny(seed=2, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    config = MLSpecConfig("int4", group_size=32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.transform_(PERMUTATION, {"order": order_of(module.in_features)})
    model.config.quantization_config.transform = "permutation"
    model.hf_quantizer.quantization_config.transform = "permutation"
    return model


def test_a_model_carries_its_transform_to_disk_and_back(tmp_path):
    model, inputs = permuted_model(tmp_path / "dense"), prompts([8])
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    assert config["transform"] == "permutation"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert "model.layers.0.mlp.up_proj.transform_order" in again.state_dict()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    with pytest.raises(ValueError, match=r"dequantize: model\.\S+ transforms its inputs \(permutation\), which other"):
        again.dequantize()


@pytest.mark.parametrize("decoder", ["cpu", "cuda"])
def test_compiled_decoders_refuse_it_by_name(tmp_path, caplog, decoder):
    if decoder == "cpu" and not has_compiled_decoder():
        pytest.skip("no compiled library")
    assert decoder_of(permuted_model(tmp_path), decoder) is None
    (said,) = [record.getMessage() for record in caplog.records if "module by module" in record.getMessage()]
    assert "transforms its inputs (permutation), which no compiled decoder does" in said


def test_a_nested_weight_behind_a_transform_is_neither_cast_nor_unnested():
    model = hf_mlspec.nest(tiny(dtype=torch.bfloat16))
    model.model.layers[1].mlp.up_proj.transform_(PERMUTATION)
    for action in (hf_mlspec.direct_cast, hf_mlspec.unnest):
        with pytest.raises(ValueError, match=r": model\.layers\.1\.mlp\.up_proj transforms its inputs .perm"):
            action(model)


def test_wrong_ones_are_named(tmp_path):
    layer = layer_of("int4", False)
    with pytest.raises(ValueError, match=r"order is torch.int64 \[32\], for 64 inputs it holds .*\[64\]"):
        layer.transform_(PERMUTATION, {"order": torch.arange(32)})
    with pytest.raises(ValueError, match=r"sign is torch\.float32"):
        layer.transform_(PERMUTATION, {"sign": torch.ones(64)})
    assert layer.transform is NONE
    with pytest.raises(ValueError, match="transform is 'rotation', choose one of none, order, hadamard, permutation"):
        MLSpecConfig("int4", transform="rotation")
    with pytest.raises(ValueError, match="transform 'permutation' is taken"):
        register_transform(PERMUTATION)
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="transform is 'permutation': quantizing chooses none, leave it out"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=MLSpecConfig("int4", group_size=32, transform="permutation")
        )


@pytest.mark.parametrize("how", [Hadamard(16), Hadamard(24, 12), Hadamard(56, 28, 2), Hadamard(52, 52)], ids=str)
def test_the_gradient_of_a_rotation_is_that_of_plain_torch(how):
    seed = torch.Generator().manual_seed(how.size)
    x, wanted = torch.randn(2, 3, 2 * how.size * how.inner, generator=seed), torch.randn(2, 3, 1, generator=seed)
    ours, plain = (x.clone().requires_grad_() for _ in range(2))
    rotated = HADAMARD.apply(ours, record_of(how))
    expected = REFERENCES["hadamard_rows"](plain, matrix_on(how.order, x.device), how.size, how.inner)
    assert torch.equal(rotated, expected)
    for one in (rotated, expected):
        (one.square() * wanted).sum().backward()
    assert torch.allclose(ours.grad, plain.grad, atol=1e-5)
