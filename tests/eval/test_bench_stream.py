"""Does the benchmark of streams give every contender the same work, and notice one that writes something else?"""

from __future__ import annotations

import json

import pytest
import torch
from programs import program


@pytest.fixture
def bench(from_the_root):
    return program("bench_stream")


@pytest.fixture
def asked(saved_model, tmp_path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two", "three", "and four of it")))
    return ["--model", str(saved_model), "--dtype", "float32", "--prompts", str(prompts), "--quick", "--threads", "1",
            "--max-batch", "2"]


def test_every_contender_does_the_same_work(bench, asked, tmp_path):
    out = tmp_path / "out.jsonl"
    assert bench.main([*asked, "--level", "prompt_lookup", "--json", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["contender"], row["levels"]) for row in rows] == [
        (name, levels) for levels in ([], ["prompt_lookup"]) for name in ("stream", "static batches", "one by one")
    ]
    assert {row["tokens"] for row in rows} == {rows[0]["tokens"]}
    assert [row["max_batch"] for row in rows[:3]] == [2, 2, 1]
    assert all(0 < row["mean_wait_seconds"] <= row["seconds"] for row in rows)
    assert {row["machine"]["torch"] for row in rows} == {torch.__version__}


def test_other_tokens_are_an_error(bench, asked, monkeypatch):
    def wrong(model, levels, work, max_batch):
        new, seconds = bench.in_batches(model, levels, work, max_batch)
        return [[token + 1 for token in row] for row in new], seconds

    monkeypatch.setitem(bench.CONTENDERS, "static batches", wrong)
    with pytest.raises(AssertionError, match="static batches with levels"):
        bench.main(asked)


def test_limits_the_wrong_way_round(bench, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--shortest", "9", "--longest", "3"])
    assert "1 <= shortest <= longest" in capsys.readouterr().err


def test_a_shape_has_no_folder(bench, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--shape", "tiny", "--model", "folder"])
    assert "--shape" in capsys.readouterr().err
