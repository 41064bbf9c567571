"""Does `mlspec quantize --method` write a folder, and say and draw how exact its layers are and what it cost?"""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from refused_command import refusal
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mlspec.calibration import needed
from hf_mlspec.calibration.finished import FinishedBlocks
from hf_mlspec.calibration.matrices import read_rotations
from hf_mlspec.calibration.pipeline import LayerReport
from hf_mlspec.cli import main, picture
from hf_mlspec.cli.calibrate import WORST

SIZES = ["--samples", "4", "--tokens", "64", "--evaluate-tokens", "513"]
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {n}: the area of {n * n}\n" for n in range(200)), encoding="utf-8")
    return file


def command(folder, text, tmp_path, *more: object) -> list[str]:
    words = ["quantize", folder, tmp_path / "out", "--method", "gptq", "--format", "int4", "--group-size", "32",
             "--calibration", text, "--evaluate", text, *more]  # fmt: skip
    return [str(word) for word in words]


def test_the_command_writes_a_folder_and_a_summary(capsys, saved_model, text, tmp_path):
    assert main(command(saved_model, text, tmp_path, *SIZES)) == 0
    told = capsys.readouterr().out
    words = ("self_attn.q_proj: least", "layers with the most noise", "calibrated on: 256 tokens in 4 samples",
             "perplexity before", "perplexity w4a4", f"perplexity is of: 511 tokens of {text}")  # 513 in 2 windows
    assert [word for word in words if word not in told] == []
    lines = told.splitlines()
    first = next(at for at, line in enumerate(lines) if "the most noise" in line)
    noise = [float(line.rpartition(" ")[2]) for line in lines[first + 1 : first + 1 + WORST]]
    assert noise == sorted(noise)
    assert all("block " in line for line in lines[first + 1 : first + 1 + WORST])
    assert not (tmp_path / "out.blocks").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_json_has_all_layers_and_the_perplexity_of_the_tokens_it_counts(capsys, saved_model, text, tmp_path):
    assert main(command(saved_model, text, tmp_path, *SIZES, "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    layers = told["calibrated"]["layers"]
    assert [layer["block"] for layer in layers] == [0] * 7 + [1] * 7
    assert len({(layer["block"], layer["name"]) for layer in layers}) == 14
    assert all(layer["sqnr"] > 8 for layer in layers)
    assert (told["evaluated"], told["asked"]["plot"]) == (511, None)
    ids = AutoTokenizer.from_pretrained(saved_model)(text.read_text())["input_ids"][:512]
    row = torch.tensor([ids])
    loss = AutoModelForCausalLM.from_pretrained(saved_model)(row, labels=row).loss
    assert told["perplexity"]["before"] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize("suffix", [".png", ".SVG"])
def test_the_picture_is_drawn(capsys, saved_model, text, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"noise{suffix}"
    assert main(command(saved_model, text, tmp_path, *SIZES, "--plot", file)) == 0
    assert f"picture written to {file}" in capsys.readouterr().out
    assert file.read_bytes()[:4] == (b"\x89PNG" if suffix == ".png" else b"<?xm")


def test_the_lines_of_the_picture_are_the_layers():
    pytest.importorskip("matplotlib")
    from hf_mlspec.cli.calibrate_plot import noise

    given = [(0, "mlp.up_proj", 20.0), (0, "mlp.down_proj", 15.0), (1, "mlp.up_proj", None),
             (1, "mlp.down_proj", 16.5), (2, "mlp.up_proj", 21.0)]  # fmt: skip
    (axes,) = noise([LayerReport(block, name, sqnr, None) for block, name, sqnr in given], "gptq").axes
    up, down = axes.lines
    assert (up.get_label(), down.get_label()) == ("up_proj", "down_proj")
    assert (list(down.get_xdata()), list(down.get_ydata())) == ([0, 1], [15.0, 16.5])
    assert math.isnan(up.get_ydata()[1])
    assert list(up.get_ydata())[::2] == [20.0, 21.0]


@pytest.mark.parametrize(("change", "words"), [
    (["--samples", "1000", "--tokens", "64"], "1000 samples of 64 need 64000"),
    (["--plot", "p.jpeg"], "--plot is 'p.jpeg'; a picture's name ends with .png, .svg, .pdf"),
    (["--plot", "nowhere/p.png"], "that folder does not exist"),
    (["--samples", "9", "--tokens", "3000"], "9 samples of 3000 need 27000: give a longer text, or at most 1 samples"),
    (["--samples", "4", "--tokens", "600"], "has 600 tokens, the model 512 positions: give samples of at most 512"),
    (["--calibration", "short.txt"], "has 9 tokens, 32 samples of 512 need 16384: give a longer text\n"),
    (["--calibration", "short.txt", "--samples", "3"], "give a longer text, or samples of at most 3 tokens\n"),
    (["--calibration", "empty.txt"], "calibration file 'empty.txt' is empty; give a text file"),
    (["--calibration", "nul.txt"], "'nul.txt' is no text (a NUL character at 3): give a text file"),
    (["--calibration", "latin.txt"], "'latin.txt' is no UTF-8 text"),
    (["--calibration", "."], "calibration file '.' is a folder; give a text file"),
    (["--evaluate", "nowhere.txt"], "text file 'nowhere.txt' does not exist")])
def test_a_bad_call_is_refused_and_writes_nothing(capsys, saved_model, text, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    written = {"short": b"some text", "empty": b" \n", "nul": b"abc\0def", "latin": b"caf\xe9"}
    for name, data in written.items():
        (tmp_path / f"{name}.txt").write_bytes(data)
    assert words in refusal(capsys, *command(saved_model, text, tmp_path, *change))
    assert not (tmp_path / "out").exists()


def test_a_picture_without_matplotlib_is_refused(capsys, saved_model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    line = refusal(capsys, *command(saved_model, text, tmp_path, "--plot", tmp_path / "p.png"))
    assert "--plot needs matplotlib: pip install matplotlib" in line


@pytest.mark.parametrize("option", [["--samples", "4"], ["--plot", "p.png"]])
def test_options_of_calibration_go_with_a_method(capsys, saved_model, tmp_path, option):
    line = refusal(capsys, "quantize", saved_model, tmp_path / "other", *option)
    assert f"{option[0]} goes with --method" in line


def test_tokens_to_evaluate_go_with_their_text(capsys, saved_model, text, tmp_path):
    words = command(saved_model, text, tmp_path, *SIZES)
    at = words.index("--evaluate")
    assert "name its file with --evaluate" in refusal(capsys, *words[:at], *words[at + 2 :])


def test_a_clip_is_searched(capsys, saved_model, text, tmp_path):
    words = command(saved_model, text, tmp_path, *SIZES, "--activation-clip", "auto", "--kv-cache", "int4")
    assert main(words) == 0
    assert "divergence of 4-bit activations by clip: 1: " in capsys.readouterr().out
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.quantization_config
    found = config.calibration["clip_search"]
    assert config.activation_clip == float(min(found, key=found.get))
    assert config.kv_cache == "int4"


@pytest.mark.parametrize(("method", "head"), [("gptq", 0), ("quarot", 258 * 96 * 4)])
def test_a_disk_too_small_for_the_model_is_said_before_the_first_block(
    capsys, saved_model, text, tmp_path, monkeypatch, method, head
):
    tied = tmp_path / "tied"
    model = AutoModelForCausalLM.from_pretrained(saved_model)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tied)
    AutoTokenizer.from_pretrained(saved_model).save_pretrained(tied)
    rotation = 0 if method == "gptq" else 7 * 3 * 4  # what each layer has in front
    blocks = 2 * ((2 * 96 * 96 + 2 * 48 * 96 + 3 * 96 * 192) // 32 * (16 + 2) + 2 * 96 * 4 + rotation)
    saved, states = blocks + 258 * 96 * 4 + 96 * 4 + head, 4 * 64 * 96 * 4
    whole = blocks + saved + states
    monkeypatch.setattr(needed.shutil, "disk_usage", lambda place: SimpleNamespace(free=whole - 1))
    words = [*command(tied, text, tmp_path, *SIZES), "--method", method]
    capsys.readouterr()  # bars of what was loaded here
    line = refusal(capsys, *words)
    needs = f"finished blocks, the model and hidden states need {whole} bytes"
    assert f"{needs}, {whole - 1} are free: use another disk" in line
    assert not (tmp_path / "out.blocks").exists()
    monkeypatch.setattr(needed.shutil, "disk_usage", lambda place: SimpleNamespace(free=whole))
    assert main([str(word) for word in words]) == 0
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert saved <= written < 1.1 * saved  # the rest are headers


def test_too_little_memory_is_one_line(capsys, saved_model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(needed, "available", lambda device: 1000)
    line = refusal(capsys, *command(saved_model, text, tmp_path, *SIZES))
    assert "MiB beside the model, 0 are free on cpu: give fewer samples or tokens, use method rtn" in line
    assert not (tmp_path / "out.blocks").exists()


def test_memory_that_ends_half_way_leaves_what_is_done(capsys, saved_model, text, tmp_path, monkeypatch):
    words = [str(word) for word in command(saved_model, text, tmp_path, *SIZES)]
    assert main([*words[:2], str(tmp_path / "whole"), *words[3:]]) == 0
    capsys.readouterr()
    kept = FinishedBlocks.write
    monkeypatch.setattr(FinishedBlocks, "write", lambda *block: kept(*block) or torch.empty(2**60))
    line = refusal(capsys, *words)
    folder = tmp_path / "out.blocks"
    assert "no memory is left on cpu behind 1 of 2 blocks: free some and repeat the call" in line
    assert f"behind the blocks in {str(folder)!r}" in line
    made = []
    monkeypatch.setattr(FinishedBlocks, "write", lambda self, at, *rest: made.append(at) or kept(self, at, *rest))
    assert main(words) == 0
    assert made == [1]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_rotation_is_learned_from_a_shell(capsys, saved_model, text, tmp_path):
    file = tmp_path / "R.bin"
    words = ["quantize", saved_model, tmp_path / "out", "--method", "quarot+gptq", "--group-size", "32",
             "--calibration", text, *SIZES[:4], "--rotations", file, "--learn-rotation"]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    assert "to learn the rotation" in capsys.readouterr().out
    before = file.read_bytes()
    residual, heads = read_rotations(file)
    assert (residual.shape, heads) == ((96, 96), None)
    words[2] = tmp_path / "again"  # by the file that is there
    assert main([str(word) for word in words]) == 0
    assert "to learn the rotation" not in capsys.readouterr().out
    assert file.read_bytes() == before
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("change", "words"), [
    (["--learn-rotation"], "--learn-rotation writes a file: name it with --rotations R.bin"),
    (["--learn-rotation", "--rotations", "R.bin"], "rotations are of quarot and quarot+gptq, method 'gptq' has none"),
    (["--device", "nowhere"], "device 'nowhere' cannot be used: Expected one of cpu, cuda")])
def test_rotations_and_devices_that_cannot_be(capsys, saved_model, text, tmp_path, monkeypatch, change, words):
    monkeypatch.chdir(tmp_path)
    assert words in refusal(capsys, *command(saved_model, text, tmp_path, *SIZES, *change))
    assert not (tmp_path / "R.bin").exists()


def test_a_run_that_failed_before_its_first_block_does_not_stand_in_the_way(capsys, saved_model, text, tmp_path):
    words = command(saved_model, text, tmp_path, *SIZES)
    line = refusal(capsys, *words, "--damping", "1e-30")
    assert "model.layers.0.self_attn.q_proj: the Hessian" in line
    assert "raise the damping" in line
    assert main([*words, "--damping", "0.2"]) == 0


def test_a_method_brings_its_format_and_keys_and_values_go_with_it(saved_model, text, tmp_path):
    words = ["quantize", saved_model, tmp_path / "out", "--method", "gptq", "--group-size", 32, "--kv-cache", "int8",
             "--calibration", text, *SIZES[:4]]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.quantization_config
    assert (config.format, config.kv_cache, config.calibration["method"]) == ("int4", "int8", "gptq")
