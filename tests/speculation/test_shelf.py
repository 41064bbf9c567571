"""Are levels that lose left out, and tried again for a small share of the time?"""

from __future__ import annotations

from hf_mlspec.speculation.shelf import Outlook, Shelf, Shelving
from hf_mlspec.speculation.stats import SpeculationStats

SECONDS, TOKENS = 2.0, 100


def call(shelf: Shelf, lost: float, tokens: int = TOKENS) -> bool:
    """A call of two seconds where it leaves its levels out; whether it did."""
    asked = []
    one = Shelving(shelf, lambda lengths, count: asked.append(count) or Outlook(lost, 50.0))
    left_out = one.leaves_out([7], tokens)
    prefill = {"prefill_seconds": 0.5, "prefill_tokens": 8}
    stats = SpeculationStats(new_tokens=tokens, seconds=SECONDS, target_passes=93, **prefill)
    one.settle(stats)
    assert bool(stats.plans) == left_out
    if left_out:
        plan = stats.plans["off"]
        assert (plan.rounds, plan.tokens, plan.seconds) == (93, tokens - 8, 1.5)
        assert plan.expected_seconds == plan.off_seconds == (tokens - 8) / 50.0
    return left_out


def test_levels_that_gain_are_kept():
    shelf = Shelf()
    assert not any(call(shelf, -0.1) for _ in range(3))
    assert shelf == Shelf()


def test_a_hundredth_of_the_time_goes_to_trials():
    shelf = Shelf()
    with_levels = [not call(shelf, 1.0) for _ in range(500)]
    assert 8 <= sum(with_levels) <= 10  # each loses as much as a hundredth of fifty calls
    assert with_levels.index(True) == 50


def test_what_is_expected_is_asked_again_behind_a_call_with_levels():
    shelf = Shelf()
    assert call(shelf, 1.0)
    assert call(shelf, -1.0)  # not asked
    assert not call(shelf, -1.0, tokens=4 * TOKENS)  # another kind of call
    assert not call(shelf, -1.0)
