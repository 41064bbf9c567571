"""Are nested and bit-plane models saved and loaded bit for bit, and is a damaged file refused before it is loaded?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.nn.nested import NestedEmbedding, NestedLinear
from tests.models import tiny

BF16 = torch.bfloat16
IDS = torch.arange(3, 17).view(2, 7)
LAYER = "model.layers.1.mlp.up_proj"
pytestmark = [
    pytest.mark.filterwarnings("ignore:no compiled kernel"),
    pytest.mark.filterwarnings("ignore:nest. .* stay as they are"),
]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def dense(request, tmp_path):
    model = tiny("llama", dtype=BF16, tie_word_embeddings=request.param, intermediate_size=256)
    with torch.no_grad():
        model.get_submodule(LAYER).weight[7, 3] = 2.0**-70  # an escape
    model.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(folder, config: MLSpecConfig | None = None, **options) -> PreTrainedModel:
    settings = options if config is None else {"quantization_config": config, **options}
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("codebook", ["lloyd_max", "fitted"])
@pytest.mark.parametrize("options", [{}, {"device_map": {"": "cpu"}}], ids=["plain", "device_map"])
def test_nesting_while_loading_is_nesting_afterwards(dense, tmp_path, codebook, options):
    afterwards = hf_mlspec.nest(load(dense), codebook)
    model = load(dense, MLSpecConfig("nested-bf16", codebook=codebook), **options)
    assert same(model, afterwards)
    for number, (saved, size) in enumerate(((model, "5GB"), (afterwards, "20KB"))):
        folder = tmp_path / str(number)
        saved.save_pretrained(folder, max_shard_size=size)
        again = load(folder, **options)
        assert same(again, model)
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert isinstance(again.lm_head, NestedLinear)
        assert isinstance(again.model.embed_tokens, NestedEmbedding) == model.config.tie_word_embeddings
        assert len({id(m.switch) for m in again.modules() if isinstance(m, NestedLinear)}) == 1
        stored = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert stored == {"quant_method": "mlspec", "format": "nested-bf16", "format_version": 1, "codebook": codebook,
                          "activation_bits": 16, "modules_to_not_convert": []}  # fmt: skip
        plain = load(dense).state_dict()
        hf_mlspec.unnest(again)
        assert all(torch.equal(tensor, plain[name]) for name, tensor in again.state_dict().items())
    model.dequantize()
    assert type(model.lm_head) is nn.Linear


@pytest.mark.filterwarnings("ignore:no compiled kernel")
def test_dequantizing_gives_the_dtype_that_was_loaded(dense, tmp_path):
    hf_mlspec.nest(load(dense)).save_pretrained(tmp_path / "nested")
    model = load(tmp_path / "nested", dtype=torch.float32).dequantize()
    plain = load(dense, dtype=torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert same(model, plain)
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    tied = plain.lm_head.weight is plain.model.embed_tokens.weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_model_changed_by_calibration_is_saved_as_it_is(dense, tmp_path):
    model = hf_mlspec.nest(load(dense), calibration=[IDS])
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    ours, theirs = model.state_dict(), again.state_dict()
    tied = {name for name in ours if name.startswith("lm_head") and model.config.tie_word_embeddings}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() - tied)
    assert torch.equal(model.lm_head.dequantized(), again.lm_head.dequantized())


@pytest.mark.parametrize("num_planes", [8, 5, 3, "int3", "int2", "ternary"])
def test_bit_planes_are_loaded_as_they_were_saved(dense, tmp_path, num_planes):
    config = MLSpecConfig("bitplanes", num_planes=num_planes, group_size=32)
    model = load(dense, config, device_map={"": "cpu"})
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert same(again, model)
    assert again.config.quantization_config.to_dict() == model.config.quantization_config.to_dict()
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert type(model.lm_head) is nn.Linear  # rounded weights leave the head as it is
    assert config.bits_per_weight == {"int3": 3, "int2": 2, "ternary": 2}.get(num_planes, num_planes) + 0.5


def test_a_dispatched_model_keeps_its_hooks(dense):
    model = dispatch_model(load(dense), device_map={"": "cpu"}, force_hooks=True)
    logits = model(IDS).logits
    hooked = {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    hf_mlspec.nest(model)
    assert {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")} == hooked
    assert torch.allclose(model(IDS).logits, logits, rtol=0.02, atol=0.05)
    hf_mlspec.unnest(model)
    assert {name for name, module in model.named_modules() if hasattr(module, "_hf_hook")} == hooked
    assert torch.equal(model(IDS).logits, logits)


def test_skipped_modules_and_those_that_do_not_fit_stay_plain(dense, tmp_path):
    model = load(dense, MLSpecConfig("nested-bf16", skip_modules=["up_proj", "lm_head"]))
    kept = ["lm_head", "model.layers.0.mlp.up_proj", LAYER]
    assert model.config.quantization_config.modules_to_not_convert == kept
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert same(again, model)
    assert all(type(again.get_submodule(name)) is nn.Linear for name in kept)
    assert type(again.model.embed_tokens) is nn.Embedding
    odd = tiny("llama", dtype=BF16, intermediate_size=80)
    odd.save_pretrained(tmp_path / "odd")
    with pytest.warns(UserWarning, match=r"down_proj \(in_features 80 is no multiple of 32\)"):
        model = load(tmp_path / "odd", MLSpecConfig("nested-bf16"))
    model.save_pretrained(tmp_path / "odd-nested")
    assert same(load(tmp_path / "odd-nested"), model)


def test_the_model_without_its_head_loads_from_the_same_files(dense, tmp_path):
    model = load(dense, MLSpecConfig("nested-bf16"))
    model.save_pretrained(tmp_path / "saved")
    body = AutoModel.from_pretrained(tmp_path / "saved")
    escaped = body.get_submodule(LAYER.removeprefix("model."))
    assert torch.equal(escaped.dequantized(), model.get_submodule(LAYER).dequantized())
    assert torch.equal(body(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_a_draft_of_a_nested_model_is_saved_whole(dense, tmp_path):
    draft = hf_mlspec.direct_cast(hf_mlspec.nest(load(dense)))
    draft.save_pretrained(tmp_path / "draft")
    again = load(tmp_path / "draft")
    assert torch.equal(again(IDS).logits, draft(IDS).logits)
    assert torch.equal(again.model.embed_tokens.weight, load(dense).model.embed_tokens.weight)


def test_what_cannot_be_nested_while_loading(dense, tmp_path):
    with pytest.raises(ValueError, match=r"is to be loaded in torch\.float32: load it with dtype"):
        load(dense, MLSpecConfig("nested-bf16"), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"skip_modules: 'dwn_proj' matches no module .* did you mean down_proj"):
        load(dense, MLSpecConfig("nested-bf16", skip_modules=["dwn_proj"]))
    with pytest.raises(ValueError, match=r"skip_modules=\['\.\*'\] keeps every nn.Linear of .* plain, all \d+: leave"):
        load(dense, MLSpecConfig("nested-bf16", skip_modules=[".*"]))
    with pytest.raises(ValueError, match="device_map sends modules to disk"):
        load(dense, MLSpecConfig("nested-bf16"), device_map={"": "disk"})
    model = load(dense)
    with torch.no_grad():
        model.get_submodule(LAYER).weight[1, 2] = torch.inf
    model.save_pretrained(tmp_path / "bad")
    for config in (MLSpecConfig("nested-bf16"), MLSpecConfig("bitplanes", group_size=32)):
        with pytest.raises(ValueError, match=rf"{LAYER}\.weight.* (inf|NaN or Inf)"):
            load(tmp_path / "bad", config)


@pytest.fixture
def untouched(monkeypatch):
    """Loading ends before transformers loads the first tensor."""
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", lambda *args: pytest.fail("tensors were loaded"))


def rewritten(folder: Path, change) -> Path:
    """The one file of a folder, its tensors changed, as a foreign tool writes it: without checksums."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return file


