"""Does the comparison of two drafts count what it is given, bound the difference, and refuse what it cannot be?"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pairs(monkeypatch):
    pytest.importorskip("tomllib", reason="plans need Python 3.11 or later")
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("eval.acceptance_pairs")


def test_shares_are_of_all_tokens(pairs):
    found = pairs.compared([[1, 1, 1, 0], [1]], [[1, 0, 0, 0], [1]])
    assert (found["prompts"], found["tokens"]) == (2, 5)
    assert found["acceptance"] == pytest.approx(4 / 5)
    assert found["acceptance_against"] == pytest.approx(2 / 5)
    assert found["difference"] == pytest.approx(2 / 5)
    assert 0 <= found["lower_bound"] <= found["difference"]


def test_prompts_on_which_both_fail_alike_do_not_widen_the_bound(pairs):
    """Unpaired, the spread between prompts would drown a difference of one token each."""
    mine = [[1] * 99 + [0] if number % 2 else [1] * 9 + [0] * 91 for number in range(50)]
    its = [[*row[:-2], 0, 0] if number % 2 else [*row[:8], *[0] * 92] for number, row in enumerate(mine)]
    found = pairs.compared(mine, its)
    assert found["difference"] == pytest.approx(0.01)
    assert found["lower_bound"] == pytest.approx(0.01)


def test_the_bound_is_that_of_a_normal_mean(pairs):
    """Of 400 prompts with a difference of +1 or -1 each in 10 tokens: mean 0, deviation of the mean 0.1 / 20."""
    mine = [[1] * 9 + [number % 2] for number in range(400)]
    its = [[1] * 9 + [1 - number % 2] for number in range(400)]
    assert pairs.compared(mine, its)["lower_bound"] == pytest.approx(-1.645 * 0.1 / 20, abs=0.0008)


@pytest.mark.parametrize(("mine", "its"), [([[1, 0]], [[1]]), ([[1]], [[1], [1]]), ([[]], [[]]), ([], [])])
def test_drafts_without_the_same_tokens_are_refused(mine, its, pairs):
    with pytest.raises(ValueError, match=r"a verdict for every token|zip\(\) argument"):
        pairs.compared(mine, its)


@pytest.mark.parametrize(("change", "words"), [
    ({"draft": "w4a8"}, "draft is 'w4a8', choose \"mxfp4\", \"nested4\""),
    ({"draft": "mxfp4"}, "draft and against are both 'mxfp4'"),
    ({"margin": 1.5}, "margin is 1.5, give a share"),
    ({"model": "{models}/nowhere"}, "nowhere holds no config.json"),
])
def test_a_pair_that_cannot_be_is_refused(change, words, pairs, saved_model, tmp_path):
    from eval.plan import Places, PlanError

    asked = {"name": "one", "model": str(saved_model), "draft": "nested4a8", **change}
    with pytest.raises(PlanError, match=words):
        pairs.pair_units([pairs.Pair(**asked)], [], 8, Places(tmp_path, tmp_path, "demo"), Path("plan.toml"))
