"""Does eval.train_mamba train a model of Mamba-2 layers alone, save it, and does the compiled decoder run it?"""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.usefixtures("from_the_root")


def main(*options: str) -> int:
    return importlib.import_module("eval.train_mamba.__main__").main(list(options))


def test_a_toy_is_trained_saved_and_compiled(tmp_path, capsys):
    out = tmp_path / "toy"
    assert main("--smoke", "--steps", "25", "--device", "cpu", "--out", str(out)) == 0
    report = json.loads((out / "training.json").read_text())
    assert report["steps"] == 25
    assert report["losses"][-1] < report["losses"][0]
    assert 0 < report["held_out"]["train_mamba"]["loss"] < 10
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (type(model).__name__, model.dtype) == ("Mamba2ForCausalLM", torch.bfloat16)
    if has_compiled_decoder():
        assert decoder_of(model, "cpu").num_recurrent == 2
    with pytest.raises(SystemExit):
        main("--smoke", "--out", str(out))
    assert f"--out {out} exists: name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--tokenizer", "t"], ["--smoke", "--minutes", "0"],
                                     ["--smoke", "--rows", "0"]])
def test_a_wrong_command_says_what_is_needed(options, capsys):
    with pytest.raises(SystemExit):
        main(*options)
    assert "--" in capsys.readouterr().err.splitlines()[-1]
