"""Is as much learned of rounds that are told together as of each by itself?"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from simulated import costs

from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.estimates import MOST, Counted, PairEstimate
from hf_mlspec.speculation.forecast import Forecast
from hf_mlspec.speculation.memory import LevelCosts
from hf_mlspec.speculation.plans import Plan, Situation

LEVELS = [LevelCosts("cast", costs(3e-4, 1e-5), 0.85), LevelCosts("draft", costs(5e-5, 1e-6), 0.6)]
TARGET_COSTS = costs(1e-3, 1e-5)


def chosen(rows: int) -> Controller:
    """A controller that has chosen drafts of both levels, whatever it found best."""
    made = Controller(TARGET_COSTS, LEVELS)
    made.start(rows)
    made.choose(Situation([100] * rows, 10.0, [[0] * rows for _ in LEVELS]))
    made.choice.plan, made.choice.limits, made.choice.trial = Plan((4, 2)), [4] * rows, False
    return made


def rounds(rows: int, count: int, dice: random.Random) -> list[tuple]:
    """Drafted and accepted of every row, and seconds."""
    found = []
    for _ in range(count):
        drafted = [dice.randint(1, 4) for _ in range(rows)]
        found.append((drafted, [dice.randint(0, n) for n in drafted], dice.uniform(1e-3, 2e-3)))
    return found


def told(made: Controller) -> tuple[list[list[float]], list]:
    """All that is counted, and what is known of rows."""
    lines = []
    for _, pair in sorted(made.memory.pairs.items()):
        all_ = [pair.total, *pair.kept, *pair.reached]
        lines.append([number for one in all_ for number in (one.tried, one.kept)] + [pair.idle])
    return lines, [made.rows.gained, [(row.tried, row.kept) for row in made.rows.rows]]


@pytest.mark.parametrize("rows", [1, 3])
def test_rounds_that_are_told_together_teach_what_single_ones_do(rows):
    single, together = chosen(rows), chosen(rows)
    dice = random.Random(rows)
    for drafted, accepted, seconds in rounds(rows, 4, dice):
        for made in (single, together):
            for r in range(rows):
                made.observe_inner(0, 2, 2, min(accepted[r], 2))
            made.observe([4] * rows, drafted, accepted, seconds)
        single.settle()
    assert together._untold.rounds  # they wait until somebody asks
    (pairs, known), (all_pairs, all_known) = told(single), told(together)
    assert len(pairs) == 2
    assert all_pairs == [pytest.approx(line) for line in pairs]
    assert all_known[0] == known[0]
    assert all_known[1] == [pytest.approx(row) for row in known[1]]
    assert together.memory.spare == pytest.approx(single.memory.spare)
    (ratio,), (of_all,) = single.memory.ratios.values(), together.memory.ratios.values()
    assert (of_all.tried, of_all.kept) == (4, pytest.approx(ratio.kept, rel=0.2))  # single ones tell of the pace, too


def test_rounds_do_not_wait_for_ever():
    made = chosen(2)
    for drafted, accepted, seconds in rounds(2, 32, random.Random(0)):
        made._lost = 0.0
        made.observe([4, 4], drafted, accepted, seconds)
    assert not made._untold.rounds


def test_a_choice_is_made_by_all_that_was_told():
    made = chosen(1)
    for _ in range(20):
        made._lost = 0.0
        made.observe([4], [4], [0], made.forecast.seconds)
    assert made.best_of(Situation([100], 10.0, [[0], [0]])).plan.lengths[0] == 0


def test_rounds_of_another_choice_are_told_apart():
    """Seconds count for the plan whose they were."""
    made = chosen(1)
    other = made.best_of(Situation([100], 10.0, [[0], [0]]))
    other.plan, other.limits = Plan((0, 3)), [3]
    made.observe([4], [4], [4], 1.5 * made.forecast.seconds)
    made.observe([3], [3], [1], 0.6 * other.forecast.seconds, True, other)
    assert {active for active, _, _ in made.memory.ratios} == {(0, 1), (1,)}


def test_many_observations_at_once_are_worth_no_more_than_a_window():
    one = Counted(24.0)
    one.add(100, 50)
    assert (one.tried, one.kept) == (24.0, 12.0)


def test_drafts_longer_than_what_is_told_apart_count_as_so_many():
    one, other = PairEstimate(0.5), PairEstimate(0.5)
    for _ in range(3):
        one.observe(2 * MOST, 2 * MOST, MOST + 3)
    assert other.observe_all([(2 * MOST, 2 * MOST, MOST + 3, 3)], 0) == (3 * MOST, 3 * MOST)
    assert other == one


def test_what_rounds_bring_is_expected_of_the_next_ones():
    """A text that gets easier as it goes on brings more than its mean; what is chosen by chances stays as it was."""
    made, again = chosen(1), chosen(1)
    made.choice.by_chances = again.choice.by_chances = 2.0
    for one, kept in ((made, [4, 4, 1] * 12), (again, [2] * 36)):
        for accepted in kept:
            one._lost = 0.0
            one.observe([4], [4], [accepted], one.forecast.seconds)
    assert made.memory.gain(Plan((4, 2)), 1) == pytest.approx(1.4, abs=0.05)  # 108 for 72, beside a prior of 16
    assert again.memory.gain(Plan((4, 2)), 1) == pytest.approx(1.0)
    assert made.memory.gain(Plan((0, 2)), 1) == made.memory.gain(Plan((4, 2)), 4) == 1.0
    assert made.memory.kept().gain(Plan((4, 2)), 1) == made.memory.gain(Plan((4, 2)), 1)
    made.memory.pairs = again.memory.pairs
    best, usual = (one.best_of(Situation([100], 10.0, [[0], [0]])) for one in (made, again))
    assert best.plan == usual.plan
    expected = 1.0 + made.memory.gain(best.plan, 1) * best.by_chances
    assert best.forecast.tokens == pytest.approx(expected)
    assert usual.forecast.tokens == pytest.approx(1.0 + usual.by_chances)


def test_a_gain_is_bounded_and_of_whole_rounds_alone():
    made = chosen(1)
    made.choice.by_chances = 0.1
    for _ in range(200):
        made._lost = 0.0
        made.observe([4], [4], [4], made.forecast.seconds)
    assert made.memory.gain(Plan((4, 2)), 1) == 2.0
    cut = chosen(1)
    cut.choice.by_chances = 4.0
    cut.observe([1], [1], [0], cut.forecast.seconds)  # the row ends
    cut.settle()
    assert cut.memory.gains == {}


def test_a_choice_that_takes_long_is_made_where_as_much_was_lost():
    """Rounds of microseconds do not wait for a choice whenever two of them bring nothing."""
    asked = []
    for took in (0.0, 1.0, 5.0):
        made = chosen(1)
        made.choice.forecast = Forecast(4.0, 1e-3, 1e-3)
        made._took, made._left = took * 1e-3, 100
        for _ in range(40):
            made.observe([4], [4], [0], 1e-3)  # .65 of a round is lost
            asked.append(took)
            if made._left == 0:
                break
    assert [asked.count(took) for took in (0.0, 1.0, 5.0)] == [4, 7, 31]


def test_rounds_that_were_predicted_by_other_costs_say_nothing_of_these():
    """Costs were measured anew since a call began with its choice."""
    before = chosen(1)
    first, off = before.choice, replace(before.choice, plan=Plan((0, 0)), limits=[0])
    for target, known in ((TARGET_COSTS, {(0, 1), ()}), (costs(5e-4, 5e-6), set())):
        made = Controller(target, LEVELS, memory=before.memory.kept())
        made.start(1)
        made.observe([4], [4], [2], first.forecast.seconds, True, first)
        made.settle()
        made.choice = off
        made.observe_off(4, 4e-3)
        assert {active for active, _, _ in made.memory.ratios} == known
        assert made.memory.pairs[0, -1].total.tried == 3  # of the text they tell as much


def test_a_row_that_has_ended_takes_no_token_from_what_others_bring():
    made = chosen(12)
    made.choice.by_chances = 22.0
    made._lost = 0.0
    made.observe([4] * 11 + [0], [4] * 11 + [0], [2] * 11 + [-1], made.forecast.seconds)  # of captured rounds
    made.settle()
    (gain,) = made.memory.gains.values()
    assert (gain.tried, gain.kept) == (22.0, 22.0)
