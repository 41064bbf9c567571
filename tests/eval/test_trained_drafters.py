"""Do the programs that train heads and align drafts write what a chain can draft with, and repeat themselves?"""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch
from models import alone, letters, prompts, tiny, together

import hf_mlspec
from eval import written

pytestmark = pytest.mark.usefixtures("from_the_root")


@pytest.fixture
def folder(tmp_path):
    """A target on disk, and a file of prompts."""
    model = tiny(seed=2, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "target")
    letters().save_pretrained(tmp_path / "target")
    lines = [json.dumps({"prompt": word * 3}) for word in "abcdefghijklmnopqrst"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(monkeypatch, capsys, name: str, *options: object) -> dict:
    """The line of JSON that a program ends with."""
    program = importlib.import_module(f"eval.{name}.__main__")
    monkeypatch.setattr(sys, "argv", ["__main__.py", *map(str, options), "--smoke", "--device", "cpu"])
    program.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_head_is_trained_kept_and_drafts(folder, monkeypatch, capsys):
    options = "--target", folder / "target", "--text", folder / "prompts.jsonl", "--draft-vocab", 40
    kept = folder / "kept.jsonl.gz"
    first = run(monkeypatch, capsys, "train_head", *options, "--out", folder / "head", "--keep", kept)
    options = *options[:2], *options[4:], "--written", kept
    again = run(monkeypatch, capsys, "train_head", *options, "--out", folder / "again")
    assert (first["draft_vocab"], first["steps"], first["texts"]) == (40, 8, 15)
    assert first["loss"] == again["loss"]
    weights = [(folder / name / "model.safetensors").read_bytes() for name in ("head", "again")]
    assert weights[0] == weights[1]
    assert "An EAGLE-3 head for target" in (folder / "head" / "README.md").read_text()
    target, inputs = tiny(seed=2, dtype=torch.bfloat16), prompts([5, 9])
    how = {"max_new_tokens": 20, "eos_token_id": None}
    own = alone(target, inputs, assistant_models=[], **how)
    assert together(target, inputs, [str(folder / "head")], **how) == own
    assert hf_mlspec.last_stats(target).levels[0].drafted > 10


def test_a_head_is_measured_below_a_cast_by_whose_states_it_reads(folder, monkeypatch, capsys):
    options = "--target", folder / "target", "--text", folder / "prompts.jsonl", "--draft-vocab", 40, "--cast", "mxfp4"
    card = run(monkeypatch, capsys, "train_head", *options, "--out", folder / "head", "--steps", 30, "--rate", 1e-2)
    found = card["by_states"]
    assert len(found) == 4
    assert found["states of target, choices of target"] == card["accepted_by_position"]
    assert found["states of target, choices of mxfp4"] != found["states of mxfp4, choices of mxfp4"]
    again = run(monkeypatch, capsys, "train_head", *options, "--head", folder / "head")
    assert list(again) == list(found)
    for name, shares in again.items():  # the folder keeps bfloat16
        assert shares[0] == pytest.approx(found[name][0], abs=0.1)
    with pytest.raises(SystemExit):
        run(monkeypatch, capsys, "train_head", *options[:4], "--head", folder / "head")


def test_training_lowers_the_loss_and_raises_what_is_accepted(folder, monkeypatch, capsys):
    options = "--target", folder / "target", "--text", folder / "prompts.jsonl", "--rate", 1e-2
    few = run(monkeypatch, capsys, "train_head", *options, "--out", folder / "few", "--steps", 2)
    many = run(monkeypatch, capsys, "train_head", *options, "--out", folder / "many", "--steps", 60)
    assert many["loss"] < 0.7 * few["loss"]


def test_a_draft_is_aligned_and_stays_a_model(folder, monkeypatch, capsys):
    draft = tiny(seed=5, dtype=torch.bfloat16)
    draft.save_pretrained(folder / "draft")
    letters().save_pretrained(folder / "draft")
    options = "--draft", folder / "draft", "--target", folder / "target", "--text", folder / "prompts.jsonl"
    few = run(monkeypatch, capsys, "align_draft", *options, "--out", folder / "few", "--steps", 2)
    options = *options, "--out", folder / "aligned", "--rate", 3e-3
    card = run(monkeypatch, capsys, "align_draft", *options, "--steps", 40)
    assert card["loss"] < 0.7 * few["loss"]
    assert 0 <= card["agreement"] <= 1
    target, inputs = tiny(seed=2, dtype=torch.bfloat16), prompts([5, 9])
    how = {"max_new_tokens": 20, "eos_token_id": None}
    found = together(target, inputs, [str(folder / "aligned")], tokenizer=letters(), **how)
    assert found == alone(target, inputs, assistant_models=[], **how)


def test_a_draft_is_aligned_for_a_cast_of_it(folder, monkeypatch, capsys):
    tiny(seed=5, dtype=torch.bfloat16).save_pretrained(folder / "draft")
    letters().save_pretrained(folder / "draft")
    options = "--draft", folder / "draft", "--target", folder / "target", "--text", folder / "prompts.jsonl"
    options = *options, "--round", "mxfp4", "--rate", 3e-3
    few = run(monkeypatch, capsys, "align_draft", *options, "--out", folder / "few", "--steps", 2)
    card = run(monkeypatch, capsys, "align_draft", *options, "--out", folder / "aligned", "--steps", 40)
    assert card["loss"] < 0.7 * few["loss"]
    assert card["round"] == "mxfp4"
    assert all(0 <= card[name] <= 1 for name in ("agreement_rounded_before", "agreement_rounded"))
    target, inputs = tiny(seed=2, dtype=torch.bfloat16), prompts([5, 9])
    how = {"max_new_tokens": 20, "eos_token_id": None}
    found = together(target, inputs, [f"{folder / 'aligned'}@mxfp4"], tokenizer=letters(), **how)
    assert found == alone(target, inputs, assistant_models=[], **how)


@pytest.mark.parametrize("tied", [False, True])
def test_a_rounded_draft_computes_what_its_cast_does_and_learns_through_it(tied):
    """Without rounded activations; an embedding that the head shares is not rounded."""
    program = importlib.import_module("eval.align_draft.__main__")
    draft = tiny(seed=5, dtype=torch.float32, tie_word_embeddings=tied)
    rounded, ids = program.Rounded(draft, "mxfp4"), prompts([9])["input_ids"]
    found = rounded(input_ids=ids).logits
    cast = hf_mlspec.direct_cast(draft, "mxfp4", activation_bits=16)
    wanted = cast(input_ids=ids).logits
    plain = draft(input_ids=ids).logits
    assert (found - wanted).abs().mean() < 0.3 * (plain - wanted).abs().mean()  # the cast rounds inputs to bfloat16
    found.square().sum().backward()
    weights = [layer.mlp.up_proj.weight for layer in draft.model.layers]
    assert all(float(weight.grad.abs().sum()) > 0 for weight in weights)


def test_prompts_with_tokens_of_the_tokenizer_alone_are_left_out():
    found = list(written.write(tiny(dtype=torch.float32), [[5, 6], [64], [], [7]], 3, 2, lambda done: None))
    assert [text.prompt for text in found] == [[7], [5, 6]]
    assert all(len(text.new) == 3 or text.new[-1] == 1 for text in found)


def test_written_texts_that_are_none_are_refused(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"prompt": [1]}\n')
    with pytest.raises(ValueError, match="holds no texts that a target wrote"):
        written.load(file)


def test_beginnings_are_heads_of_functions_and_prompts(tmp_path):
    source = 'def one(a):\n    """Says one."""\n    b = a\n    return b\n\n' + "x = 1  # a line of words\n" * 12
    (tmp_path / "a.py").write_text(source)
    found = written.beginnings([tmp_path], letters(), 10, 0)
    texts = [letters().decode(ids) for ids in found]
    assert len(texts) == 2
    assert any(text.startswith("def one") for text in texts)
