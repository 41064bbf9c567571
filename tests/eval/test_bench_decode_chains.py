"""Does the benchmark of chains read its arguments, and write a line for every contender?"""

from __future__ import annotations

import json
import math

import pytest
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")


def test_levels_are_one_chain_and_chains_are_many():
    bench = program("bench_decode")
    asked = bench.parse(["--model", "x", "--level", "mxfp4", "--level", "y", "--chain", "mxfp4", "--chain", "mxfp4,y"])
    assert bench.chosen_chains(asked) == [["mxfp4", "y"], ["mxfp4"], ["mxfp4", "y"]]
    assert bench.chosen_chains(bench.parse(["--model", "x"])) == []
    with pytest.raises(SystemExit):
        bench.parse(["--shape", "tiny", "--level", "mxfp4"])


def test_every_contender_has_a_line(saved_model, tmp_path):
    prompts, out = tmp_path / "words.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "def f("}\n')
    asked = ["--model", str(saved_model), "--level", "mxfp4", "--chain", str(saved_model), "--prompts", str(prompts),
             "--dtype", "float32", "--quick", "--threads", "1", "--json", str(out)]
    assert program("bench_decode").main(asked) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [e["contender"] for e in found] == [
        "stock greedy", "stock assisted", "target alone, prepared", "[mxfp4]", f"[{saved_model.name}]"
    ]
    assert found[2]["over target alone, prepared"] == pytest.approx(1)
    assert found[3]["levels"][0]["acceptance"] > 0
    assert found[4]["tokens_per_target_pass"] > 1
    assert all(e["machine"] and e["memory"]["target_bytes"] and e["data"] == "words" for e in found)


def test_a_geometric_mean_weighs_halving_as_doubling():
    mean = program("bench_decode.report").geometric_mean
    assert mean([2.0, 0.5]) == pytest.approx(1)
    assert mean([]) is None
    assert math.isclose(mean([3.0]), 3.0)
