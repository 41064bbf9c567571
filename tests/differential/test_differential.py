"""Do random chains write what their target writes, and would the programs that ask this see it if they did not?

A short part of what `python -m tests.differential` runs for as long as one likes.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import pytest
import torch

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.differential import case as cases
from tests.differential import runs, twins
from tests.differential.case import draw, run
from tests.differential.interrupts import Bomb
from tests.differential.machine import run_machine
from tests.differential.reference import chosen, judge, may_be_chosen
from tests.differential.shrink import shrunk
from tests.differential.threads import traffic
from tests.differential.worlds import FORMATS, NAMES, draw_world, world_of

pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.filterwarnings("ignore"),
]
ASK = {"lengths": [5, 9], "seed": 3, "repeats": True, "new": 6}
LLAMA = {"name": "llama", "seed": 1, "dtype": "float32", "weights": "dense", "shape": {"vocab_size": 96}}
CASE = {"world": LLAMA, "ask": ASK, "engine": "cpu", "form": "generate", "levels": [["near", 0.02, 0], ["ngram"]],
        "config": {"num_draft_tokens": 3}}  # fmt: skip


def outcomes(seed: int, numbers: range) -> Counter:
    found: Counter = Counter()
    for number in numbers:
        case = draw(seed, number)
        outcome = runs.attempt(case)
        assert outcome.word != "wrong", f"seed {seed}, case {number}: {outcome.what}\n{json.dumps(case)}"
        found[outcome.word] += 1
    return found


def test_some_cases():
    assert outcomes(0, range(30))["right"] >= 15


@pytest.mark.slow
def test_more_cases():
    assert outcomes(1, range(100))["right"] >= 60


def test_some_state_machines():
    counted: Counter = Counter()
    assert run_machine("fixed", 5, counted) == ""
    assert counted["machine runs"] >= 5


@pytest.mark.slow
def test_more_state_machines():
    assert run_machine("fixed, slow", 15, Counter()) == ""


def test_a_case_is_drawn_again_by_its_number():
    assert [draw(4, n) for n in (0, 7, 95)] == [draw(4, n) for n in (0, 7, 95)]
    assert draw(4, 7) != draw(4, 8) != draw(5, 8)
    assert json.loads(json.dumps(draw(4, 7))) == draw(4, 7)


def test_every_architecture_and_format_is_drawn():
    chance = random.Random(0)
    worlds = [draw_world(chance) for _ in range(1500)]
    assert {world["name"] for world in worlds} == set(NAMES)
    assert {world["weights"] for world in worlds} == set(FORMATS)


CHANGES = {
    "another token": lambda new: [*new[:3], (new[3] + 1) % 96, *new[4:]],
    "one token less": lambda new: new[:-1],
    "one token more": lambda new: [*new, 5],
    "nothing": lambda new: [],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_wrong_rows_are_seen(change):
    world = world_of(LLAMA)
    assert run({**CASE, "levels": []}).word == "right"
    made = cases.CaseRun({**CASE, "levels": []})
    new = made._generate([])[0]
    prompt = made.prompts[0]
    told = {"seed": None, "stream": 0, "shown": [0] * 4 + prompt, "exact": False}
    assert judge(world, ASK, prompt, new, **told).wrong == ""
    assert judge(world, ASK, prompt, change(new), **told).wrong != ""


def test_a_chain_that_writes_something_else_is_seen(monkeypatch):
    assert run(CASE).word == "right"
    own = cases.CaseRun._generate

    def off_by_one(self, levels, bomb=None):
        written = own(self, levels, bomb)
        return [[*row[:-1], row[-1] ^ 1] for row in written] if levels else written

    monkeypatch.setattr(cases.CaseRun, "_generate", off_by_one)
    assert run(CASE).word == "wrong"


def test_a_tie_may_turn_on_what_a_filter_leaves_in():
    """Which tokens are typical follows from all logits: to move these two does not show it."""
    ask = {"sample": 3, "temperature": 1.0, "top_k": 0, "typical_p": 0.6}
    logits = torch.randn(12, generator=torch.Generator().manual_seed(21), dtype=torch.float64)
    rest = [1], 0, 7, 0, 1
    assert chosen(ask, logits, *rest) == 0
    assert may_be_chosen(ask, logits, 0.05, 6, 0, rest)
    assert not may_be_chosen(ask, logits, 1e-6, 6, 0, rest)


def test_a_failure_is_shrunk_to_what_it_needs():
    case = draw(0, 13)
    case["levels"] = [["near", 0.1, 0], ["mxfp4"], ["ngram"]]
    case["ask"] |= {"lengths": [4, 9, 1], "new": 9, "eos": [5]}
    small = shrunk(case, lambda one: ["mxfp4"] in one["levels"] and one["ask"]["new"] >= 3)
    assert (small["levels"], small["ask"]["lengths"], small["ask"]["new"]) == ([["mxfp4"]], [1], 3)
    assert small["world"]["name"] == "llama"
    assert "eos" not in small["ask"]


def test_counts_go_on_behind_those_of_an_earlier_run(tmp_path, capsys):
    file, end = tmp_path / "counts.json", time.monotonic() + 60
    assert [runs.cases(0, count, end, file) for count in (3, 2)] == [0, 0]
    kept = json.loads(file.read_text())
    assert kept["next"]["cases"] == 5
    assert sum(count for name, count in kept["counted"].items() if name.startswith("cases ")) == 5
    with pytest.raises(SystemExit, match="holds counts of seed 0, not of 1: name another file"):
        runs.cases(1, 1, end, file)


def test_a_machine_whose_model_writes_something_else_fails(monkeypatch):
    own = twins.call

    def wrong(model, ask, **words):
        rows = own(model, ask, **words)
        return [[*row[:-1], row[-1] ^ 1] for row in rows] if words.get("assistant_models") else rows

    monkeypatch.setattr("tests.differential.machine.call", wrong)
    assert "AssertionError" in run_machine("wrong", 4, Counter(), shrinks=False)


def test_a_bomb_goes_off_at_its_call():
    bomb = Bomb(2)
    assert [bomb.goes_off() for _ in range(4)] == [False, False, True, True]


@pytest.mark.slow
def test_eight_threads_with_changes_in_between():
    found = traffic(2.0, calls=3)
    assert found.wrong == []
    assert found.calls >= 8 * 3 * 3
    assert found.changes > 0
    threads, files, _ = zip(*found.sizes, strict=True)
    # Behind the first, what a process starts once is there but for a few; 72 calls would leave more than those.
    assert threads[-1] <= max(threads[:2]) + 3
    assert files[-1] <= max(files[:2]) + 3
