"""Do programs refuse paths and devices that cannot be, by the name of the option, before they read anything?"""

from __future__ import annotations

import importlib

import pytest
import torch

import hf_mlspec

pytestmark = pytest.mark.usefixtures("from_the_root")
TARGET = str(hf_mlspec.demo_pair()[0])
COMMANDS = {
    "eval.draft_views": ["--model", TARGET, "--text", "eval"],
    "eval.extend_context": ["--model", TARGET, "--text", "eval", "--out", "new"],
}
PATHS = [(["--model", "/nowhere"], "--model /nowhere is no folder of a model"),
         (["--text", "/nowhere"], "--text /nowhere does not exist"),
         (["--device", "nothing"], "--device nothing is none that torch knows")]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), PATHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_paths_and_devices(name, options, words, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"{name}.__main__").main([*COMMANDS[name], *options])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("name", "option"), [
    ("eval.draft_views", "--json"), ("eval.extend_context", "--out"), ("eval.extend_context", "--prepare")])
def test_what_cannot_be_written(name, option, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"{name}.__main__").main([*COMMANDS[name], option, "/nowhere/of/it"])
    assert f"{option} /nowhere/of/it cannot be written: make the folder /nowhere/of first" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_gpu_that_is_not_there(name, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"{name}.__main__").main([*COMMANDS[name], "--device", "cuda"])
    assert "--device cuda: torch finds no GPU here" in capsys.readouterr().err


def test_more_tokens_than_positions(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a b c d e f g\n" * 9000)
    args = ["--model", TARGET, "--text", str(tmp_path / "text.txt"), "--count", "1", "--tokens", "9000"]
    assert importlib.import_module("eval.draft_views.__main__").main(args) == 2
    assert "--tokens 9,000 is more than the" in capsys.readouterr().err


def test_tokens_that_prepare_did_not_write(tmp_path, capsys):
    (tmp_path / "tokens.npz").write_text("no archive")
    args = ["--model", TARGET, "--tokens", str(tmp_path / "tokens.npz"), "--out", str(tmp_path / "new")]
    assert importlib.import_module("eval.extend_context.__main__").main(args) == 2
    assert "tokens.npz is no file that --prepare wrote" in capsys.readouterr().err
