"""Do `mlspec convert` and `mlspec inspect` do and tell what they should, and refuse in one line what cannot work?"""

from __future__ import annotations

import json

import pytest
import torch
from refused_command import refusal
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.cli import main

IDS = torch.arange(3, 17).view(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture(scope="module")
def packed(saved_model, tmp_path_factory):
    """Folders of this package, by format."""
    folder = tmp_path_factory.mktemp("packed")
    for word, settings in (("int4", {"group_size": 32}), ("mxfp4", {})):
        config = MLSpecConfig(format=word, **settings)
        AutoModelForCausalLM.from_pretrained(saved_model, quantization_config=config).save_pretrained(folder / word)
        for file in saved_model.glob("tokenizer*"):
            (folder / word / file.name).write_bytes(file.read_bytes())
    return folder


def run(capsys, *argv: object) -> str:
    """What a command that succeeds prints."""
    assert main(list(map(str, argv))) == 0
    return capsys.readouterr().out


def test_there_and_back(capsys, packed, tmp_path):
    told = json.loads(run(capsys, "convert", packed / "int4", tmp_path / "a", "--to", "gptq", "--json",
                          "--max-shard-size", "60KB"))
    assert told["asked"] == {"source": str(packed / "int4"), "target": str(tmp_path / "a"), "to": "gptq"}
    assert told["layers"] == {"4 bits, groups of 32, symmetric": 14}
    assert (told["source"], told["to"], told["kept"]) == ("mlspec", "gptq", ["lm_head"])
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    lines = run(capsys, "convert", tmp_path / "a", tmp_path / "b").splitlines()
    assert lines[0] == f"{tmp_path / 'a'}: gptq to mlspec"
    assert "  14 layers: int4, group_size 32, symmetric True" in lines
    assert lines[-1] == f"written to {tmp_path / 'b'}"
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (packed / "int4", tmp_path / "b")]
    assert torch.equal(models[0](IDS).logits, models[1](IDS).logits)
    assert torch.equal(models[0](IDS).logits, hf_mlspec.load(tmp_path / "a")(IDS).logits)


def test_a_folder_is_overwritten_only_when_told(capsys, packed, tmp_path):
    run(capsys, "convert", packed / "mxfp4", tmp_path / "a", "--to", "compressed-tensors")
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    words = ("convert", packed / "int4", tmp_path / "a", "--to", "gptq")
    assert "is not empty; name another one, or overwrite it (--overwrite)" in refusal(capsys, *words)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    run(capsys, *words, "--overwrite")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["quant_method"] == "gptq"


@pytest.mark.parametrize(("argv", "message"), [
    (["MXFP4", "OUT", "--to", "gptq"], "mlspec convert: model.layers.0.self_attn.q_proj is MXFP4: GPTQ has integers"),
    (["INT4", "OUT"], "is in the format of this package already; copy the folder"),
    (["WIDE", "OUT"], "is not quantized; mlspec quantize packs it"),
    (["INT4", "OUT", "--to", "awq"], "checkpoints are not written as 'awq', but as mlspec, compressed-tensors, gptq"),
    (["INT4", "OUT", "--to", "gptq", "--max-shard-size", "5G"], "5G is no size"),
    (["INT4", "INT4", "--to", "gptq", "--overwrite"], "is the folder of the model itself"),
    (["INT4", "INT4/config.json", "--to", "gptq"], "is a file; name a folder"),
    (["./nowhere", "OUT"], "model folder './nowhere' does not exist"), (["INT4"], "DST")])
def test_a_bad_call_is_refused_and_writes_nothing(capsys, saved_model, packed, tmp_path, argv, message):
    places = {"INT4": packed / "int4", "MXFP4": packed / "mxfp4", "WIDE": saved_model, "OUT": tmp_path / "out"}
    for place, folder in places.items():
        argv = [word.replace(place, str(folder)) for word in argv]
    assert message in refusal(capsys, "convert", *argv)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "info"])
def test_what_a_checkpoint_is(capsys, packed, tmp_path, command):
    run(capsys, "convert", packed / "int4", tmp_path / "a", "--to", "gptq")
    lines = run(capsys, command, tmp_path / "a").splitlines()
    assert lines[0] == f"{tmp_path / 'a'}: LlamaForCausalLM, GPTQ"
    assert lines[1] == ("  GPTQ, 4 bits, groups of 32, symmetric: layers 14, bits per weight 4.921, "
                        "here int4 (group_size 32, symmetric True)")
    assert "  dense linear layers: lm_head" in lines
    assert "  levels without another model: w4a8, w4a4, early_exit:1, prompt_lookup, ngram, lookups" in lines


@pytest.mark.parametrize(("folder", "method", "stored"), [
    ("int4", "mlspec", "int4 (group_size 32, symmetric True)"), ("mxfp4", "mlspec", "mxfp4 (rule ocp_floor)"),
    ("", "", "dense, float32")])
def test_as_json(capsys, saved_model, packed, folder, method, stored):
    told = json.loads(run(capsys, "inspect", packed / folder if folder else saved_model, "--json"))
    assert (told["method"], told["layers"][0]["stored_as"]) == (method, stored)
    assert told["model_class"] == "LlamaForCausalLM"
    assert told["engines"].keys() >= {"cpu"}


def test_nothing_to_inspect_is_refused(capsys, packed, tmp_path):
    assert "'./nowhere' does not exist" in refusal(capsys, "inspect", "./nowhere")
    assert "the folder holds no config.json" in refusal(capsys, "info", tmp_path)
    (tmp_path / "config.json").write_bytes((packed / "int4" / "config.json").read_bytes())
    assert "holds no safetensors file" in refusal(capsys, "inspect", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((packed / "int4" / "model.safetensors").read_bytes()[:900])
    assert "model.safetensors is damaged" in refusal(capsys, "inspect", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "mlspec inspect: " in refusal(capsys, "inspect", tmp_path)


def test_a_trained_head_is_no_model_to_inspect(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"speculators_model_type": "eagle3"}', encoding="utf-8")
    assert "holds a trained head, which is no model: give it as a level" in refusal(capsys, "inspect", tmp_path)
