"""Does the benchmark of contexts time prompts and steps apart, and count the bytes that a step reads?"""

from __future__ import annotations

import json

import pytest
import torch
from programs import program


@pytest.fixture
def bench(from_the_root):
    return program("bench_context")


def test_a_line_for_every_contender_and_context(bench, tmp_path):
    out = tmp_path / "out.jsonl"
    assert bench.main(["--quick", "--threads", "1", "--json", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["context"], line["contender"]) for line in lines] == [
        (context, name) for context in (16, 64) for name in ("stock", "ours")
    ]
    assert all(line["prompt_seconds"] > 0 and line["step_seconds"] > 0 for line in lines)
    assert [line["prompt_of_stock"] for line in lines[::2]] == [1.0, 1.0]
    assert {line["machine"]["torch"] for line in lines} == {torch.__version__}


def test_a_cache_of_codes_is_one_more_contender(bench, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    assert bench.main(["--quick", "--threads", "1", "--kv-cache", "int8", "--json", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["contender"] for line in lines] == ["stock", "ours", "ours, int8"] * 2
    _, ours, codes = lines[3:]
    assert ours["step_of_ours"] == 1.0
    assert codes["step_of_ours"] > 0
    assert ours["step_bytes"] - codes["step_bytes"] == (64 + 8) * 2 * 2 * 2 * (32 - 20)  # of heads of 16
    with pytest.raises(SystemExit):
        bench.parse(["--kv-cache", "int5"])
    assert "kv_cache is 'int5', choose 'int8' or 'int4'" in capsys.readouterr().err


def test_attention_alone_reads_every_layer(bench, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    for word, width in ((None, 32), ("int8", 20)):  # bytes of a row of 16 elements
        assert bench.main(["--quick", "--attention", "--json", str(out), *(["--kv-cache", word] if word else [])]) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["slots"] for line in lines] == [16, 64]
        for line in lines:
            layer = 2 * 2 * line["slots"] * width  # two key heads
            assert line["bytes"] == line["layers"] * layer
            assert 0 <= line["bytes"] - 16 * 2**20 < layer
            share = line["bytes"] / line["seconds"] / line["probe_bytes_per_second"]
            assert line["bandwidth_share"] == pytest.approx(share)
    with pytest.raises(SystemExit):
        bench.parse(["--attention", "--device", "cuda"])
    assert "--attention is timed on the CPU, not on cuda" in capsys.readouterr().err


def test_bytes_of_a_step(bench):
    model = bench.random_model("tiny")  # 2 layers of 2 key heads of 16; 96 ids of 64 elements, not tied
    weights = sum(weight.nbytes for weight in model.parameters()) - 96 * 64 * 2
    assert bench.step_bytes(model, 100) - weights == 2 * 2 * 2 * 16 * 100 * 2
    model.lm_head.weight = model.model.embed_tokens.weight
    assert bench.step_bytes(model, 0) == weights


def test_batches_of_tokens_that_arrive_together(bench, monkeypatch):
    arrivals, clock = bench.Arrivals(), iter([10.0, 12.0, 15.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    for tokens in (50, 1, 8, 2):  # the prompt, then what was written
        arrivals.put(torch.zeros(tokens))
    assert arrivals.tokens == [1, 8, 2]
    assert arrivals.step_seconds() == 0.5


def test_one_token_has_no_step(bench, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--tokens", "1"])
    assert "--tokens at least 2" in capsys.readouterr().err
