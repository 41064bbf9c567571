"""Is a model of zipper weights quantized while it loads, saved and loaded bit for bit, and does its low part draft?"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from models import prompts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.cli import main
from hf_mlspec.demo_pair import demo_prompts
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.integration.levels.lower_precision import require_engine
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.precision import Precision

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    tiny(seed=2, dtype=torch.float32).save_pretrained(path)
    return path


def quantized(folder, **options):
    config = MLSpecConfig("zipper", **options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config).eval()


@pytest.mark.parametrize("options", [{"mode": mode} for mode in MODES] + [{"bits": 8, "low_bits": 5}])
def test_quantized_while_loading_saved_and_loaded_bit_for_bit(folder, tmp_path, options):
    model, wide = quantized(folder, **options), AutoModelForCausalLM.from_pretrained(folder)
    layer, dense = model.model.layers[1].mlp.up_proj, wide.model.layers[1].mlp.up_proj.weight.detach()
    assert type(layer) is ZipperLinear
    expected = ZipperWeight.from_dense(dense, **options)
    assert torch.equal(layer.dequantized(), expected.dequantize())
    inputs = prompts([8, 5])
    alone = model.generate(**inputs, **GREEDY)
    assert layer.is_prepacked
    assert torch.equal(layer.dequantized(), expected.dequantize())  # back from tiles
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert {"format": "zipper", "bits": 6, "low_bits": 4, "mode": "exact", "high_part": "device"} | options == {
        name: config[name] for name in ("format", "bits", "low_bits", "mode", "high_part")
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert again.model.layers[1].mlp.up_proj.how == expected.how
    assert torch.equal(again.generate(**inputs, **GREEDY), alone)


def test_a_layer_multiplies_both_parts_or_the_low_one(folder):
    model = quantized(folder, mode="clamp")
    layer, switch = model.model.layers[0].mlp.down_proj, hf_mlspec.precision_switch(model)
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    weight = layer.packed_weight()
    torch.testing.assert_close(layer(x), x @ weight.dequantize().T)
    with switch.at("zipper-low"):
        torch.testing.assert_close(layer(x), x @ weight.dequantize(low_only=True).T)
        assert switch.precision == Precision.parse("zipper-low")
    layer.materialize(torch.float32)
    with switch.at("zipper-low"):
        torch.testing.assert_close(layer(x), x @ weight.dequantize(low_only=True).T)
    assert (weight.dequantize() - weight.dequantize(low_only=True)).any()


def test_activation_bits_are_a_setting_and_an_argument(folder, tmp_path, caplog):
    model = quantized(folder, mode="clamp", activation_bits=8)
    switch, ids = hf_mlspec.precision_switch(model), prompts([8])["input_ids"]
    assert str(switch.precision) == "zippera8"
    eight = model(ids).logits
    with switch.at("zipper"):
        wide = model(ids).logits
    with switch.at("zippera4"):
        four = model(ids).logits
    assert 0 < (eight - wide).square().mean() < (four - wide).square().mean()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert str(hf_mlspec.precision_switch(again).precision) == "zippera8"
    assert torch.equal(again(ids).logits, eight)
    for precision in ("zippera8", "zipper"):
        with switch.at(precision):
            assert decoder_of(model, "cpu") is not None
    assert decoder_of(model, "cuda") is None
    assert "zipper weights by 8-bit activations, which the CUDA decoder does where the low part has 4" in caplog.text


def test_activation_bits_that_there_are_not():
    with pytest.raises(ValueError, match="activation_bits is 5, zipper weights are multiplied at 16 or 8 or 4 bits"):
        MLSpecConfig("zipper", activation_bits=5)


@pytest.mark.parametrize("mode", MODES)
def test_chains_over_the_demo_target_write_what_it_writes_alone(mode):
    path = hf_mlspec.demo_pair()[0]
    model = quantized(path, mode=mode)
    tokenizer = AutoTokenizer.from_pretrained(path)
    differing = drafted = accepted = 0
    for prompt in demo_prompts():
        inputs = tokenizer(prompt["text"], return_tensors="pt")
        alone = model.generate(**inputs, **GREEDY, assistant_models=[])
        chain = model.generate(**inputs, **GREEDY, assistant_models=["zipper-low"])
        differing += not torch.equal(chain, alone)
        (level,) = hf_mlspec.last_stats(model).levels
        drafted, accepted = drafted + level.drafted, accepted + level.accepted
    assert differing == 0
    assert drafted > 0
    assert accepted > drafted * (0.6 if mode == "clamp" else 0.02)


def test_levels_below_the_low_part(folder):
    model, inputs = quantized(folder, mode="clamp"), prompts([8, 5])
    alone = model.generate(**inputs, **GREEDY, assistant_models=[])
    for levels in (["zipper-low", "prompt_lookup"], ["zipper-low", "early_exit:1"]):
        assert torch.equal(model.generate(**inputs, **GREEDY, assistant_models=levels), alone), levels


@pytest.mark.parametrize("word", ["zipper", "w4a8", "planes4"])
def test_other_words_name_the_one_there_is(folder, word):
    with pytest.raises(ValueError, match=r"zipper-low|each level must have fewer|for zipper weights"):
        quantized(folder).generate(**prompts([8]), **GREEDY, assistant_models=[word])


@pytest.mark.parametrize("word", ["zipper-lowa8", "zippera4"])
def test_activations_that_the_decoder_of_gpus_has_not_are_refused_by_name(folder, word):
    model, bits = quantized(folder, mode="clamp"), Precision.parse(word).bits
    with pytest.raises(ValueError, match=f"level .{word}.: the decoder of GPUs multiplies these zipper"):
        require_engine(model, word, bits, SimpleNamespace(name="cuda"))
    require_engine(quantized(folder, mode="paper"), word, bits, SimpleNamespace(name="cuda"))
    for name in ("cpu", "modules"):
        require_engine(model, word, bits, SimpleNamespace(name=name))


def test_a_target_with_integers_drafts_with_those_of_its_low_part(folder):
    model, inputs = quantized(folder, mode="clamp", activation_bits=8), prompts([8, 5])
    alone = model.generate(**inputs, **GREEDY, assistant_models=[])
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_models=["zipper-lowa8"]), alone)


def test_a_dense_target_has_no_low_part(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=r"the target's own zipper weights .*MLSpecConfig\(format='zipper'"):
        model.generate(**prompts([8]), **GREEDY, assistant_models=["zipper-low"])


def test_widths_that_do_not_fit_are_named_before_a_tensor_is_read(tmp_path):
    tiny(dtype=torch.float32, intermediate_size=72).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"zipper, in blocks of 32, does not divide .*down_proj with in_features 72"):
        quantized(tmp_path)
    with pytest.raises(ValueError, match=r"low_bits is 4 of 5 bits"):
        quantized(tmp_path, bits=5, skip_modules=["mlp.down_proj"])


def test_commands(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["quantize", str(folder), str(out), "--format", "zipper", "--mode", "clamp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["asked"]["mode"] == "clamp"
    assert 6 < found["bits_per_packed_weight"] < 7.1  # rows of 32 and 64 inputs: a scale costs half a bit
    assert main(["inspect", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "zipper-low" in told["levels"]
    assert told["layers"][0]["stored_as"].startswith("zipper (bits 6, low_bits 4, mode clamp")
    zeros, model = told["high_zeros"], AutoModelForCausalLM.from_pretrained(out)
    assert len(zeros) == 14
    for name, share in zeros.items():
        assert share == model.get_submodule(name).packed_weight().high_zeros(), name
    assert main(["inspect", str(out)]) == 0
    assert "weights whose high part is 0" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"]["zipper"] == (
        "zipper, zippera8, zippera4, zipper-low, zipper-lowa8, zipper-lowa4"
    )
    assert main(["quantize", str(folder), str(tmp_path / "b"), "--format", "zipper", "--low-bits", "7"]) == 2
    assert "low_bits is 7, zipper has 2 or 3 or 4 or 5 or 6" in capsys.readouterr().err
