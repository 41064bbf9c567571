"""Does the benchmark of chains read its arguments, and write a line for every contender?"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")


def test_levels_are_one_chain_and_chains_are_many():
    bench = program("bench_decode")
    asked = bench.parse(["--model", "x", "--level", "mxfp4", "--level", "y", "--chain", "mxfp4", "--chain", "mxfp4,y"])
    assert bench.chosen_chains(asked) == [["mxfp4", "y"], ["mxfp4"], ["mxfp4", "y"]]
    plus = bench.parse(["--model", "x", "--level", "mxfp4+y", "--chain", "mxfp4=12:0.2+y=5"])
    assert bench.chosen_chains(plus) == [["mxfp4", "y"], ["mxfp4=12:0.2", "y=5"]]
    assert bench.chosen_chains(bench.parse(["--model", "x"])) == []
    with pytest.raises(SystemExit):
        bench.parse(["--shape", "tiny", "--level", "mxfp4"])


@pytest.mark.parametrize("chain", ["", "mxfp4+", "mxfp5=12:0.2", "./nowhere"])
def test_a_level_that_cannot_be_is_refused_before_anything_is_loaded(capsys, chain):
    assert program("bench_decode").main(["--model", "nowhere", "--chain", chain]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: level '{chain.rpartition('+')[2].partition('=')[0]}'")
    assert said.count("\n") == 1


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
    assert found[2]["over target alone, prepared with prefill: median, least, most"] == pytest.approx([1, 1, 1])
    assert found[3]["levels"][0]["acceptance"] > 0
    assert found[4]["tokens_per_target_pass"] > 1
    assert all(e["machine"] and e["memory"]["target_bytes"] and e["data"] == "words" for e in found)


def test_prompts_are_decoded_together(saved_model, tmp_path, capsys):
    prompts, out = tmp_path / "words.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{"def f(" * n}"}}\n' for n in (1, 2, 3, 4, 5)))
    asked = ["--model", str(saved_model), "--chain", f"mxfp4+{saved_model}", "--prompts", str(prompts), "--dtype",
             "float32", "--max-new-tokens", "6", "--repeats", "1", "--count", "5", "--threads", "1"]
    assert program("bench_decode").main([*asked, "--batch-size", "2", "--json", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [e["contender"] for e in found] == [
        "stock greedy", "target alone, prepared", f"[mxfp4, {saved_model.name}]"]
    assert [e["runs"] for e in found] == [2, 2, 2]  # the fifth prompt fills no batch
    assert all(e["tokens_per_second_with_prefill"] > 0 and e["over target alone, prepared"] for e in found)
    assert "words: 4 prompts, batch size 2;" in capsys.readouterr().out
    assert program("bench_decode").main([*asked, "--batch-size", "3", "--quick"]) == 0
    prompts.write_text('{"prompt": "x"}\n')
    assert program("bench_decode").main([*asked, "--batch-size", "3"]) == 2
    assert "holds 1 prompts, which fill no batch of 3: lower --batch-size" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program("bench_decode").parse(["--batch-size", "0"])


def test_tokens_behind_the_end_of_a_row_do_not_count():
    rows = importlib.import_module("eval.rows").new_ids(torch.tensor([[9, 9, 1, 2, 0, 0], [9, 9, 1, 3, 1, 2]]), 2, {2})
    assert rows == [[1, 2], [1, 3, 1, 2]]


def test_the_help_names_where_the_table_is_explained(capsys):
    with pytest.raises(SystemExit):
        program("bench_decode").parse(["--help"])
    assert "Reading the table" in " ".join(capsys.readouterr().out.split())
    text = (Path(__file__).parents[2] / "eval" / "README.md").read_text(encoding="utf-8")
    told = text.partition("## Reading the table")[2].partition("\n## ")[0]
    columns = program("bench_decode.report").COLUMNS
    assert [name for name in columns if f"| {name} |" not in told] == []


def test_a_geometric_mean_weighs_halving_as_doubling():
    mean = program("bench_decode.report").geometric_mean
    assert mean([2.0, 0.5]) == pytest.approx(1)
    assert mean([]) is None
    assert math.isclose(mean([3.0]), 3.0)


def test_a_mixture_meets_all_of_stocks_ways(tmp_path):
    out = tmp_path / "out.jsonl"
    assert program("bench_decode").main(["--shape", "moe-tiny", "--quick", "--threads", "1", "--json", str(out)]) == 0
    found = {entry["contender"]: entry for entry in map(json.loads, out.read_text().splitlines())}
    assert len([name for name in found if name.startswith("stock greedy")]) == 3
    assert list(found)[-2:] == ["target alone, prepared", "MXFP4 cast alone, prepared"]
    assert all(entry["not_prepared"] is None for entry in found.values())
    assert all(0.26 < entry["memory"]["share_of_bfloat16"] < 0.27 for entry in found.values())  # 4.25 of 16 bits
