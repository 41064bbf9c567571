"""Is a model whose packed layers order their inputs saved and loaded bit for bit, checked, and dequantized?"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from models import prompts, tiny
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.nn.linear import Int4Linear
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.transforms import ORDER

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:the metadata of")
FORMATS = {"int4": {"group_size": 32, "symmetric": False}, "bitplanes": {"group_size": 32}, "mxfp4": {}}
LAYER = "model.layers.1.mlp.down_proj"


def order_of(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size)).int()


def ordered_model(folder, format: str = "int4") -> nn.Module:
    tiny("qwen2", seed=2, dtype=torch.bfloat16).save_pretrained(folder)
    config = MLSpecConfig(format, **FORMATS[format])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config).eval()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.transform_(ORDER, {"order": order_of(module.in_features)})
    model.config.quantization_config.transform = model.hf_quantizer.quantization_config.transform = "order"
    return model


@pytest.fixture
def saved(tmp_path):
    """Where an int4 model lies."""
    ordered_model(tmp_path / "dense").save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def rewrite(folder, change) -> None:
    """The file's tensors changed, as a foreign tool writes them: without checksums."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("format", FORMATS)
def test_saved_and_loaded_bit_for_bit(tmp_path, format):
    model, inputs = ordered_model(tmp_path / "dense", format), prompts([8])
    model.save_pretrained(tmp_path / "packed")
    assert json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]["transform"] == "order"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert again.get_submodule(LAYER).transform is ORDER
    assert "transform=order" in repr(again.get_submodule(LAYER))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    once = again.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_models=[])
    assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=12, assistant_models=[]), once)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Folders of two models in shards, of the same codes: one layer of the second orders its inputs the other way."""
    model, folders = ordered_model(tmp_path_factory.mktemp("dense")), []
    for name in ("one", "other"):
        folders.append(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[-1], max_shard_size="9KB")
        order = model.get_submodule(LAYER).transform_order
        order.copy_(order.flip(0))
    return folders


@pytest.mark.parametrize("listed", [True, False], ids=["with its checksums", "without"])
def test_a_shard_with_another_models_order_is_refused_by_name(shards, tmp_path, listed):
    """Of one shape, and a permutation: only the checksums of the save tell."""
    shutil.copytree(shards[0], tmp_path, dirs_exist_ok=True)
    name = f"{LAYER}.transform_order"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / index[name]
    swapped = load_file(shards[1] / index[name])
    assert not torch.equal(swapped[name], load_file(file)[name])
    if listed:
        shutil.copy(shards[1] / index[name], file)
        words = rf"{file.name}.* of different saves: .* differ for 1 of \d+ tensors, {name} among them"
    else:
        save_file(swapped, file, metadata={"format": "pt"})
        words = rf"{name} .*{file.name}.* is damaged: its \d+ bytes have CRC-32"
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=words):
        hf_mlspec.load(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda order: order.__setitem__(5, 64), "1 entries that are none of its 64 inputs or there more than once"),
        (lambda order: order.__setitem__(5, -1), "the first (-1) at index [5]"),
        (lambda order: order.__setitem__(5, int(order[6])), "2 entries that are none of its 64 inputs"),
        (lambda order: order.zero_(), "64 entries"),
    ],
)
def test_an_order_that_is_none_is_refused_with_tensor_and_file(saved, change, words):
    rewrite(saved, lambda tensors: change(tensors[f"{LAYER}.transform_order"]))
    with pytest.raises(ValueError, match="damaged or its order is no permutation") as error:
        AutoModelForCausalLM.from_pretrained(saved)
    for word in (f"{LAYER}: transform_order holds", words, str(saved / "model.safetensors")):
        assert word in str(error.value)


def test_a_missing_order_one_of_another_dtype_or_size(saved):
    key = f"{LAYER}.transform_order"
    whole = load_file(saved / "model.safetensors")
    for order, error, words in (
        (None, ValueError, "1 tensors of Qwen2ForCausalLM are missing"),
        (whole[key].long(), TypeError, "is torch.int64, config.json makes it torch.int32"),
        (whole[key][:32].clone(), ValueError, r"shape \[32\], config.json makes it \[64\]"),
    ):
        save_file({**{k: v for k, v in whole.items() if k != key}, **({} if order is None else {key: order})},
                  saved / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
        with pytest.raises(error, match=words):
            AutoModelForCausalLM.from_pretrained(saved)
        if order is None:
            with pytest.raises(ValueError, match="1 tensors of Qwen2Model are missing"):
                AutoModel.from_pretrained(saved)


def test_what_is_loaded_from_tensors_in_memory_is_checked_too(saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[f"{LAYER}.transform_order"][5] = 64
    with pytest.raises(ValueError, match=rf"{LAYER}: transform_order holds 1 entries"):
        type(model).from_pretrained(None, config=AutoConfig.from_pretrained(saved), state_dict=state)


def test_a_layer_takes_permutations_only():
    layer = Int4Linear.from_linear(nn.Linear(64, 48), group_size=32)
    with pytest.raises(ValueError, match=r"transform 'order': order is torch\.int64"):
        layer.transform_(ORDER, {"order": order_of(64).long()})
    with pytest.raises(ValueError, match=r"transform 'order': order holds 64 entries .* no permutation"):
        layer.transform_(ORDER, {"order": torch.zeros(64, dtype=torch.int32)})


def test_dequantized_it_takes_its_inputs_as_they_come(saved):
    packed, inputs = AutoModelForCausalLM.from_pretrained(saved).eval(), prompts([8])
    with torch.no_grad():
        want = packed(**inputs).logits
    layer = packed.get_submodule(LAYER)
    columns = layer.dequantized(torch.bfloat16)
    wide = packed.dequantize()
    weight = wide.get_submodule(LAYER).weight
    assert type(wide.get_submodule(LAYER)) is nn.Linear
    assert torch.equal(weight[:, order_of(64).long()], columns)
    with torch.no_grad():
        torch.testing.assert_close(wide(**inputs).logits, want, atol=0.06 * float(want.abs().max()), rtol=0)


def test_it_is_not_cast_or_quantized_again(saved):
    model = AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(ValueError, match="direct_cast: the model is already quantized"):
        hf_mlspec.direct_cast(model)
    with pytest.raises(ValueError, match="transform is 'order': quantizing chooses none, leave it out"):
        AutoModelForCausalLM.from_pretrained(
            saved.parent / "dense", quantization_config=MLSpecConfig("int4", group_size=32, transform="order")
        )
