"""Does eval/bench_auto measure every cell in every way, go on where it stopped, and say what the cells mean?"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from programs import needs_plans, program, run_plan, words, write_words

pytestmark = [needs_plans, pytest.mark.plans, pytest.mark.usefixtures("from_the_root")]
CONFIGS = Path(__file__).resolve().parents[2] / "eval" / "configs"
PLAN = """
name = "toy"
model = "{models}"
dtype = "float32"
repeats = 2
lengths = [1, 2]
long = 40
cells = [
  {chain = "both", data = "words", new_tokens = 6},
  {chain = "both", data = "words", batch = 2, new_tokens = 6, temperature = 1.0, prompt = "long"},
  {chain = "random", data = "words", new_tokens = 5},
]

[[chains]]
name = "both"
levels = ["mxfp4", "prompt_lookup"]

[[chains]]
name = "random"
levels = ["random:{models}"]

""" + words(5)
CELLS = ["both.words.b1.n6.greedy.short", "both.words.b2.n6.t1.long", "random.words.b1.n5.greedy.short"]


@pytest.fixture
def bench(tmp_path, saved_model, capsys):
    """Runs the program on five prompts: -> exit status, what it prints, what it says on stderr, its lines."""
    prompts = ("def f(", "a", "class A:", "x = 1", "How many?")
    write_words(tmp_path, ({"prompt": prompt} for prompt in prompts))
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")

    def run(*options: str):
        status, found = run_plan("bench_auto", tmp_path, saved_model, "--device", "cpu", "--threads", "1", *options)
        said = capsys.readouterr()
        return status, said.out, said.err, found

    run.results, run.plan = tmp_path / "results", tmp_path / "plan.toml"
    return run


def test_every_cell_is_decoded_in_every_way(bench):
    status, out, _, found = bench()
    assert status == 0
    assert [row["cell"] for row in found] == CELLS
    greedy, sampled, random = found
    sweep = [f"{name} {length}" for name in ("mxfp4", "prompt_lookup") for length in (1, 2)]
    sweep += [f"mxfp4 {length} + prompt_lookup {length}" for length in (1, 2)]
    assert [sorted(take) for take in greedy["takes"]] == [sorted(["alone", "auto", *sweep])] * 2
    folder = random["levels"][0]
    assert folder.startswith("random-")
    assert set(random["takes"][0]) == {"alone", "auto", f"{folder} 1", f"{folder} 2", "stock"}
    assert [(row["rows"], row["rows_differing"]) for row in found] == [(2, 0), (4, None), (2, 0)]
    assert {take["tokens"] for takes in sampled["takes"] for take in takes.values()} == {12}  # no row ends early
    assert sampled["prompt_tokens"] == 2 * 2 * 40
    assert all(row["asked"]["plan"]["repeats"] == 2 and row["machine"]["commit"] is not None for row in found)
    assert [line.split(" | ")[0] for line in out.splitlines() if line.startswith("| ")][1:] == [
        f"| {cell}" for cell in CELLS]
    assert "3 of 3 cells are measured." in out
    assert "differ between auto and the target alone: 0 of 4" in out


def test_costs_are_probed_in_an_empty_cache_of_the_cell(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path / "cache"))
    (row,) = bench("--only", CELLS[0], "--quick")[3]
    assert row["probe_seconds"] == pytest.approx(max(row["first_call_seconds"] - row["second_call_seconds"], 0.0))
    assert row["probe_seconds"] > 0
    assert not (tmp_path / "cache").exists()
    assert sum(plan["rounds"] for plan in row["plans"].values()) > 0


def test_shards_cover_everything_once_and_a_second_run_measures_nothing(bench):
    first = bench("--quick", "--shard", "0/2")
    assert [row["cell"] for row in first[3]] == CELLS[::2]
    assert "2 of 3 cells are measured." in first[1]
    both = bench("--quick", "--shard", "1/2")
    assert sorted(row["cell"] for row in both[3]) == sorted(CELLS)
    again = bench("--quick", "--shard", "1/2")
    assert again[3] == both[3]
    assert bench("--table")[1] == again[1] == both[1]


def test_cells_that_begin_too_late_are_left_for_the_next_run(bench):
    assert bench("--quick", "--only", CELLS[0], "--minutes", "0")[3] == []
    assert [row["cell"] for row in bench("--quick", "--only", CELLS[0], "--minutes", "5")[3]] == CELLS[:1]


def test_only_some_cells(bench):
    assert [row["cell"] for row in bench("--quick", "--only", "greedy")[3]] == CELLS[::2]
    status, _, err, _ = bench("--only", "greedy", "--only", "b64")
    assert (status, err) == (2, f"error: --only is 'b64', which no cell holds; the first is {CELLS[0]}\n")


def test_results_of_another_run_are_not_mixed_in(bench):
    bench("--quick", "--only", CELLS[0])
    status, _, err, found = bench("--only", CELLS[0])
    assert status == 2
    assert "plan.repeats: 1 -> 2" in err
    assert "another folder as --results" in err
    assert len(found) == 1


def test_a_difference_is_the_exit_status(bench):
    (row,) = bench("--quick", "--only", CELLS[0])[3]
    file = next(bench.results.glob("*.jsonl"))
    file.write_text(json.dumps({**row, "rows_differing": 1}) + "\n")
    status, out, _, _ = bench("--quick", "--only", CELLS[0])
    assert status == 1
    assert "differ between auto and the target alone: 1 of 1" in out
    assert bench("--table")[0] == 1


@pytest.mark.parametrize(("was", "now", "said"), [
    ('chain = "random", data', 'chain = "other", data', "chain is 'other', choose one of both, random"),
    ("batch = 2", "batch = 0", "batch and new_tokens must be at least 1"),
    ('chain = "random", data = "words", new_tokens = 5', 'chain = "both", data = "words", new_tokens = 6', "2 tables"),
    ("repeats = 2", "repeats = 0", "repeats holds 0"),
    ('levels = ["random:{models}"]', 'levels = ["random:{models}/no"]', "holds no config.json"),
    ('levels = ["mxfp4", "prompt_lookup"]', 'levels = ["mxfp5"]', "chain 'both': "),
    ("long = 40", "long = 510", "exceed the target's 512 positions"),
])
def test_what_no_plan_can_say(bench, was, now, said):
    assert was in PLAN
    bench.plan.write_text(PLAN.replace(was, now), encoding="utf-8")
    status, _, err, found = bench("--quick", "--only", "long") if was.startswith("long") else bench("--quick")
    assert (status, found) == (2, [])
    assert said in err


def test_ratios_are_medians_of_pairs():
    lines = program("bench_auto.lines")

    def take(**rates):
        return {name.replace("_", " "): {"tokens": rate, "seconds": 1.0} for name, rate in rates.items()}

    takes = [take(alone=100, auto=120, a_2=150, stock=60), take(alone=50, auto=50, a_2=40, stock=50),
             take(alone=10, auto=9, a_2=12, stock=3)]
    plan = {"rounds": 3, "tokens": 30, "seconds": 2.0, "expected_tokens": 40, "expected_seconds": 2.0}
    found = lines.ratios({"takes": takes, "plans": {"off": plan, "a 2": {**plan, "rounds": 1}}})
    assert found["auto_over_alone"] == 1.0
    assert (found["best_fixed"], found["auto_over_best"], found["auto_over_stock"]) == ("a 2", 0.8, 2.0)
    assert (found["predicted"], found["measured"]) == (20.0, 15.0)
    assert lines.frequent({"off": plan, "a 2": {**plan, "rounds": 1}}) == "off (75%), a 2 (25%)"
    slow = lines.ratios({"takes": [take(alone=10, auto=9, a_2=8)], "plans": {}})
    assert (slow["best_fixed"], slow["predicted_over_measured"]) == ("alone", None)


def test_the_verdict_counts_slow_cells_by_length():
    lines = program("bench_auto.lines")

    def row(name, ratio, new_tokens):
        return {"cell": name, "auto_over_alone": ratio, "auto_over_best": ratio, "auto_over_stock": None,
                "predicted_over_measured": None, "new_tokens": new_tokens, "rows": 2, "rows_differing": 0}

    said = list(lines.verdict([row("a", 0.96, 64), row("b", 0.96, 8), row("c", 4.0, 256), row("d", 0.94, 32)], 9))
    assert said[0] == "4 of 9 cells are measured."
    mean = math.prod([0.96, 0.96, 4.0, 0.94]) ** 0.25
    assert said[1] == f"- auto / alone: geometric mean {mean:.3f}, least 0.940, most 4.000 (4 cells)"
    assert "- auto / alone below 0.97, 64 new tokens or more: 1 of 2 cells" in said
    assert "- auto / alone below 0.95, fewer: 1 of 2 cells" in said
    assert "- worst cells, auto / alone: d 0.940, a 0.960, b 0.960, c 4.000" in said
    assert list(lines.verdict([], 9)) == ["0 of 9 cells are measured."]


RARE = {"mxfp4-lookup", "ngram"}


@pytest.mark.parametrize(("name", "cells", "once"), [("auto_code76m", 48, set()), ("auto_code21m", 36, RARE)])
def test_the_plan_has_every_value_of_every_axis_several_times(name, cells, once):
    plan = program("bench_auto.plan").read_plan(CONFIGS / f"{name}.toml")
    assert len(plan.cells) == cells
    values = {"batch": {1, 4, 8, 16, 32}, "data": {"humaneval", "gsm8k", "mtbench", "prose"},
              "temperature": {0.0, 1.0}, "new_tokens": {8, 32, 256}, "prompt": {"short", "long"},
              "chain": {chain.name for chain in plan.chains}}
    for axis, asked in values.items():
        counted = Counter(getattr(cell, axis) for cell in plan.cells)
        assert set(counted) == asked
        assert min(count for value, count in counted.items() if value not in once) >= 4
