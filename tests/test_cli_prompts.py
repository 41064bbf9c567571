"""Does mlspec generate continue every prompt of a file or of standard input, and stop where it is told?"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from hf_mlspec.cli import generate, main
from tests.test_cli_refusals import refusal

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["def f(", "Once", "x = "]


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n", encoding="utf-8")
    return str(path)


def asked(folder: object, *more: object) -> list[str]:
    return ["generate", "--model", str(folder), "--level", "mxfp4", "--max-new-tokens", "8", *map(str, more)]


def alone(capsys, folder: object, prompt: str, *more: str) -> dict:
    assert main(asked(folder, "--prompt", prompt, "--json", *more)) == 0
    return json.loads(capsys.readouterr().out)


def test_every_prompt_of_a_file_is_continued_as_alone(capsys, saved_model, prompts):
    expected = [alone(capsys, saved_model, prompt) for prompt in PROMPTS]
    assert main(asked(saved_model, "--prompt-file", prompts, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [entry["prompt"] for entry in told["texts"]] == PROMPTS
    assert [entry["ids"] for entry in told["texts"]] == [entry["ids"] for entry in expected]
    counted = [entry["speculation"]["levels"][0]["drafted"] for entry in expected]
    assert told["speculation"]["levels"][0]["drafted"] == sum(counted)


@pytest.mark.parametrize("more", [[], ["--compare"]])
def test_texts_are_told_apart(capsys, saved_model, prompts, more):
    assert main(asked(saved_model, "--prompt-file", prompts, *more)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("-- ")] == [f"-- prompt {n}: 8 tokens" for n in range(3)]
    assert "levels, all prompts" in lines
    assert not more or lines[-1] == "ids identical: 3 of 3 prompts"


def test_a_file_is_compared_in_json(capsys, saved_model, prompts):
    assert main(asked(saved_model, "--prompt-file", prompts, "--compare", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["identical"], [len(entry["ids"]) for entry in told["texts"]]) == (3, [8, 8, 8])


def test_a_text_ends_behind_a_stop(capsys, saved_model):
    whole = alone(capsys, saved_model, "def f(")
    stop = next(letter for letter in whole["text"] if letter.isascii() and letter.isprintable())
    cut = alone(capsys, saved_model, "def f(", "--stop", "never seen", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop) + 1]
    assert cut["ids"] == whole["ids"][: len(cut["ids"])]
    assert len(cut["ids"]) < 8


def test_standard_input_is_read(capsys, saved_model, prompts):
    own = os.dup(0)
    try:
        with open(prompts) as redirected:
            os.dup2(redirected.fileno(), 0)
        assert main(asked(saved_model, "--prompt-file", "-", "--json")) == 0
    finally:
        os.dup2(own, 0)
        os.close(own)
    assert [entry["prompt"] for entry in json.loads(capsys.readouterr().out)["texts"]] == PROMPTS


def test_a_closed_standard_input_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    line = refusal(capsys, *asked("anywhere", "--prompt-file", "-"))
    assert line == "mlspec generate: --prompt-file - reads standard input, which is closed; name a file\n"


@pytest.mark.parametrize(("words", "message"), [
    ([], "one of the arguments --prompt --prompt-file/--prompts is required"),
    (["--prompt", "x", "--prompt-file", "FILE"], "--prompt-file/--prompts: not allowed with argument --prompt"),
    (["--prompt-file", "EMPTY"], "holds no prompts"), (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    (["--prompt-file", "FOLDER"], "holds no prompts"), (["--prompt-file", "BINARY"], "is not UTF-8 text"),
    (["--prompt", "x", "--stop", ""], "--stop: the text is empty"),
    (["--prompt", "x", "--stop", "y", "--compare"], "drop --stop"),
    (["--prompt", "x", "--level", "tests"], "level 'tests' cannot be loaded as a causal language model: the folder"),
    (["--prompt", "x", "--dtype", "int8"], "--dtype is 'int8', it must be one of float32, bfloat16, float16")])
def test_a_bad_call_is_refused_before_a_model_is_loaded(capsys, monkeypatch, tmp_path, prompts, words, message):
    monkeypatch.setattr(generate, "load_target", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.chdir(ROOT)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "folder" / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "deeper" / "one.json").write_text('{"prompt": "x"}')
    places = {"FILE": prompts, "FOLDER": str(tmp_path / "folder"),
              "EMPTY": str(tmp_path / "empty.txt"), "BINARY": str(tmp_path / "binary")}
    assert message in refusal(capsys, *asked("anywhere", *[places.get(word, word) for word in words]))


def test_a_prompt_that_is_too_long_is_named_before_the_first_is_continued(capsys, saved_model, tmp_path):
    (tmp_path / "long.txt").write_text("short\n" + 600 * "x" + "\n")
    assert "prompt 1 of 2" in refusal(capsys, *asked(saved_model, "--prompt-file", tmp_path / "long.txt"))


def test_what_is_wrong_with_a_level_is_said_once(capsys, saved_model, tmp_path):
    spoilt = shutil.copytree(saved_model, tmp_path / "spoilt")
    (spoilt / "model.safetensors").write_bytes(b"none")
    assert main(asked(saved_model, "--prompt", "x", "--level", spoilt, "--json")) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"mlspec generate: level '{spoilt}' cannot be loaded as a causal language model: ")
    assert line.count("cannot be loaded") == 1
