"""Is one file all that a weight format takes? toy_format.py is one that nothing else in the project knows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import toy_format
from models import prompts, tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.cli import main
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu import weights as cpu_weights
from hf_mlspec.formats import FORMATS
from hf_mlspec.integration.levels.words import parse_level
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.packed_formats import PACKINGS
from hf_mlspec.ops.compiled_decoder import F32, Weight, has_compiled_decoder
from hf_mlspec.precision import Precision

ROOT = Path(__file__).resolve().parents[2]
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.fixture(autouse=True)
def toy():
    toy_format.register_toy()
    yield
    toy_format.unregister_toy()


@pytest.fixture
def folder(tmp_path):
    tiny(seed=2, dtype=torch.float32).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def quantized(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MLSpecConfig("toy6"), **options).eval()


def test_it_is_one_file_of_under_120_lines():
    assert len(Path(toy_format.__file__).read_text().splitlines()) < 120
    named = [path for path in (ROOT / "hf_mlspec").rglob("*.py") if "toy6" in path.read_text(encoding="utf-8")]
    assert named == []


def test_quantized_while_loading_saved_and_loaded_bit_for_bit(folder, tmp_path):
    model, dense = quantized(folder), AutoModelForCausalLM.from_pretrained(folder)
    layer, wide = model.model.layers[1].mlp.up_proj, dense.model.layers[1].mlp.up_proj.weight
    assert type(layer) is toy_format.Toy6Linear
    assert torch.equal(layer.dequantized(), toy_format.Toy6Weight.from_dense(wide.detach()).dequantize())
    step = layer.weight_scale.float().repeat_interleave(32, 1)
    assert ((layer.dequantized() - wide).abs() <= step * 0.5 * 1.01).all()
    model.save_pretrained(tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["quant_method"]) == ("toy6", "mlspec")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight_codes"].dtype == torch.uint8
    assert "model.layers.0.mlp.up_proj.weight" not in stored
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    inputs = prompts([8])
    assert torch.equal(again.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))


def test_damage_is_named(folder, tmp_path):
    model = quantized(folder)
    model.model.layers[1].self_attn.o_proj.weight_scale.data[3, 0] = float("nan")
    model.save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj: weight_scale holds 1 .* row 3, group 0"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_groups_that_do_not_divide_are_named_before_a_tensor_is_read(tmp_path):
    tiny(dtype=torch.float32, intermediate_size=72).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"toy6, in blocks of 32, does not divide .*down_proj with in_features 72"):
        quantized(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts_as_a_level_below_a_dense_target(dtype):
    target, inputs = tiny(seed=2, dtype=dtype), prompts([8, 5])
    alone = target.generate(**inputs, **GREEDY, assistant_models=[])
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_models=["toy6"]), alone)
    (level,) = hf_mlspec.last_stats(target).levels
    assert level.accepted > level.drafted / 2
    assert parse_level("toy6").cast == "toy6"


def test_holds_experts():
    module = tiny("gpt_oss", dtype=torch.float32).model.layers[0].mlp.experts
    packed = PackedExperts.from_module(module, "toy6")
    step = packed.gate_up_proj_scale.float().repeat_interleave(32, -1)
    assert ((packed.dequantized("gate_up_proj") - module.gate_up_proj.transpose(1, 2)).abs() <= step * 0.51).all()
    x, chosen = torch.randn(5, 32), torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [0, 1]])
    weights = torch.rand(5, 2)
    torch.testing.assert_close(packed(x, chosen, weights), packed.dequantized_module()(x, chosen, weights))


@pytest.mark.parametrize("decoder", ["cpu", "cuda"])
def test_compiled_decoders_say_that_it_runs_module_by_module(folder, caplog, decoder):
    if decoder == "cpu" and not has_compiled_decoder():
        pytest.skip("no compiled library")
    assert decoder_of(quantized(folder), decoder) is None
    (said,) = [record.getMessage() for record in caplog.records if "module by module" in record.getMessage()]
    which = {"cpu": "its q linears are toy6, which the CPU", "cuda": "its q, k, v linears are toy6, which the CUDA"}
    assert f"LlamaForCausalLM runs module by module: {which[decoder]} decoder does not read" in said


@pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled library")
def test_with_a_slot_a_compiled_decoder_runs_it(folder, monkeypatch, caplog):
    def slot(linear, parts, shape):
        assert type(linear) is toy_format.Toy6Linear
        assert parts.codes.dtype == torch.uint8
        return Weight(F32, linear.dequantized(), **shape)

    inputs = prompts([8, 5])
    model = quantized(folder)
    alone = model.generate(**inputs, **GREEDY)
    monkeypatch.setitem(cpu_weights.SLOTS, "toy6", slot)
    assert decoder_of(model, "cpu") is not None
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_models=[]), alone)
    assert "module by module" not in caplog.text


@pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled library")
def test_a_class_that_no_format_registered_is_not_decoded(folder, monkeypatch, caplog):
    model = quantized(folder)
    monkeypatch.setitem(cpu_weights.SLOTS, "toy6", lambda *args: pytest.fail("a slot was asked for another class"))
    model.model.layers[1].mlp.up_proj.__class__ = type("Mine", (toy_format.Toy6Linear,), {"__module__": "mine"})
    assert decoder_of(model, "cpu") is None
    assert "runs module by module: it has a mine.Mine (its module model.layers.1.mlp.up_proj)" in caplog.text


def test_words_and_choices_are_those_of_the_record(folder, tmp_path, capsys):
    assert str(Precision.parse("toy6")) == "toy6"
    model = quantized(folder)
    assert hf_mlspec.precision_switch(model).words == "toy6"
    with pytest.raises(ValueError, match=r"choose 16 \(bfloat16\) for toy6 weights"):
        MLSpecConfig("toy6", activation_bits=8)
    with pytest.raises(ValueError, match="format 'toy6' has no group_size"):
        MLSpecConfig("toy6", group_size=64)
    with pytest.raises(ValueError, match="those of this LlamaForCausalLM are toy6"):
        model.generate(**prompts([8]), **GREEDY, assistant_models=["w4a8"])
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--format", "toy6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_weight"] > 8
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"]["toy6"] == "toy6"


def test_without_its_record_it_is_unknown_as_before():
    toy_format.unregister_toy()
    try:
        assert list(FORMATS) == ["mxfp4", "int4", "nested", "planes", "lut", "int4_int8", "zipper"]
        assert PACKINGS.keys() == FORMATS.keys()
        with pytest.raises(ValueError, match="format 'toy6' is unknown to this version"):
            MLSpecConfig("toy6")
        with pytest.raises(ValueError, match="neither an existing folder nor a known word"):
            parse_level("toy6")
        with pytest.raises(ValueError, match="unknown precision"):
            Precision.parse("toy6")
    finally:
        toy_format.register_toy()


def test_a_word_is_registered_once():
    with pytest.raises(ValueError, match="the word 'toy6' is taken"):
        toy_format.register_toy()


def test_the_page_shows_this_file():
    """Every line of code on the page is one of the file."""
    page = (ROOT / "docs" / "guide" / "add_a_format.md").read_text(encoding="utf-8")
    lines = Path(toy_format.__file__).read_text(encoding="utf-8").splitlines()
    shown = [line for block in re.findall(r"```python\n(.*?)```", page, re.S) for line in block.splitlines()]
    assert len(shown) > 40
    assert [line for line in shown if line.strip() and line not in lines] == []
