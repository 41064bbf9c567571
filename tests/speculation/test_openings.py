"""Does a call begin with what calls like it chose, choose anew when that is due or fails, and tell what it did?"""

from __future__ import annotations

import pytest

from hf_mlspec.speculation.forecast import Forecast
from hf_mlspec.speculation.openings import Openings
from hf_mlspec.speculation.plans import Plan
from hf_mlspec.speculation.rounds.steering import Steering
from hf_mlspec.speculation.search import Choice
from hf_mlspec.speculation.stats import LevelStats, SpeculationStats

OFF, FOUR = Plan((0,)), Plan((4,))


def choice(plan: Plan, seconds: float = 0.001) -> Choice:
    """Of one row; of four drafted tokens all are expected to be kept."""
    return Choice(plan, [plan.most], Forecast(1.0 + plan.most, seconds, seconds), off_speed=1000.0, best_speed=1000.0)


def test_the_first_call_chooses_and_later_ones_seldom():
    openings, chose = Openings(), []
    for number in range(30):
        if openings.begin(("alike",)) is None:
            chose.append(number)
            openings.learn(("alike",), choice(OFF), 0.001)
    assert chose == [0, 2, 5, 10, 19, 28]


def test_other_levels_are_questioned_soon():
    openings = Openings()
    for plan in (OFF, OFF, OFF, FOUR):
        while openings.begin(("alike",)) is not None:
            pass
        openings.learn(("alike",), choice(plan), 0.001)
    assert openings.begin(("alike",)).plan == FOUR
    assert openings.begin(("alike",)) is None
    assert openings.begin(("other",)) is None


def test_what_is_hardly_worse_than_another_choice_stays():
    """Two plans that are as good would else take turns, and each turn is a choice."""
    openings = Openings()
    openings.learn(("alike",), choice(FOUR), 0.001)
    for over, plan, patience in ((1.02, FOUR, 2), (1.0, FOUR, 4), (1.05, OFF, 1)):
        found = choice(OFF)
        found.over_usual = over
        openings.learn(("alike",), found, 0.001)
        assert (openings.usual(("alike",)), openings.patience(("alike",))) == (plan, patience)
    assert openings.usual(None) is None


def test_a_doubt_is_of_one_kind_of_call_or_of_all():
    openings = Openings()
    for like in (("a",), ("b",)):
        openings.learn(like, choice(OFF), 0.001)
    openings.doubt(("a",))
    assert openings.begin(("a",)) is None
    assert openings.begin(("b",)) is not None
    openings.learn(("a",), choice(OFF), 0.001)
    openings.doubt()
    assert openings.begin(("a",)) is openings.begin(("b",)) is None


def test_what_a_call_does_to_its_choice_stays_its_own():
    openings = Openings()
    openings.learn(("alike",), choice(FOUR), 0.001)
    openings.begin(("alike",)).limits[0] = 1
    assert openings.found["alike",].choice.limits == [4]


def test_what_is_chosen_again_and_again_is_questioned_later():
    """In a call that begins with it, too; "off", which tells nothing of levels, sooner, and at once what brought less.
    """
    openings, patience = Openings(), []
    for _ in range(5):
        openings.learn(("alike",), choice(FOUR), 0.001)
        patience.append(openings.patience(("alike",)))
    assert patience == [1, 2, 4, 8, 8]
    openings.agree(("alike",), choice(OFF))
    assert openings.patience(("alike",)) == 1
    openings.agree(("alike",), choice(FOUR))
    assert openings.patience(("alike",)) == 2
    openings.doubt(("alike",))
    assert openings.patience(("alike",)) == openings.patience(("other",)) == 1
    openings.agree(("other",), choice(FOUR))  # nobody has begun with anything
    for _ in range(5):
        openings.learn(("off",), choice(OFF), 0.001)
    assert openings.patience(("off",)) == 4


class Level:
    """A lookup that drafts nothing."""

    name = "level"
    stats = LevelStats("level")


class Target:
    """Has read all rows but for the last token."""

    lengths = (8,)


class Told:
    """A controller that stays with "off", and keeps what it is told."""

    seen, measuring = 0, 0.0

    def __init__(self):
        self.rounds, self.rested, self.choice, self.chosen = [], [], choice(OFF), 0

    def start(self, rows): ...

    def settle(self): ...

    def select(self, keep):
        self.kept = keep

    def stay(self, rows):
        return self.chosen > 0

    def choose(self, situation):
        self.chosen += 1
        self.choice = choice(OFF)

    def observe(self, limits, drafted, accepted, seconds, usual, own):
        self.rounds.append((own.plan, limits, drafted, accepted, usual))

    def observe_off(self, rounds, seconds):
        self.rested.append(rounds)


@pytest.fixture
def steered():
    """A steering whose call begins with four tokens, as an earlier one of 64 did; -> it and the controllers made."""
    made = []

    def make():
        made.append(Told())
        return made[-1]

    openings = Openings(choosing_seconds=0.0005)  # ten rounds of a millisecond, of which a twentieth goes to choosing

    def of(first: Plan):
        openings.learn((1, 7, 4, False), choice(first), 0.0005)
        steering = Steering(make, [Level()], [None], Target(), openings=openings)
        steering.start(1)
        return steering, made, openings

    return of


def rounds(steering: Steering, count: int, accepted: int, seconds: float = 0.001) -> tuple[list, SpeculationStats]:
    """So many rounds of one row; -> the tokens asked for in each."""
    stats, asked = SpeculationStats(), []
    for _ in range(count):
        limits = steering.limits([[0] * 9], [64])
        asked.append(limits[0])
        steering.observe(stats, limits, limits, [min(accepted, limits[0])], seconds)
    return asked, stats


