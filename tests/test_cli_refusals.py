"""Does mlspec refuse in one line, with exit status 2, what cannot work?"""

from __future__ import annotations

import shutil

import pytest
import torch
from refused_command import refusal
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, T5Config, T5ForConditionalGeneration

import hf_mlspec
from hf_mlspec.cli import main
from mlspec_cli.commands import add_commands
from mlspec_cli.parser import Parser


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def area(radius):\nOnce upon a time\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("p.txt", b"\n \n", "holds no prompts"), ("p.txt", b"\xff\xfe", "is not UTF-8 text: byte 0"),
    ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2: no JSON"), ("p.jsonl", b'{"title": "a"}', "it has ['title']"),
    ("p.jsonl", b"[1]", "it has list"), ("p.jsonl", b'{"prompt": 3}', "line 1: 'prompt' is 3, not a text")])
def test_a_bad_prompts_file_is_refused(capsys, tmp_path, saved_model, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refusal(capsys, "verify", saved_model, "--level", "mxfp4", "--prompts", tmp_path / name)


@pytest.mark.parametrize(("change", "message"), [
    (["--level", "mxfp5"], "level 'mxfp5' is neither an existing folder nor a known word"),
    (["--level", "mxpf4"], "known word; did you mean 'mxfp4'; words are"),
    (["--level", ""], "level '' is neither an existing folder nor a known word"),
    (["--level", "mxfp4+"], "level '' is neither an existing folder nor a known word"),
    (["--level", "./nowhere@mxfp4"], "'./nowhere@mxfp4'"), ([], "no --level given"),
    (["--level", "early_exit:0"], "early_exit"), (["--level", "early_exit:x"], "early_exit"),
    (["--level", "mxfp4", "--max-new-tokens", "0"], "0 is not 1 or more"),
    (["--level", "mxfp4", "--max-new-tokens", "100000"], "512"),
    (["--level", "mxfp4", "--num-draft-tokens", "-1"], "num_draft_tokens"),
    (["--level", "mxfp4", "--num-draft-tokens", "4,2"], "num_draft_tokens has 2 entries for 1 levels"),
    (["--level", "mxfp4", "--num-draft-tokens", "many"], "--num-draft-tokens"),
    (["--level", "mxfp4", "--confidence-threshold", "2"], "confidence_threshold"),
    (["--level", "mxfp4", "--draft-window", "-4"], "draft_window is -4"),
    (["--level", "mxfp4", "--dtype", "int8"], "int8"), (["--level", "mxfp4", "--device", "abacus"], "device 'abacus'"),
    *[(["--level", "mxfp4", "--tolerate-ties", gap], f"{gap} is no distance") for gap in ("nan", "inf", "-1")],
    (["--level", "mxfp4", "--dtype", "bfloat16", "--tolerate-ties", "1e-5"], "not bfloat16")])
def test_a_bad_option_is_refused(capsys, saved_model, prompts, change, message):
    assert message in refusal(capsys, "verify", saved_model, "--prompts", prompts, *change)


def test_words_of_levels_are_listed_once(capsys, saved_model, prompts):
    line = refusal(capsys, "verify", saved_model, "--prompts", prompts, "--level", "mxfp5")
    words = line.partition("words are ")[2].strip().split(", ")
    assert len(words) == len(set(words))
    assert [word for word in words if word.startswith("planes")] == ["planes1 ... planes7"]


def test_a_head_is_no_model(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}')
    line = refusal(capsys, "generate", "--model", tmp_path, "--prompt", "x", "--level", "mxfp4")
    assert f"{str(tmp_path)!r} holds a trained head, which is no model: give it as a level of its target" in line


@pytest.mark.parametrize(("word", "message"), [
    ("-1", "--stream-interval: -1 is no time between events"), ("inf", "--stream-interval: inf is no time"),
    ("nan", "--stream-interval: nan is no time"), ("soon", "--stream-interval: invalid interval value: 'soon'")])
def test_a_time_between_events_that_is_none_is_refused(capsys, word, message):
    assert message in refusal(capsys, "serve", "--stream-interval", word)


@pytest.mark.parametrize(("words", "seconds"), [([], 0.04), (["0"], 0.0), (["0.5"], 0.5)])
def test_events_may_come_round_by_round(words, seconds):
    top = Parser(prog="mlspec")
    add_commands(top)
    given = ["--stream-interval", *words] if words else []
    assert top.parse_args(["serve", *given]).stream_interval == seconds


def test_a_missing_prompts_file_is_refused(capsys, saved_model):
    line = refusal(capsys, "verify", saved_model, "--level", "mxfp4", "--prompts", "nowhere.txt")
    assert line == "mlspec verify: prompts file 'nowhere.txt' cannot be read: No such file or directory; " \
        "give text with one prompt a line, or .jsonl with one object a line\n"


@pytest.mark.parametrize(("argv", "message"), [
    (["demo", "--model", "./nowhere"], "model folder './nowhere' does not exist"),
    (["dance"], "dance"), ([], "demo |"),
    (["generate", "--prompt", "x"], "--model"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--num-draft-tokens", "4"],
     "mlspec generate: --num-draft-tokens says how levels draft, and there is no level; add --level, or drop "
     "--num-draft-tokens"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--confidence-threshold", "0.3"],
     "--confidence-threshold says how levels draft, and there is no level"),
    (["generate", "--model", "MODEL", "--prompt", ""], "mlspec generate: --prompt: the text is empty"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--top-k", "3"], "top_k does nothing without --do-sample"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--do-sample", "--seed", str(2**64)], "2**64 - 1"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--level", "early_exit:9"], "early_exit"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--do-sample", "--compare"], "drop --do-sample")])
