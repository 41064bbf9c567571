"""Does the benchmark of short calls count seconds beyond the target alone, and ids that differ?"""

from __future__ import annotations

import pytest
import torch
from programs import program

from hf_mlspec.speculation.stats import SpeculationStats


@pytest.fixture
def bench(from_the_root):
    return program("bench_call")


def test_a_line_for_every_contender_and_length(bench, capsys):
    assert bench.main(["--tokens", "2", "5", "--repeats", "1", "--thread-time"]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "draft" in line and "│" in line]
    assert [line.split("│")[1].strip() for line in lines] == ["2", "2", "5", "5"]
    assert "calls whose ids differ: 0" in said


def test_levels_are_compared_prompt_by_prompt(bench):
    found = bench.Turns({"alone": [1.0, 2.0, 4.0], "draft": [2.0, 2.5, 4.0]})
    assert found.ratio("draft") == 0.8
    assert found.more("draft") == 0.5


def test_other_ids_are_counted(bench, monkeypatch):
    monkeypatch.setattr(bench, "call", lambda model, ids, levels, tokens, clock: (1.0, ids + len(levels)))
    monkeypatch.setattr(bench.hf_mlspec, "last_stats", lambda model: SpeculationStats())
    prompts, contenders = [torch.zeros(1, 3)], {"alone": [], "draft": ["one"]}
    found = bench.take_turns(None, prompts, contenders, 8, 2, None)
    assert found.seconds == {"alone": [1.0, 1.0], "draft": [1.0, 1.0]}
    assert found.differing == 2 + bench._TO_LEARN


def test_a_target_needs_a_draft(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--target", "somewhere"])
    assert "--target and --draft go together" in capsys.readouterr().err