def _set(tensors, name, place, value):
    tensors[f"{LAYER}.weight_{name}"][place] = value


def _cut(tensors, name, axis):
    tensor = tensors[f"{LAYER}.weight_{name}"]
    tensors[f"{LAYER}.weight_{name}"] = tensor.narrow(axis, 0, tensor.shape[axis] - 1).clone()


def _wider(tensors):
    tensors[f"{LAYER}.weight_low"] = tensors[f"{LAYER}.weight_low"].to(torch.int16)


def _reserve(tensors):
    """A field of 9 at row 5, column 6, where fields are 0 or at least 128."""
    _set(tensors, "low", (5, 6), 9)
    _set(tensors, "high", (5, 3), 0)


NESTED = {
    "planes of another length": (
        lambda t: _cut(t, "low", 1),
        r"weight_low .* has shape \[256, 31\].*\[256, 32\].*truncated",
    ),
    "too few scales": (lambda t: _cut(t, "scale", 0), r"weight_scale .* has shape \[255, 1\]"),
    "no high plane": (lambda t: t.pop(f"{LAYER}.weight_high"), r"1 tensors .* missing .*up_proj\.weight_high"),
    "a plane of another dtype": (_wider, r"weight_low .* is torch\.int16"),
    "an exponent too small": (
        lambda t: _set(t, "scale", (4, 0), 30),
        r"1 exponents outside 31\.\.254, the first \(30\) at row 4",
    ),
    "the exponent of NaN": (lambda t: _set(t, "scale", (4, 0), 255), r"weight_scale holds 1 .*\(255\)"),
    "a codebook that falls": (lambda t: _set(t, "codebook", 3, 1), "codebook holds .*must ascend"),
    "a reserved field": (_reserve, "the field 9 at row 5, column 6"),
    "escapes of two lengths": (
        lambda t: _cut(t, "escape_value", 0),
        r"weight_escape_index has shape \[1\] and weight_escape_value \[0\]",
    ),
    "an escape that points nowhere": (
        lambda t: _set(t, "escape_index", 0, 1 << 40),
        r"escape_index\[0\] is .*outside of the 8192",
    ),
    "an escape too large": (
        lambda t: _set(t, "escape_value", 0, 1.0),
        r"escape_value\[0\] is 1, zero, not finite or too large",
    ),
    "escapes without values": (lambda t: t.pop(f"{LAYER}.weight_escape_value"), "weight_escape_value None"),
}
PLANES = {
    "planes of another length": (lambda t: _cut(t, "planes", 2), r"weight_planes .* has shape \[8, 256, 3\]"),
    "a plane too few": (lambda t: _cut(t, "planes", 0), r"weight_planes .* has shape \[7, 256, 4\]"),
    "a scale of zero": (lambda t: _set(t, "scale", (4, 0), 0), "weight_scale holds 1 values that are NaN, Inf, zero"),
    "a zero beyond the codes": (
        lambda t: _set(t, "zero_doubled", 0, 511),
        r"weight_zero_doubled is 511, of 8 planes it is",
    ),
    "no zero": (lambda t: t.pop(f"{LAYER}.weight_zero_doubled"), r"1 tensors .* missing"),
}


