"""Does the benchmark of shared models time a shape, what a process holds of it, and single steps, in one process?"""

from __future__ import annotations

import json

import pytest
from programs import program

TRACE = "eval/traces/code-76m-mxfp4-humaneval.json"
SHAPE = "--shape", "tiny", "--layers", "1", "--trace", TRACE, "--captured", "3", "--device", "cpu"


@pytest.fixture
def bench(from_the_root):
    return program("bench_ranks")


def test_a_shape_and_its_parts_are_timed(bench, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert bench.main([*SHAPE, "--count", "1", "--batch", "1", "--part", "2", "--steps", "1x1,2x3"]) == 0
    built, alone, *steps = map(json.loads, capsys.readouterr().out.splitlines())
    assert (built["kind"], built["part"], built["engine"]) == ("built", 2, "cuda")
    assert (alone["contender"], alone["processes"], alone["part"]) == ("alone", 1, 2)
    assert alone["ms_a_pass"] > 0
    assert [(one["of"], one["rows"], one["tokens"]) for one in steps] == [
        ("bf16", 1, 1), ("mxfp4", 1, 1), ("bf16", 2, 3), ("mxfp4", 2, 3)]  # fmt: skip
    assert all(one["ms"] > 0 for one in steps)


def test_a_part_has_its_share_of_heads_outputs_and_logits(bench):
    assert bench.part_of("llama-3-8b", 4) == {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
                                              "intermediate_size": 3584, "vocab_size": 32064}  # fmt: skip
    with pytest.raises(ValueError, match="tiny has num_key_value_heads 2, which --part 4 does not divide"):
        bench.part_of("tiny", 4)


@pytest.mark.parametrize(("words", "said"), [
    ((), "nothing to do"),
    (("--shape", "tiny"), "--shape takes --trace"),
    ((*SHAPE, "--part", "0"), "--part is 1 or more"),
    ((*SHAPE, "--steps", "3"), "no list of rows and tokens such as 1x1,8x4"),
])  # fmt: skip
def test_words_that_cannot_be_are_refused(bench, capsys, words, said):
    with pytest.raises(SystemExit):
        bench.main(list(words))
    assert said in capsys.readouterr().err


def test_parts_are_of_one_process(bench, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        bench.main([*SHAPE, "--part", "2"])
    assert "for one process: leave torchrun out" in capsys.readouterr().err
