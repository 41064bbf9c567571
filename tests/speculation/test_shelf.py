"""Are levels that lose left out, and tried again for a small share of the time?"""

from __future__ import annotations

from hf_mlspec.speculation.shelf import Outlook, Shelf, Shelving, levels_kept
from hf_mlspec.speculation.stats import SpeculationStats

SECONDS, TOKENS = 2.0, 100


def call(shelf: Shelf, lost: float, tokens: int = TOKENS, prompt: int = 7) -> bool:
    """A call of two seconds where it leaves its levels out, and of as many more as it is said to lose; whether it did.
    """
    one = Shelving(shelf, lambda lengths, count: Outlook(lost, (TOKENS - 8) / (SECONDS - 0.5)))
    one.left_out = one.leaves_out([prompt], tokens)
    prefill = {"prefill_seconds": 0.5, "prefill_tokens": 8}
    seconds = SECONDS if one.left_out else SECONDS + lost
    stats = SpeculationStats(new_tokens=tokens, seconds=seconds, target_passes=93, **prefill)
    one.settle(stats)
    assert bool(stats.plans) == one.left_out
    if one.left_out:
        plan = stats.plans["off"]
        assert (plan.rounds, plan.tokens, plan.seconds) == (93, max(tokens - 8, 0), 1.5 if tokens > 8 else 0.0)
        assert plan.expected_tokens == plan.tokens
        assert plan.expected_seconds == plan.off_seconds >= 0.0
    return one.left_out


def test_levels_that_gain_are_kept():
    shelf = Shelf()
    assert not any(call(shelf, -0.1) for _ in range(3))
    assert shelf == Shelf()


def test_a_hundredth_of_the_time_goes_to_trials():
    shelf = Shelf()
    with_levels = [not call(shelf, 1.0) for _ in range(500)]
    assert 8 <= sum(with_levels) <= 10  # each loses as much as a hundredth of fifty calls
    assert with_levels.index(True) == 48  # a twentieth of a second is given in advance


def test_a_trial_that_lost_more_than_expected_is_paid_for():
    shelf = Shelf(spare=0.1)
    one = Shelving(shelf, lambda lengths, count: Outlook(0.05, 50.0))
    assert not one.leaves_out([7], TOKENS)
    one.settle(SpeculationStats(new_tokens=TOKENS, seconds=5.0))
    assert shelf.spare == 0.1 - (5.0 - TOKENS / 50.0)
    assert call(shelf, 0.01)


def test_what_is_expected_is_asked_again_behind_a_call_with_levels():
    shelf = Shelf()
    assert call(shelf, 1.0)
    assert call(shelf, -1.0)  # not asked
    assert call(shelf, 1.0, prompt=4000)  # another kind of call
    assert not call(shelf, -1.0, tokens=4 * TOKENS)
    assert not call(shelf, -1.0)


def test_a_call_that_ends_in_its_first_round_counts_nothing_more():
    assert call(Shelf(), 1.0, tokens=3)


def test_calls_that_are_about_the_levels_keep_them():
    shelf = Shelf()
    with levels_kept(), levels_kept():
        assert not call(shelf, 1.0)
    assert shelf == Shelf()
    assert call(shelf, 1.0)
