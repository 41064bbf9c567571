"""Does eval.extend_context train a model on at longer texts, and say how it reads them?"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("from_the_root")
PROGRAM = "eval.extend_context"


def program():
    return importlib.import_module(f"{PROGRAM}.__main__")


def test_a_toy_learns_has_its_positions_and_is_repeated_bit_for_bit(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        assert program().main(["--smoke", "--steps", "6", "--device", "cpu", "--out", str(out)]) == 0
    assert "extend_context, after, 2 windows" in capsys.readouterr().out
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert not (tmp_path / "first.part").exists()
    report = json.loads((first / "training.json").read_text())
    before, after = (report[when]["extend_context"] for when in ("before", "after"))
    assert [line["to"] for line in before] == [16, 32, 64, 96, 128, 160, 192, 224, 256]
    assert np.mean([line["loss"] for line in after]) < np.mean([line["loss"] for line in before]) - 0.2
    model = AutoModelForCausalLM.from_pretrained(first)
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == 256
    assert model.config.rope_parameters["rope_theta"] == 100_000.0
    # The rotary embedding that was trained with is the one that a loaded model has.
    assert torch.allclose(model.model.rotary_emb.inv_freq[-1], torch.tensor(100_000.0 ** (-7 / 8)))


def test_prepared_tokens_are_the_texts_tokens(tmp_path, capsys):
    tokens, text = tmp_path / "tokens.npz", tmp_path / "text.py"
    text.write_text("def mean(values):\n    return sum(values) / len(values)\n" * 40)
    assert program().main(["--smoke", "--prepare", str(tokens), "--text", str(text), "--held-out", str(text)]) == 0
    room = importlib.import_module("eval.training.tokens")
    with np.load(tokens) as arrays:
        vocabulary = str(arrays["vocabulary"])
    texts = room.unpack(tokens, vocabulary)
    assert texts.trained.dtype == np.uint16
    assert (texts.trained == texts.held_out["text.py"]).all()
    assert len(texts.joined(texts).trained) == 2 * len(texts.trained)
    with pytest.raises(ValueError, match="another vocabulary: prepare them with this model"):
        room.unpack(tokens, "other")


def test_an_epoch_reads_every_piece_once():
    batches = importlib.import_module("eval.training.tokens").batches
    stream = torch.arange(103, dtype=torch.int32)
    source, again = batches(stream, 10, 3, seed=1), batches(stream, 10, 3, seed=1)
    first = torch.cat([next(source) for _ in range(3)])  # 9 pieces of 10 or 11, as the offset falls
    assert (first[:, 1:] == first[:, :-1] + 1).all()
    assert len(set(first[:, 0].tolist())) == 9
    assert (first[:, 0] % 10 == first[0, 0] % 10).all()
    assert torch.equal(first, torch.cat([next(again) for _ in range(3)]))


def test_losses_by_position_are_those_of_the_model():
    training = importlib.import_module("eval.training.steps")

    class Counts(torch.nn.Module):
        """Says token t + 1 behind token t, surely, and nothing behind 5."""

        device = torch.device("cpu")

        def forward(self, input_ids, use_cache):
            logits = 50.0 * torch.nn.functional.one_hot(input_ids + 1, 32).float()
            return type("Output", (), {"logits": torch.where((input_ids == 5)[..., None], 0.0, logits)})

    lines = training.by_position(Counts(), np.arange(17, dtype=np.uint16), [4, 8], count=5)
    assert [line["windows"] for line in lines] == [2, 2]
    assert lines[0]["loss"] == pytest.approx(0, abs=1e-6)
    assert lines[1]["loss"] == pytest.approx(np.log(32) / 8)  # one of the eight tokens of these positions
    assert lines[1]["right"] == 7 / 8
    with pytest.raises(ValueError, match="has 8 tokens, a window needs 9"):
        training.by_position(Counts(), np.arange(8), [4, 8], count=1)


@pytest.mark.parametrize("options", [[], ["--model", "m"], ["--model", "m", "--text", "t"],
                                     ["--smoke", "--minutes", "0"], ["--smoke", "--rows", "0"]])
def test_a_wrong_command_says_what_is_needed(options, capsys):
    with pytest.raises(SystemExit):
        program().main(options)
    assert "--" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_that_exists_and_texts_that_are_too_short(tmp_path, capsys):
    with pytest.raises(SystemExit):
        program().main(["--model", "m", "--text", "t", "--out", str(tmp_path)])
    assert f"--out {tmp_path} exists: name a new folder" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("Too short.\n")
    assert program().main(["--smoke", "--text", str(short)]) == 2
    assert "a window 256: give more text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program().main(["--smoke", "--text", str(tmp_path / "empty"), "--device", "cpu"])
    assert "empty does not exist" in capsys.readouterr().err


def test_training_itself_does_not_need_the_package():
    names = [f"{PROGRAM}.__main__", f"{PROGRAM}.training", "eval.training.steps", "eval.training.tokens"]
    code = f"import sys; [__import__(n) for n in {names}]; sys.exit('hf_mlspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
