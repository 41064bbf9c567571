"""Does eval.train_mixture train what gpt-oss's modules compute, save it, and tell how tokens are routed?"""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("from_the_root")
PROGRAM = "eval.train_mixture"


def part(name: str):
    return importlib.import_module(f"{PROGRAM}.{name}")


def test_a_toy_is_trained_saved_and_measured(tmp_path, capsys):
    out = tmp_path / "toy"
    assert part("__main__").main(["--smoke", "--steps", "3", "--device", "cpu", "--out", str(out)]) == 0
    assert "routing of train_mixture" in capsys.readouterr().out
    report = json.loads((out / "training.json").read_text())
    assert report["mixture"]["steps"] == report["dense"]["steps"] == 3
    assert report["dense"]["parameters"] < report["mixture"]["parameters"]
    for name in ("mixture", "dense"):
        assert 0 < report[name]["held_out"]["train_mixture"]["loss"] < 10
    for layer in report["routing"]["layers"]:
        assert 0 <= layer["least"] <= 1 / 8 <= layer["most"] <= 1 / 2
        assert 0 < layer["token_bits"] <= 3
    model = AutoModelForCausalLM.from_pretrained(out)
    assert (type(model).__name__, model.dtype) == ("GptOssForCausalLM", torch.bfloat16)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert model.config.rope_parameters["truncate"] is False
    with pytest.raises(SystemExit):
        part("__main__").main(["--smoke", "--out", str(out)])
    assert f"--out {out} exists: name a new folder" in capsys.readouterr().err


def test_a_mixture_is_saved_before_the_dense_model_takes_a_step(tmp_path, monkeypatch, capsys):
    program, out = part("__main__"), tmp_path / "toy"
    command = ["--smoke", "--steps", "2", "--device", "cpu", "--out", str(out)]
    steps, seen = program.train, []

    def cut(model, *rest):
        seen.append(model.config.num_local_experts)
        if len(seen) == 2:
            raise ValueError("the machine is gone")
        return steps(model, *rest)

    monkeypatch.setattr(program, "train", cut)
    assert program.main(command) == 2
    assert seen == [8, 1]
    report = json.loads((out / "training.json").read_text())
    assert ("mixture" in report, "dense" in report, len(report["routing"]["layers"])) == (True, False, 2)
    assert AutoModelForCausalLM.from_pretrained(out).config.num_local_experts == 8
    alone = tmp_path / "alone"
    assert program.main([*command[:-1], str(alone), "--mixture-only"]) == 0
    assert seen == [8, 1, 8]
    assert "dense" not in json.loads((alone / "training.json").read_text())
    assert "dense" not in capsys.readouterr().out


def test_all_experts_are_what_the_module_computes():
    mixture = part("mixture")
    model = mixture.new_model(mixture.config_of(mixture.SMOKE, 96, 0, 1), "cpu").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        ids = torch.arange(40)[None]
        fast = model(ids).logits
        for module in model.modules():
            vars(module).pop("forward", None)
        model.set_experts_implementation("eager")
        torch.testing.assert_close(fast, model(ids).logits)


def test_spread_of_known_choices():
    spread = part("mixture")._spread
    even = spread(torch.eye(4).repeat(5, 1) * 1e4, 1)
    assert (even["chosen_bits"], even["least"], even["most"]) == (2.0, 0.25, 0.25)
    assert even["token_bits"] == pytest.approx(0, abs=1e-6)
    one = spread(torch.tensor([[3.0, 0.0, 0.0, 0.0]]).repeat(6, 1), 1)
    assert (one["chosen_bits"], one["least"], one["most"]) == (0.0, 0.0, 1.0)
    assert spread(torch.zeros(3, 4), 2)["token_bits"] == pytest.approx(2)


@pytest.mark.parametrize("options", [[], ["--tokenizer", "t"], ["--smoke", "--minutes", "0"],
                                     ["--smoke", "--rows", "0"]])
def test_a_wrong_command_says_what_is_needed(options, capsys):
    with pytest.raises(SystemExit):
        part("__main__").main(options)
    assert "--" in capsys.readouterr().err.splitlines()[-1]