def test_a_bad_call_is_refused(capsys, saved_model, argv, message):
    assert message in refusal(capsys, *[str(saved_model) if word == "MODEL" else word for word in argv])


def test_a_folder_without_a_model_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    line = refusal(capsys, "generate", "--model", tmp_path, "--prompt", "x")
    assert "cannot be loaded as a causal language model" in line


def another_width(folder):
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(text.replace('"hidden_size": 96', '"hidden_size": 48'), encoding="utf-8")


def half_a_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod', encoding="utf-8")


def an_encoder_decoder(folder):
    shape = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 258}
    T5ForConditionalGeneration(T5Config(**shape)).save_pretrained(folder)


def with_nan(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[0] = float("nan")
    model.save_pretrained(folder)


def torn(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def an_encoder(folder):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertLMHeadModel(BertConfig(vocab_size=258, **shape)).save_pretrained(folder)


@pytest.mark.parametrize("place", ["--model", "--level"])
@pytest.mark.parametrize(("spoil", "message"), [
    (with_nan, "are NaN"), (torn, "causal language model"), (an_encoder, "is an encoder"),
    (another_width, "[258, 96] there and [258, 48] by the config"), (half_a_tokenizer, "no tokenizer that can"),
    (an_encoder_decoder, "causal language model")])
def test_a_spoilt_model_is_refused(capsys, saved_model, tmp_path, place, spoil, message):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(saved_model, spoilt)
    spoil(spoilt)
    capsys.readouterr()
    folders = {"--model": saved_model, "--level": "prompt_lookup"} | {place: spoilt}
    words = [str(word) for pair in folders.items() for word in pair]
    words += ["--num-draft-tokens", "2"]  # a level that does not pay is not asked
    assert main(["generate", *words, "--prompt", "ab", "--max-new-tokens", "4", "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    last = told.err.splitlines()[-1]
    assert message in last
    assert len(last) < 500


@pytest.fixture
def unknown_isa(monkeypatch):
    """The compiled library refuses the instruction set: it reads MLSPEC_CPU_ISA once, so here it only says so."""
    def refuse():
        raise RuntimeError("MLSPEC_CPU_ISA=abc is unknown, choose one of avx2, generic\nin C++")

    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: key == "CPU")
    monkeypatch.setattr(torch.ops.mlspec, "cpu_isa", refuse)


@pytest.mark.usefixtures("unknown_isa")
def test_an_unknown_instruction_set_is_refused_and_info_says_why(capsys, saved_model):
    line = refusal(capsys, "generate", "--model", saved_model, "--prompt", "x", "--level", "mxfp4")
    assert line == "mlspec generate: MLSPEC_CPU_ISA=abc is unknown, choose one of avx2, generic\n"
    assert main(["info"]) == 0
    assert "  problem: MLSPEC_CPU_ISA=abc is unknown" in capsys.readouterr().out


def test_kernels_that_are_required_and_missing_are_one_line(capsys, monkeypatch, saved_model):
    def missing(*_):
        raise hf_mlspec.ops.KernelError("no compiled kernel")

    monkeypatch.setattr("hf_mlspec.engines.choose.has_compiled_decoder", lambda: False)
    monkeypatch.setattr(hf_mlspec.ops.mxfp4, "_mxfp4_linear", missing)
    assert main(["generate", "--model", str(saved_model), "--prompt", "x", "--level", "mxfp4", "--json"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "mlspec generate: no compiled kernel"


def test_traceback_shows_where_an_error_came_from(capsys):
    assert main(["--traceback", "demo", "--model", "./nowhere"]) == 2
    told = capsys.readouterr().err
    assert "in require_folder" in told
    assert told.endswith("\nmlspec demo: model folder './nowhere' does not exist; give a folder written by "
                         "save_pretrained\n")


def test_prompts_for_which_there_is_no_memory_are_refused(capsys, monkeypatch, saved_model):
    monkeypatch.setattr("hf_mlspec.engines.rows.WORTH_ASKING", 1)
    monkeypatch.setattr("hf_mlspec.engines.memory.available", lambda device: 0)
    said = refusal(capsys, "generate", "--model", saved_model, "--prompt", "a", "--max-new-tokens", "3")
    assert "tokens for each of 1 rows needs" in said
    assert "are free on cpu: shorten the prompts" in said
