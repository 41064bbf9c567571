"""Does from_pretrained with a method give what `hf_mlspec.quantize` makes of the dense model, or one clear error?"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.calibration.matrices import write_rotations

IDS = torch.arange(3, 43).view(1, 40)
ROWS = [torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
TEXTS = ["".join(f"line {n}: the area of {n * n}\n" for n in range(first, first + 60)) for first in (0, 60)]
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def config_of(method: str | None = "gptq", **options) -> MLSpecConfig:
    return MLSpecConfig(**{"format": "int4", "group_size": 32, "method": method, **options})


def load(folder, config=None, **options):
    options |= {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def saved(model, folder):
    """What config.json says, and the bytes of all tensors."""
    model.save_pretrained(folder)
    tensors = {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
    return json.loads((folder / "config.json").read_text()), tensors


@pytest.mark.parametrize(("method", "options"), [
    ("gptq", {"act_order": True, "damping": 0.05, "symmetric": False}), ("smoothquant", {"search_bits": 4}),
    ("quarot+gptq", {"seed": 3, "activation_bits": 4}), ("rtn", {"skip_modules": ["down_proj"]})])
def test_a_loaded_model_is_saved_as_the_one_that_was_quantized(saved_model, tmp_path, method, options):
    loaded = load(saved_model, config_of(method, calibration=ROWS, **options))
    model = load(saved_model)
    hf_mlspec.quantize(model, method, calibration=ROWS, group_size=32, **options)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert type(loaded.config.quantization_config) is MLSpecConfig
    assert saved(loaded, tmp_path / "loaded") == saved(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "loaded")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(("method", "format"), [("gptq", "int4"), ("quarot", "int4"), ("atom+gptq", "int4-int8")])
def test_a_method_brings_its_format(method, format):
    assert MLSpecConfig(method=method, calibration=ROWS).format == format
    assert MLSpecConfig().format == "mxfp4"
    with pytest.raises(ValueError, match=rf"method '{re.escape(method)}' does not fit format 'mxfp4'"):
        MLSpecConfig(format="mxfp4", method=method, calibration=ROWS)
    with pytest.raises(ValueError, match="does not fit format None"):
        MLSpecConfig(format=None, kv_cache="int8", method=method, calibration=ROWS)
    with pytest.raises(ValueError, match="MLSpecConfig: method is 'gtpq', choose one of rtn, gptq"):
        MLSpecConfig(method="gtpq", calibration=ROWS)


def test_given_rotations_are_read_while_loading(saved_model, tmp_path):
    model, file = load(saved_model), tmp_path / "R.bin"
    size = model.config.hidden_size
    write_rotations(file, torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))[0])
    loaded = load(saved_model, config_of("quarot+gptq", calibration=ROWS, rotations=file))
    hf_mlspec.quantize(model, "quarot+gptq", calibration=ROWS, group_size=32, rotations=file)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert config_of("quarot", calibration=ROWS, rotations=file).to_dict()["rotations"] == str(file)


@pytest.mark.parametrize("kind", ["file", "texts", "data set", "stream"])
def test_text_is_read_with_the_tokenizer_of_the_folder(saved_model, tmp_path, kind):
    file = tmp_path / "text.txt"
    file.write_text(TEXTS[0], encoding="utf-8")
    given = {"file": str(file), "texts": TEXTS, "data set": [{"text": text} for text in TEXTS],
             "stream": (text for text in TEXTS)}[kind]  # fmt: skip
    size = {"samples": 3, "tokens": 50, "seed": 7}
    loaded = load(saved_model, config_of(calibration=given, **size))
    model = load(saved_model)
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    found = hf_mlspec.quantize(model, "gptq", calibration=TEXTS, tokenizer=tokenizer, group_size=32, **size)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert loaded.config.quantization_config.calibration == found.record
    assert TEXTS[0][:20] not in json.dumps(loaded.config.quantization_config.to_dict())


def test_a_tokenizer_that_is_given_reads_the_text(saved_model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(saved_model, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    size = {"samples": 2, "tokens": 30}
    with pytest.raises(ValueError, match=r"calibration is text, and .* holds no tokenizer .*MLSpecConfig\(tokenizer="):
        load(bare, config_of(calibration=TEXTS, **size))
    config = config_of(calibration=TEXTS, tokenizer=AutoTokenizer.from_pretrained(saved_model), **size)
    assert load(bare, config).config.quantization_config.calibration["tokens"] == 60


def test_keys_and_values_keep_their_format(saved_model, tmp_path):
    model = load(saved_model, config_of(calibration=ROWS, kv_cache="int8"))
    told = saved(model, tmp_path)[0]["quantization_config"]
    assert (told["kv_cache"], told["calibration"]["method"]) == ("int8", "gptq")


def test_a_config_with_a_method_tells_no_text_and_is_not_read_back_without_one():
    config = config_of(calibration=TEXTS, samples=3, tokenizer=object())
    told = config.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert (told["method"], told["samples"]) == ("gptq", 3)
    assert not {"calibration", "tokenizer", "request"} & set(told)
    with pytest.raises(ValueError, match="method 'gptq' chooses codes on a text: add calibration"):
        MLSpecConfig.from_dict(told)


@pytest.mark.parametrize(("given", "words"), [
    ({}, "method 'gptq' chooses codes on a text: add calibration"),
    ({"method": None, "calibration": TEXTS}, "calibration is a list, and there is no method"),
    ({"method": None, "calibration": {"train": TEXTS}}, "calibration is a dict, and there is no method"),
    ({"method": None, "samples": 4}, "samples goes with a method"),
    ({"method": None, "tokenizer": "x"}, "tokenizer goes with a method"),
    ({"method": "gpqt", "calibration": TEXTS}, "method is 'gpqt', choose one of rtn, gptq"),
    ({"format": "mxfp4", "group_size": 128, "calibration": TEXTS}, "method 'gptq' does not fit format 'mxfp4'"),
    ({"format": None, "group_size": 128, "kv_cache": "int8", "calibration": TEXTS},
     "method 'gptq' does not fit format None"),
    ({"method": "awq", "act_order": True, "calibration": TEXTS}, "act_order is GPTQ's"),
    ({"act_order": "yes", "calibration": TEXTS}, "act_order is 'yes', it must be True or False"),
    ({"search_bits": 4, "calibration": TEXTS}, "search_bits is SmoothQuant's"),
    ({"damping": 0, "calibration": TEXTS}, "damping is 0, it must be a number above 0"),
    ({"seed": 0.5, "calibration": TEXTS}, r"seed is 0\.5, it must be a whole number"),
    ({"sample": 4, "calibration": TEXTS}, r"unknown settings \['sample'\]")])
def test_what_does_not_fit_together_is_refused_by_the_config(given, words):
    with pytest.raises(ValueError, match=f"MLSpecConfig: {words}"):
        config_of(**given)


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"calibration": TEXTS, "samples": 1000}, ValueError, "1000 samples of 512 need 512000: give a longer text"),
    ({"calibration": TEXTS, "samples": 0}, ValueError, "samples is 0, it must be a positive number"),
    ({"calibration": ROWS, "samples": 0}, ValueError, "samples is 0, it must be a positive number"),
    ({"calibration": TEXTS[0]}, ValueError, r"calibration is a text of \d+ characters, not the name of a file"),
    ({"calibration": "word " * 60}, ValueError, "calibration is a text of 300 characters, not the name of a file"),
    ({"calibration": [TEXTS[0], 5]}, TypeError, r"calibration\[1\] is a int, and calibration\[0\] is a text"),
    ({"calibration": "nowhere.txt"}, ValueError, "calibration file 'nowhere.txt' does not exist"),
    ({"calibration": [[3, 300]]}, ValueError, "holds token 300, the model has 258"),
    ({"calibration": [[3] * 600]}, ValueError, "has 600 tokens, the model 512 positions"),
    ({"calibration": 7}, TypeError, "calibration is 7: give a text file"),
    ({"calibration": TEXTS, "tokenizer": "name"}, TypeError, "tokenizer is 'name': give the tokenizer itself"),
    ({"calibration": {"train": ROWS}}, TypeError, "give one of them"),
    ({"calibration": ROWS, "group_size": 64}, ValueError, "does not divide the in_features"),
    ({"calibration": ROWS, "skip_modules": ["dwn_proj"]}, ValueError, "did you mean down_proj"),
    ({"calibration": ROWS, "transform": "order"}, ValueError, "quantizing chooses none, leave it out"),
    ({"calibration": ROWS, "method": "quarot", "skip_modules": ["down_proj"]}, ValueError, "do not skip it")])
def test_bad_input_is_refused_before_weights_are_loaded(saved_model, monkeypatch, given, error, words):
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel._load_pretrained_model", None)
    with pytest.raises(error, match=words):
        load(saved_model, config_of(**given))


def test_a_folder_that_is_quantized_already_refuses_a_method(saved_model, tmp_path):
    load(saved_model, config_of(None)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is quantized with MLSpecConfig but .* a MLSpecConfigWithMethod"):
        load(tmp_path, config_of(calibration=ROWS))


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_weights_is_refused(saved_model, tmp_path, safe, name):
    model = load(saved_model)
    state = {key: tensor for key, tensor in model.state_dict().items() if key != name}
    shutil.copytree(saved_model, tmp_path / "part", ignore=shutil.ignore_patterns("*.safetensors"))
    if safe:
        model.save_pretrained(tmp_path / "part", state_dict=state)
    else:
        torch.save(state, tmp_path / "part" / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"{name}"):
        load(tmp_path / "part", config_of(calibration=ROWS))


def test_one_config_serves_several_models(saved_model):
    config = config_of(calibration=ROWS)
    first, second = load(saved_model, config), load(saved_model, config)
    assert torch.equal(first(IDS).logits, second(IDS).logits)
    assert hf_mlspec.load(saved_model, quantization_config=config).config.quantization_config.calibration is not None
