"""Do mlspec demo, verify, generate and info say what they found, and refuse in one line what cannot work?"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel

import hf_mlspec
from hf_mlspec.cli import main, verify
from hf_mlspec.cli.request import read_prompts
from hf_mlspec.cli.stream import LiveTable
from hf_mlspec.cli.tables import show
from hf_mlspec.demo_pair import demo_prompts
from hf_mlspec.integration.load import load_causal_lm

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["def area(radius):", "Once upon a time", "x"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return str(path)


def refusal(capsys, *argv: object) -> str:
    """The one line on stderr of a command that exits with 2."""
    try:
        status = main([str(word) for word in argv])
    except SystemExit as end:  # argparse
        status = end.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_verify_finds_a_lossless_chain_lossless(capsys, saved_model, prompts):
    status = main(["verify", str(saved_model), "--level", "mxfp4", "--prompts", prompts, "--max-new-tokens", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[-1] == "ids identical: 3 of 3 prompts"
    assert lines[-2] == "tokens compared: 24"
    assert any(line.startswith("  mxfp4: drafted ") for line in lines)


def test_verify_prints_one_json_object(capsys, saved_model, prompts):
    status = main(["verify", str(saved_model), "--level", "prompt_lookup", "--prompts", prompts, "--max-new-tokens",
                   "8", "--batch-size", "2", "--limit", "2", "--num-draft-tokens", "3", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (told["prompts"], told["identical"], told["failing"], told["tokens_compared"]) == (2, 2, 0, 16)
    assert told["asked"]["levels"] == ["prompt_lookup"]
    assert told["asked"]["batch_size"] == 2


@pytest.fixture
def one_wrong_id(monkeypatch):
    """Verify against a target that is said to have written one other id: the comparison has to notice."""
    true_compare = verify.compare

    def compare(model, tokenizer, prompts, levels, **options):
        references = [item.ids for item in true_compare(model, tokenizer, prompts, [], **options).items]
        references[1][2] ^= 1
        return true_compare(model, tokenizer, prompts, levels, reference_ids=references, **options)

    monkeypatch.setattr(verify, "compare", compare)


def test_verify_fails_on_one_wrong_id(capsys, saved_model, prompts, one_wrong_id):
    asked = ["verify", str(saved_model), "--level", "mxfp4", "--prompts", prompts, "--max-new-tokens", "6"]
    assert main(asked) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ids identical: 2 of 3 prompts"
    assert any(line.startswith("different: prompt 1, new token 2: target alone id ") for line in lines)
    assert main([*asked, "--tolerate-ties", "1e-9"]) == 1
    assert "different: prompt 1" in capsys.readouterr().out
    assert main([*asked, "--tolerate-ties", "1e9"]) == 0
    assert "a tie, tolerated: prompt 1" in capsys.readouterr().out


def test_generate_compares(capsys, saved_model):
    status = main(["generate", "--model", str(saved_model), "--level", "mxfp4", "--level", "ngram", "--prompt", "x = ",
                   "--max-new-tokens", "10", "--compare", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert len(told["ids"]) == 10
    assert told["identical"] == 1
    assert [level["name"] for level in told["speculation"]["levels"]] == ["mxfp4", "ngram"]


def test_generate_samples_the_same_for_the_same_seed(capsys, saved_model):
    texts = []
    for seed in ("1", "1", "2"):
        main(["generate", "--model", str(saved_model), "--level", "mxfp4", "--prompt", "x", "--max-new-tokens", "12",
              "--do-sample", "--temperature", "1.5", "--top-k", "50", "--seed", seed, "--json"])
        texts.append(json.loads(capsys.readouterr().out)["ids"])
    assert texts[0] == texts[1] != texts[2]


def test_generate_streams_the_text(capsys, saved_model):
    asked = ["generate", "--model", str(saved_model), "--prompt", "def f(", "--max-new-tokens", "9"]
    assert main([*asked, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert main(asked) == 0
    assert capsys.readouterr().out.startswith("def f(" + text.split("\ufffd")[0])


def test_info_tells_versions_kernels_and_hook(capsys):
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hook"] == "on"
    assert told["versions"]["python"] == sys.version.split()[0]
    assert {(row["op"], row["device"], row["kernel"]) for row in told["kernels"]} == set(hf_mlspec.ops.kernel_table())
    assert main(["info"]) == 0
    assert "  mxfp4_linear on cpu: " in capsys.readouterr().out


def test_demo_writes_what_the_target_alone_writes(capsys):
    assert main(["demo", "--max-new-tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    count = len(demo_prompts())
    assert lines[-1] == f"ids identical: {count} of {count} prompts"
    assert sum(line.startswith("target alone, ") for line in lines) == count
    assert sum(line.startswith(("  mxfp4: drafted ", "  draft: drafted ")) for line in lines) == 2


def test_demo_on_another_model_in_json(capsys, saved_model):
    status = main(["demo", "--model", str(saved_model), "--level", "prompt_lookup", "--max-new-tokens", "6", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert told["levels"] == ["prompt_lookup"]
    assert told["identical"] == told["prompts"]


def test_the_console_script_is_the_module():
    """`mlspec` and `python -m hf_mlspec` are one program."""
    assert 'mlspec = "hf_mlspec.cli:main"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ran = subprocess.run([sys.executable, "-m", "hf_mlspec", "generate", "--model", "no/such/folder", "--prompt", "x"],
                         capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr == ("mlspec generate: model folder 'no/such/folder' does not exist; give a folder written by "
                          "save_pretrained\n")


def test_a_live_table_shows_text_and_counts_while_it_grows(saved_model):
    model, tokenizer = load_causal_lm(str(saved_model))
    console = Console(force_terminal=True, width=100, height=30, file=io.StringIO())
    table = LiveTable(console, tokenizer, model)
    found = hf_mlspec.compare(model, tokenizer, ["def f(", "x"], ["mxfp4"], max_new_tokens=20, streamer=table)
    written = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # without colours and cursor moves
    drafted = [int(number) for number in re.findall(r"mxfp4\s*│\s*(\d+)", written)]
    assert drafted == sorted(drafted)
    assert len(set(drafted)) > 2
    assert drafted[-1] == found.speculation.levels[0].drafted == table.finished.levels[0].drafted


@pytest.mark.parametrize(("terminal", "expected"), [(False, "  a: x 1, y 2"), (True, "─")])
def test_tables_are_plain_in_a_pipe(capsys, terminal, expected):
    show(Console(force_terminal=terminal, width=60), "title", ("", "x", "y"), [("a", "1", "2")])
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("p.txt", "one\n\n  \ntwo \n", ["one", "two "]),
    ("p.jsonl", '{"task_id": 1, "prompt": "a\\n"}\n\n{"question": "b", "answer": "c"}\n', ["a\n", "b"])])
def test_prompts_are_read(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_prompts(str(tmp_path / name)) == expected
    assert read_prompts(str(tmp_path / name), 1) == expected[:1]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("p.txt", b"\n \n", "holds no prompts"), ("p.txt", b"\xff\xfe", "is not UTF-8 text: byte 0"),
    ("p.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2: no JSON"), ("p.jsonl", b'{"text": "a"}', "it has ['text']"),
    ("p.jsonl", b"[1]", "it has list"), ("p.jsonl", b'{"prompt": 3}', "line 1: no text under 'prompt' or 'question'")])
def test_a_bad_prompts_file_is_refused(capsys, tmp_path, saved_model, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refusal(capsys, "verify", saved_model, "--level", "mxfp4", "--prompts", tmp_path / name)


@pytest.mark.parametrize(("change", "message"), [
    (["--level", "mxfp5"], "level 'mxfp5' is neither an existing folder nor a known word"),
    (["--level", "./nowhere@mxfp4"], "'./nowhere@mxfp4'"), ([], "no --level given"),
    (["--level", "early_exit:0"], "early_exit"), (["--level", "early_exit:x"], "early_exit"),
    (["--level", "mxfp4", "--max-new-tokens", "0"], "0 is not 1 or more"),
    (["--level", "mxfp4", "--max-new-tokens", "100000"], "512"),
    (["--level", "mxfp4", "--num-draft-tokens", "-1"], "num_draft_tokens"),
    (["--level", "mxfp4", "--num-draft-tokens", "4,2"], "num_draft_tokens has 2 entries for 1 levels"),
    (["--level", "mxfp4", "--num-draft-tokens", "many"], "--num-draft-tokens"),
    (["--level", "mxfp4", "--confidence-threshold", "2"], "confidence_threshold"),
    (["--level", "mxfp4", "--dtype", "int8"], "int8"), (["--level", "mxfp4", "--device", "abacus"], "device 'abacus'"),
    (["--level", "mxfp4", "--dtype", "bfloat16", "--tolerate-ties", "1e-5"], "not bfloat16")])
def test_a_bad_option_is_refused(capsys, saved_model, prompts, change, message):
    assert message in refusal(capsys, "verify", saved_model, "--prompts", prompts, *change)


def test_a_missing_prompts_file_is_refused(capsys, saved_model):
    line = refusal(capsys, "verify", saved_model, "--level", "mxfp4", "--prompts", "nowhere.txt")
    assert line == "mlspec verify: prompts file 'nowhere.txt' cannot be read: No such file or directory\n"


@pytest.mark.parametrize(("argv", "message"), [
    (["demo", "--model", "./nowhere"], "model folder './nowhere' does not exist"),
    (["dance"], "dance"), ([], "demo |"),
    (["generate", "--prompt", "x"], "--model"),
    (["generate", "--model", "MODEL", "--prompt", ""], "--prompt is empty"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--top-k", "3"], "top_k does nothing without --do-sample"),
    (["generate", "--model", "MODEL", "--prompt", "x", "--do-sample", "--compare"], "drop --do-sample")])
def test_a_bad_call_is_refused(capsys, saved_model, argv, message):
    assert message in refusal(capsys, *[str(saved_model) if word == "MODEL" else word for word in argv])


def test_a_folder_without_a_model_is_refused(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    line = refusal(capsys, "generate", "--model", tmp_path, "--prompt", "x")
    assert "holds no causal language model" in line


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
    (with_nan, "are NaN"), (torn, "causal language model"), (an_encoder, "is an encoder")])
def test_a_spoilt_model_is_refused(capsys, saved_model, tmp_path, place, spoil, message):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(saved_model, spoilt)
    spoil(spoilt)
    capsys.readouterr()
    folders = {"--model": saved_model, "--level": "prompt_lookup"} | {place: spoilt}
    words = [str(word) for pair in folders.items() for word in pair]
    assert main(["generate", *words, "--prompt", "ab", "--max-new-tokens", "4", "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err.splitlines()[-1]


def test_traceback_shows_where_an_error_came_from():
    with pytest.raises(ValueError, match="nowhere"):
        main(["--traceback", "demo", "--model", "./nowhere"])