@pytest.mark.parametrize("damage", NESTED)
def test_damage_to_a_nested_file(dense, tmp_path, damage, untouched_after_save):
    folder = untouched_after_save(MLSpecConfig("nested-bf16"))
    change, words = NESTED[damage]
    file = rewritten(folder, change)
    with pytest.raises((ValueError, TypeError), match=words) as error:
        load(folder)
    assert LAYER in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("damage", PLANES)
def test_damage_to_a_file_of_planes(dense, tmp_path, damage, untouched_after_save):
    folder = untouched_after_save(MLSpecConfig("bitplanes", group_size=32))
    change, words = PLANES[damage]
    file = rewritten(folder, change)
    with pytest.raises(ValueError, match=words) as error:
        load(folder)
    assert LAYER in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("format", ["nested-bf16", "bitplanes"])
def test_a_file_that_is_cut_or_has_a_wrong_bit(untouched_after_save, format):
    folder = untouched_after_save(MLSpecConfig(format, **({} if format == "nested-bf16" else {"group_size": 32})))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"is damaged: it has .* bytes, its header describes .*truncated"):
        load(folder)
    file.write_bytes(whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:])
    with pytest.raises(ValueError, match=r"have CRC-32 .*, saved was"):
        load(folder)


@pytest.fixture
def untouched_after_save(dense, tmp_path, request):
    """Saves a model in a format; loading it is then to end before a tensor is loaded."""

    def save(config: MLSpecConfig) -> Path:
        load(dense, config).save_pretrained(tmp_path / "packed")
        request.getfixturevalue("untouched")
        return tmp_path / "packed"

    return save
