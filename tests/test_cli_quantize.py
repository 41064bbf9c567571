"""Does `mlspec quantize` write a folder that loads, say what it weighs, and refuse in one line what cannot work?"""

from __future__ import annotations

import io
import json
import shutil
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_mlspec import MLSpecConfig
from hf_mlspec.cli import main
from tests.test_cli_refusals import refusal

IDS = torch.arange(3, 17).view(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def run(capsys, *argv: object) -> str:
    """What a command that succeeds prints."""
    assert main(["quantize", *map(str, argv)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("options", "settings"), [
    (["--format", "int4", "--group-size", "32"], {"format": "int4", "group_size": 32}),
    (["--format", "int4", "--group-size", "32", "--asymmetric", "--activation-bits", "8", "--skip", "down_proj",
      "--skip", "o_proj"],
     {"format": "int4", "group_size": 32, "symmetric": False, "activation_bits": 8,
      "skip_modules": ["down_proj", "o_proj"]}),
    (["--format", "mxfp4", "--rule", "ceil", "--kv-cache", "int8"],
     {"format": "mxfp4", "rule": "ceil", "kv_cache": "int8"})])
def test_a_folder_is_what_from_pretrained_makes(capsys, saved_model, tmp_path, options, settings):
    out = tmp_path / "out"
    told = json.loads(run(capsys, saved_model, out, "--json", "--max-shard-size", "100KB", *options))
    model = AutoModelForCausalLM.from_pretrained(out)
    wanted = AutoModelForCausalLM.from_pretrained(saved_model, quantization_config=MLSpecConfig(**settings))
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    stored = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {name: stored[name] for name in settings} == settings
    assert AutoTokenizer.from_pretrained(out)("area")["input_ids"] == AutoTokenizer.from_pretrained(saved_model)(
        "area")["input_ids"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {*told["copied"]}
    parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(saved_model).parameters())
    assert told["all_weights"] == parameters
    assert told["wide_bytes"] == parameters * 4
    assert told["packed_bytes"] == sum(parameter.nbytes for parameter in wanted.parameters())
    assert told["bits_per_weight"] == pytest.approx(told["packed_bytes"] * 8 / parameters)
    assert told["packed_modules"] == 14 - 2 * len(settings.get("skip_modules", []))


def test_what_is_printed(capsys, saved_model, tmp_path):
    lines = run(capsys, saved_model, tmp_path / "out", "--format", "int4", "--group-size", 32).splitlines()
    assert lines[0] == f"{saved_model} in int4"
    assert "  bits per packed weight: 4.5" in lines
    assert "  kept wide: lm_head" in lines
    assert lines[-1] == f"written to {tmp_path / 'out'}"


def test_the_default_format_is_that_of_the_config(capsys, saved_model, tmp_path):
    default = MLSpecConfig().format
    told = json.loads(run(capsys, saved_model, tmp_path / "out", "--json"))
    assert told["format"] == told["asked"]["format"] == default
    with pytest.raises(SystemExit):
        main(["quantize", "--help"])
    assert f"(default: that of --method, else {default})" in " ".join(capsys.readouterr().out.split())


def test_help_that_names_a_format_lists_the_options_of_all(capsys):
    with pytest.raises(SystemExit) as left:
        main(["quantize", "--format", "int4", "--help"])
    told = capsys.readouterr().out
    assert left.value.code == 0
    expected = ("--group-size", "--asymmetric", "--rule", "--codebook", "--num-planes", "--overwrite")
    assert [option for option in expected if option not in told] == []


def test_one_bar_moves_on_a_terminal(monkeypatch, saved_model, tmp_path):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    logging.enable_progress_bar()
    assert main(["quantize", str(saved_model), str(tmp_path / "out")]) == 0
    assert "Quantizing to mxfp4" in terminal.getvalue()
    assert "Loading weights" not in terminal.getvalue()
    AutoModelForCausalLM.from_pretrained(saved_model)
    assert "Loading weights" in terminal.getvalue()


def test_a_folder_is_overwritten_only_when_told(capsys, saved_model, tmp_path):
    out = tmp_path / "out"
    run(capsys, saved_model, out, "--format", "mxfp4")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    line = refusal(capsys, "quantize", saved_model, out, "--format", "int4", "--group-size", 32)
    assert line == f"mlspec quantize: folder '{out}' is not empty; name another one, or overwrite it (--overwrite)\n"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    run(capsys, saved_model, out, "--format", "int4", "--group-size", 32, "--overwrite")
    assert AutoModelForCausalLM.from_pretrained(out).config.quantization_config.format == "int4"


@pytest.mark.parametrize(("argv", "message"), [
    (["MODEL", "OUT", "--format", "int4"], "int4 with group_size=128 does not divide the in_features of 14 layers"),
    (["MODEL", "OUT", "--format", "int4", "--group-size", "48"], "group_size is 48, int4 has 32 or 64 or 128"),
    (["MODEL", "OUT", "--format", "int4", "--group-size", "32", "--rule", "ceil"],
     "rule is 'ceil', but format 'int4' has no rule"),
    (["MODEL", "OUT", "--format", "mxfp4", "--group-size", "32"], "format 'mxfp4' has no group_size"),
    (["MODEL", "OUT", "--format", "mxfp4", "--asymmetric"], "format 'mxfp4' has no symmetric"),
    (["MODEL", "OUT", "--format", "mxfp4", "--activation-bits", "4"], "activation_bits is 4"),
    (["MODEL", "OUT", "--format", "nf4"], "mlspec quantize: format 'nf4' is unknown to this version, it has"),
    (["MODEL", "OUT", "--dtype", "int8"], "--dtype is 'int8', it must be one of auto, float32, bfloat16, float16"),
    (["MODEL", "OUT", "--format", "mxfp4", "--skip", "dwn_proj"], "did you mean down_proj"),
    (["MODEL", "OUT", "--kv-cache", "int5"], "kv_cache is 'int5', choose 'int8' or 'int4'"),
    (["MODEL", "OUT", "--format", "mxfp4", "--max-shard-size", "5G"], "5G is no size"),
    (["./nowhere", "OUT", "--format", "mxfp4"], "model folder './nowhere' does not exist"),
    (["MODEL", "MODEL", "--format", "mxfp4", "--overwrite"], "is the folder of the model itself"),
    (["MODEL", "MODEL/config.json", "--format", "mxfp4"], "is a file; name a folder"),
    (["MODEL"], "out")])
def test_a_bad_call_is_refused_and_writes_nothing(capsys, saved_model, tmp_path, argv, message):
    words = [word.replace("MODEL", str(saved_model)).replace("OUT", str(tmp_path / "out")) for word in argv]
    assert message in refusal(capsys, "quantize", *words)
    assert not (tmp_path / "out").exists()


def test_a_model_is_not_quantized_twice(capsys, saved_model, tmp_path):
    run(capsys, saved_model, tmp_path / "out", "--format", "mxfp4")
    assert "is already quantized (mlspec)" in refusal(capsys, "quantize", tmp_path / "out", tmp_path / "again")


def test_damage_is_named(capsys, saved_model, tmp_path):
    shutil.copytree(saved_model, tmp_path / "torn")
    file = tmp_path / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    line = refusal(capsys, "quantize", tmp_path / "torn", tmp_path / "out", "--format", "mxfp4")
    assert f"{file} is damaged" in line