def test_a_short_call_makes_no_controller(steered):
    for first in (OFF, FOUR):
        steering, made, _ = steered(first)
        asked, stats = rounds(steering, 10, accepted=4)
        steering.settle()
        assert asked == [first.most] * 10
        assert made == []
        assert stats.of_plan("level 4" if first.active else "off").rounds == 10


def test_a_settled_plan_is_kept_for_more_rounds(steered):
    steering, made, openings = steered(FOUR)
    openings.found[1, 7, 4, False].agreed = 1
    assert rounds(steering, 20, accepted=4)[0] == [4] * 20
    assert made == []
    asked, _ = rounds(steering, 2, accepted=4)
    assert [one.chosen for one in made] == [1]
    assert asked == [0, 0]
    assert openings.patience((1, 7, 4, False)) == 1  # it chose "off"


def test_what_a_call_did_without_a_controller_is_told_to_the_next_one(steered):
    steering, made, openings = steered(FOUR)
    rounds(steering, 3, accepted=2)
    steering.end()
    assert made == []
    after = Steering(steering.make, [Level()], [None], Target(), openings=openings)
    after.start(1)
    rounds(after, 12, accepted=4)  # no call begins with an earlier choice twice: it chooses at once
    assert [(plan, limits, accepted) for plan, limits, _, accepted, _ in made[0].rounds[:3]] == [(FOUR, [4], [2])] * 3
    assert openings.untold is None
    after.end()
    assert openings.untold is None  # it had a controller


def test_a_long_call_chooses_and_tells_of_what_it_did_before(steered):
    steering, made, _ = steered(OFF)
    asked, stats = rounds(steering, 14, accepted=4)
    assert asked == [0] * 14
    assert [one.chosen for one in made] == [1]
    steering.settle()
    assert sum(made[0].rested) + len(made[0].rounds) == 14
    assert stats.of_plan("off").rounds == 14


def test_rounds_that_bring_less_are_questioned_at_once(steered):
    steering, made, openings = steered(FOUR)
    asked, _ = rounds(steering, 6, accepted=0)
    assert 2 <= asked.count(4) <= 4
    assert [plan for plan, *_ in made[0].rounds][: asked.count(4)] == [FOUR] * asked.count(4)
    assert openings.begin((1, 7, 4, False)) is None


@pytest.mark.parametrize("found", [FOUR, OFF])
def test_calls_go_on_with_what_was_questioned_and_found_best_again(steered, found, monkeypatch):
    """Rounds that bring less on a busy machine, or in a hard passage, would else make the next call choose, too."""
    steering, made, openings = steered(FOUR)
    monkeypatch.setattr(Told, "choose", lambda self, _: setattr(self, "choice", choice(found)))
    like = (1, 7, 4, False)
    openings.found[like].until = 4
    rounds(steering, 6, accepted=0)
    assert len(made) == 1
    steering.end()
    assert (openings.begin(like) is not None) == (found == FOUR)


def test_a_call_that_ends_before_what_was_questioned_is_chosen_leaves_it_to_the_next_one(steered):
    steering, made, openings = steered(FOUR)
    openings.found[1, 7, 4, False].until = 4
    while not steering._doubts:
        rounds(steering, 1, accepted=0)
    steering.end()
    assert made == []
    assert openings.begin((1, 7, 4, False)) is None


def test_rows_that_leave_are_told(steered):
    steering, made, _ = steered(FOUR)
    rounds(steering, 2, accepted=4)
    steering.select([0])
    assert made[0].kept == [0]
    assert len(made[0].rounds) == 2


def test_while_the_target_reads_the_prompt_nothing_is_chosen(steered):
    steering, made, _ = steered(FOUR)
    stats = SpeculationStats()
    assert steering.limits([[0] * 9], [0]) == [0]
    steering.observe(stats, [0], [0], [0], 0.1)
    assert made == []
    assert (stats.of_plan("off").rounds, stats.of_plan("off").timed) == (1, 0)
    assert rounds(steering, 3, accepted=4)[0] == [4, 4, 4]


def test_what_calls_without_levels_took_is_expected_of_the_next_one():
    """Not at once: one call may have been disturbed."""
    begun = choice(OFF)
    for _ in range(12):
        begun.correct_off(100, 0.25)  # 400 tokens a second, where 1000 were expected
    assert begun.off_speed == pytest.approx(400.0, rel=0.01)
    assert begun.forecast.seconds == pytest.approx(0.0025, rel=0.01)
    assert begun.forecast.by_costs == 0.001
    begun.correct_off(0, 0.0)
    begun.correct_off(100, 1e6)
    assert begun.off_speed > 280.0


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
@pytest.mark.parametrize("first", [OFF, FOUR], ids=["off", "four tokens"])
def test_a_clock_that_jumps_is_in_no_speed(steered, first, jump):
    """The round counts, and its time does not; all are told to the controller."""
    steering, made, _ = steered(first)
    stats = SpeculationStats()
    for seconds in (0.001, 0.001, jump, 0.001, jump, *[0.001] * 15):
        limits = steering.limits([[0] * 9], [64])
        steering.observe(stats, limits, limits, limits, seconds)
    steering.settle()
    assert sum(plan.rounds for plan in stats.plans.values()) == 20
    assert sum(plan.timed for plan in stats.plans.values()) == 18
    assert sum(plan.seconds for plan in stats.plans.values()) == pytest.approx(0.018)
    assert sum(made[0].rested) + len(made[0].rounds) == 20
