"""Does eval.train_mamba train a model of Mamba-2 layers alone, save it, and does the compiled decoder run it?"""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM

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


def small(groups: int, **settings) -> Mamba2ForCausalLM:
    torch.manual_seed(groups)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8}
    return Mamba2ForCausalLM(Mamba2Config(**sizes, n_groups=groups, vocab_size=64, chunk_size=16, **settings))


@pytest.mark.parametrize("groups", [1, 2])
def test_the_scan_that_trains_gives_what_transformers_gives(groups):
    scan = importlib.import_module("eval.train_mamba.scan")
    model, ids = small(groups), torch.randint(64, (3, 48), generator=torch.Generator().manual_seed(0))

    def found() -> list[torch.Tensor]:
        logits = model(input_ids=ids, use_cache=False).logits
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    own = found()
    with scan.few_products(model):
        ours = found()
        assert any((one - other).ne(0).any() for one, other in zip(ours, own, strict=True))  # by other sums
    for one, other in zip(ours, own, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm()
    assert all(torch.equal(one, other) for one, other in zip(found(), own, strict=True))  # behind it as before


def test_the_scan_that_trains_refuses_what_it_does_not_compute():
    scan = importlib.import_module("eval.train_mamba.scan")
    with scan.few_products(model := small(1)):
        with pytest.raises(ValueError, match="20 tokens, which chunks of 16 do not fill"):
            model(input_ids=torch.zeros(1, 20, dtype=torch.int64), use_cache=False)
        with pytest.raises(ValueError, match="without a cache, a mask"):
            model(input_ids=torch.zeros(1, 16, dtype=torch.int64), use_cache=True)
    with scan.few_products(bounded := small(1, time_step_limit=(0.0, 0.1))), pytest.raises(ValueError, match="bounds"):
        bounded(input_ids=torch.zeros(1, 16, dtype=torch.int64), use_cache=False)
