"""Do the programs record what a plan names, count it, replay it, go on after a kill, and refuse bad input?"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from programs import needs_plans, program

import hf_mlspec
from hf_mlspec.evaluation import level_acceptance, read_trace, write_trace

pytestmark = [needs_plans, pytest.mark.usefixtures("from_the_root")]
ROOT = Path(__file__).resolve().parents[2]
PLAN = """
name = "small"
max_new_tokens = 10
batch_size = 2
[[systems]]
name = "cast"
model = "{models}/target"
levels = ["mxfp4"]
num_draft_tokens = 4
[[systems]]
name = "two"
model = "{models}/target"
levels = ["mxfp4", "prompt_lookup"]
[[data]]
name = "Words"
file = "{data}/words.jsonl"
count = 3
"""


@pytest.fixture
def folder(tmp_path, saved_model):
    """A plan beside models/target and data/words.jsonl, and how to ask a program for it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "target").symlink_to(saved_model)
    (tmp_path / "data").mkdir()
    texts = ["one two", "a longer line, a longer line", "x"]
    (tmp_path / "data" / "words.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


def places(folder: Path) -> list[str]:
    return [str(folder / "plan.toml"), "--models", str(folder / "models"), "--data", str(folder / "data"),
            "--device", "cpu"]


def accept(folder: Path, *more: str) -> tuple[int, list[dict]]:
    """Exit status of eval.acceptance and all lines of its results."""
    status = program("acceptance").main([*places(folder), "--results", str(folder / "results"), *more])
    file = folder / "results" / "small.jsonl"
    return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def record(folder: Path, *more: str) -> int:
    return program("record_traces").main(
        [*places(folder), "--out", str(folder / "traces"), "--journals", str(folder / "journals"), *more])


def test_acceptance_counts_what_a_chain_did(folder, capsys):
    status, found = accept(folder)
    assert status == 0
    assert [(e["kind"], e["system"], e["level"], e["level_index"]) for e in found] == [
        ("acceptance", "cast", "mxfp4", 0), ("acceptance", "two", "mxfp4", 0),
        ("acceptance", "two", "prompt_lookup", 1)]
    for line in found:
        assert (line["data"], line["batch"], line["prompts"], line["machine"]["threads"]) == ("Words", 2, 3, 1)
        assert 0 <= line["accepted"] <= line["tested"] <= line["drafted"]
        assert sum(one["tested"] for one in line["by_position"]) == line["tested"]
    assert found[0]["num_draft_tokens"] == [4]
    assert [one["position"] for one in found[0]["by_position"]] == [0, 1, 2, 3][: len(found[0]["by_position"])]
    shown = capsys.readouterr().out
    assert "prompt_lookup" in shown
    assert re.search(r"┃ 1st\s+┃ 2nd\s+┃ 3rd\s+┃ 4th", shown)  # files count from 0, people from 1
    assert "the pass that reads the prompt is counted" in shown
    assert accept(folder)[1] == found  # all was there
    assert capsys.readouterr().out == shown
    assert accept(folder, "--report")[1] == found


def test_lines_are_those_of_generate(folder, saved_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = accept(folder)[1][0]
    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    counts = [0, 0, 0]
    for line in (folder / "data" / "words.jsonl").read_text().splitlines():
        inputs = tokenizer(json.loads(line)["prompt"], return_tensors="pt", return_token_type_ids=False)
        model.generate(**inputs, max_new_tokens=10, do_sample=False, assistant_models=["mxfp4"], pad_token_id=256,
                       speculation_config={"num_draft_tokens": 4})
        level = hf_mlspec.last_stats(model).levels[0]
        counts = [a + b for a, b in zip(counts, (level.drafted, level.tested, level.accepted), strict=True)]
    assert [found[name] for name in ("drafted", "tested", "accepted")] == counts


def test_finished_prompts_survive_a_kill(folder, monkeypatch):
    recording = importlib.import_module("hf_mlspec.evaluation.traces")
    decode, decoded = recording.run, []

    def dying(model, call):
        if len(decoded) == 3:
            raise KeyboardInterrupt
        decoded.append(call.levels)
        return decode(model, call)

    monkeypatch.setattr(recording, "run", dying)
    assert accept(folder)[0] == 130
    assert decoded == [["mxfp4"], ["mxfp4"], ["mxfp4", "prompt_lookup"]]
    monkeypatch.setattr(recording, "run", lambda model, call: decoded.append("again") or decode(model, call))
    found = accept(folder)[1]
    assert decoded[3:] == ["again"]  # the last batch of the second system
    assert len(found) == 3


def test_other_weights_and_prompts_under_the_same_names_are_noticed(folder, saved_model, capsys):
    (folder / "models" / "target").unlink()
    target = shutil.copytree(saved_model, folder / "models" / "target")
    assert accept(folder)[0] == 0
    assert record(folder) == 0
    (weights,) = target.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    capsys.readouterr()
    assert accept(folder)[0] == 2
    assert "(weights: " in capsys.readouterr().err
    assert record(folder) == 2
    assert "(weights: " in capsys.readouterr().err
    words = folder / "data" / "words.jsonl"
    words.write_text(words.read_text().replace("one two", "two one"))
    assert accept(folder)[0] == 2
    assert "(prompts: " in capsys.readouterr().err


def test_overwriting_decodes_again(folder, monkeypatch):
    assert record(folder) == 0
    recording = importlib.import_module("hf_mlspec.evaluation.traces")
    decode, decoded = recording.run, []
    monkeypatch.setattr(recording, "run", lambda model, call: decoded.append(call.levels) or decode(model, call))
    assert record(folder, "--overwrite") == 0
    assert len(decoded) == 4  # two batches of each system


def test_traces_are_recorded_once(folder, capsys):
    assert record(folder) == 0
    files = sorted((folder / "traces").iterdir())
    assert [file.name for file in files] == ["cast-words.json", "two-words.json"]
    before = {file: file.read_bytes() for file in files}
    assert record(folder) == 0
    assert {file: file.read_bytes() for file in files} == before
    assert "was there" in capsys.readouterr().out
    trace = read_trace(files[0])
    assert trace.origin["asked"]["model"] == "{models}/target"
    assert str(folder) not in files[0].read_text()
    assert [len(trace.rows), trace.data] == [3, "Words"]
    counted = program("acceptance").lines_of(trace)
    assert counted[0]["accepted"] == level_acceptance(trace)[0].accepted


def test_a_trace_of_something_else_is_not_overwritten(folder, capsys):
    assert record(folder) == 0
    text = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(text.replace("num_draft_tokens = 4", "num_draft_tokens = 5"))
    before = (folder / "traces" / "cast-words.json").read_bytes()
    assert record(folder) == 2
    assert "num_draft_tokens: 4 -> 5" in capsys.readouterr().err
    assert (folder / "traces" / "cast-words.json").read_bytes() == before
    assert record(folder, "--overwrite") == 0
    assert read_trace(folder / "traces" / "cast-words.json").levels[0].num_draft_tokens == 5


BAD_PLANS = {
    "no levels": ('levels = ["mxfp4"]\nnum_draft_tokens = 4', "", "has no levels"),
    "no data": (PLAN[PLAN.index("[[data]]"):], "", "no table [[data]]"),
    "unknown key": ("batch_size = 2", "batchsize = 2", "unknown key 'batchsize'"),
    "no model": ("{models}/target", "{models}/other", "holds no config.json"),
    "no file": ("words.jsonl", "others.jsonl", "is no file"),
    "too many": ("count = 3", "count = 4", "holds 3 prompts, count is 4"),
    "names": ('name = "two"', 'name = "CAST"', "2 pairs of a system and a data set would be kept as 'cast-words'"),
    "sizes": ("count = 3", "count = 3\nbatch_sizes = [1, 2]", "give at most one"),
    "zero": ("max_new_tokens = 10", "max_new_tokens = 0", "max_new_tokens is 0"),
    "a word": ('"prompt_lookup"', '"prompt_lookups"', "neither an existing folder nor a known word"),
    "too long": ("max_new_tokens = 10", "max_new_tokens = 600", "exceed the 512 positions"),
}


@pytest.mark.parametrize(("old", "new", "words"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_cannot_be_is_refused(old, new, words, folder, capsys):
    (folder / "plan.toml").write_text(PLAN.replace(old, new))
    status, found = accept(folder)
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (status, len(error)) == (2, 1)
    assert words in error[0]
    assert found == []


def test_a_plan_or_traces(folder, capsys):
    for asked in ([], [str(folder / "plan.toml"), "--trace", "x"]):
        with pytest.raises(SystemExit):
            program("acceptance").main(asked)
    assert "a plan, or --trace with files" in capsys.readouterr().err
    assert program("acceptance").main(["--trace", str(folder / "plan.toml")]) == 2
    assert "plan.toml: " in capsys.readouterr().err


def test_committed_traces_are_whole():
    files = sorted((ROOT / "eval" / "traces").glob("*.json"))
    assert len(files) == 33
    assert sum(file.stat().st_size for file in files) < 400_000
    for file in files:
        trace = read_trace(file)
        assert (len(trace.rows), trace.max_new_tokens) == (32, 128)
        assert trace.target.name in ("code-76m", "code-moe")
        assert file.stem.startswith(trace.target.name)
        assert file.stem.endswith(trace.data.lower())
        assert len(program("acceptance").lines_of(trace)) == len(trace.levels)


@pytest.fixture
def replayed(tmp_path):
    """Runs eval.replay; the lines it wrote."""
    def run(*asked: str) -> tuple[int, list[dict]]:
        file = tmp_path / "out.jsonl"
        status = program("replay").main([*asked, "--device", "cpu", "--threads", "1", "--json", str(file)])
        return status, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return run


def test_a_shape_is_timed_with_a_trace(replayed, capsys):
    status, found = replayed("--quick", "--batch", "1,2")
    assert status == 0
    assert [(e["contender"], e["batch"]) for e in found] == [
        (name, batch) for batch in (1, 2) for name in ("target alone (replayed)", "[mxfp4, tiny] (replayed)")]
    for line in found:
        assert (line["kind"], line["replayed"], line["data"], line["fused_rounds"]) == (
            "decode", True, "HumanEval", False)
        spent = line["seconds"]  # decode-only, as the speed is: without the pass that read the prompts
        decoded = line["decode_tokens"] / line["tokens_per_second"]
        assert spent["total"] == pytest.approx(decoded)
        assert spent["total"] == pytest.approx(spent["target"] + sum(spent["levels"]) + spent["other"])
        assert spent["target"] > 0
        assert spent["other"] > 0
    trace = read_trace(program("replay").TRACES / "code-76m-mxfp4-code-4m-humaneval.json").of_rows([0, 1])
    assert found[0]["tokens_per_pass"] == 1
    assert found[1]["tokens_per_pass"] > 1
    assert found[0]["over"] == {"target alone (replayed)": 1}
    assert found[1]["recorded_on"] == [trace.target.name, "mxfp4", "code-4m"]
    assert "[mxfp4, tiny] (replayed)" in capsys.readouterr().out


def test_a_quantized_shape_is_timed(replayed):
    trace = program("replay").TRACES / "code-76m-int4-w4a8-gsm8k.json"
    status, found = replayed("--quick", "--trace", str(trace), "--format", "mxfp4", "--level", "mxfp4a8")
    assert status == 0
    assert found[1]["num_draft_tokens"] == [3]
    assert found[1]["tokens_per_pass"] > 2


def test_what_no_shape_can_replay_is_refused(replayed, tmp_path, capsys):
    trace = program("replay").TRACES / "code-76m-mxfp4-gsm8k.json"
    cut = tmp_path / "cut.json"
    cut.write_text(trace.read_text()[:1000])
    many = read_trace(trace).of_rows([0])
    write_trace(many, one := tmp_path / "one.json")
    for asked, words in (
        (["--trace", str(cut)], "cut.json: "),
        (["--trace", str(trace), "--batch", "3"], "a batch of 3 needs as many rows, and 2"),
        (["--trace", str(one), "--batch", "2"], "a batch of 2 needs as many rows, and 1"),
        (["--trace", str(trace), "--level", "mxfp4", "--level", "tiny"], "the trace has 1 levels (mxfp4)"),
        (["--trace", str(trace), "--level", "mxfp4", "--max-new-tokens", "129"], "was recorded with 128"),
        (["--trace", str(trace), "--level", "w4a8"], "w4a8"),
        (["--model", "no/such/folder"], "no/such/folder is no folder"),
        (["--trace", "no.json"], "no.json"),
    ):
        status, found = replayed("--quick", *asked)
        assert (status, found) == (2, [])
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        replayed("--shape", "tiny")
    assert "--trace is missing" in capsys.readouterr().err
