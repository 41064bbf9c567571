"""Does the benchmark of long prompts and prefixes compare what the ways write, and tell gaps and waits?"""

from __future__ import annotations

import json

import pytest
from programs import program


@pytest.fixture
def bench(from_the_root):
    return program("bench_prompts")


def test_gaps_and_waits_of_the_demo_pair(bench, tmp_path):
    out = tmp_path / "out.jsonl"
    assert bench.main(["--quick", "--threads", "1", "--joining", "200", "--prefix", "130", "--rows", "2",
                       "--json", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["figure"], row["way"]) for row in rows] == [
        ("gap", "chunks"), ("gap", "at once"), ("prefix", "kept"), ("prefix", "read anew")]  # fmt: skip
    assert all(row["median_gap_ms"] > 0 and row["ratio"] > 0 for row in rows[:2])
    assert all(row["longest_at"] < 1.5 and row["gaps_over_3"] <= row["gaps"] for row in rows[:2])
    assert (rows[1]["ratio"] > 3) <= (rows[1]["gaps_over_3"] > 0)
    assert rows[2]["ratio"] == pytest.approx(rows[2]["first_token_ms"] / rows[3]["first_token_ms"])


def test_other_tokens_are_an_error(bench):
    ways = {"one": lambda: {"ms": 1.0, "tokens": [1]}, "other": lambda: {"ms": 1.0, "tokens": [2]}}
    with pytest.raises(AssertionError, match="other tokens"):
        bench.measure("gap", ways, bench.parse(["--quick"]))


def test_a_shape_has_no_folder(bench, capsys):
    with pytest.raises(SystemExit):
        bench.parse(["--shape", "tiny", "--model", "folder"])
    assert "--shape" in capsys.readouterr().err
