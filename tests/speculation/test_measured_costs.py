"""Are costs what a pass takes on an idle machine, although something else ran for a while when they were measured?"""

from __future__ import annotations

import pytest

from hf_mlspec.speculation import costs
from hf_mlspec.speculation.costs import LONG, PassCosts, measure


class Clock:
    """A machine of which a pass takes 1 second and .01 for every token, and 1e-5 for every token and slot. busy: from
    when until when passes take three times as long."""

    def __init__(self, busy: tuple[float, float] = (0.0, 0.0)):
        self.now, self.busy, self.ran = 0.0, busy, []

    def __call__(self) -> float:
        return self.now

    def run(self, tokens: int, slots: int) -> None:
        slow = 3.0 if self.busy[0] <= self.now < self.busy[1] else 1.0
        self.now += slow * (1.0 + 0.01 * tokens + 1e-5 * tokens * slots)
        self.ran.append((tokens, slots))


@pytest.fixture
def measured(monkeypatch):
    def found(clock: Clock, **options):
        monkeypatch.setattr(costs, "perf_counter", clock)
        return measure(clock.run, tokens=(1, 2, 4, 8, 16), **options)

    return found


@pytest.mark.parametrize("busy", [(0.0, 0.0), (5.5, 12.0), (9.0, 16.0)])
def test_a_program_that_runs_for_a_while_is_in_no_cost(busy, measured):
    found = measured(Clock(busy), budget=60.0)
    assert found.tokens == (1, 2, 4, 8, 16)
    assert found.seconds == pytest.approx([1.01, 1.02, 1.04, 1.08, 1.16], rel=1e-6)
    assert found.attention == pytest.approx(1e-5, rel=1e-6)
    assert any(one > 1.0 for one in found.spread) == (busy != (0.0, 0.0))


def test_a_first_pass_that_takes_longer_is_in_no_cost_and_no_spread(measured):
    """Where passes are captured, the first of each number of tokens is."""
    clock, first = Clock(), set()
    usual = clock.run

    def run(tokens: int, slots: int) -> None:
        usual(tokens, slots)
        clock.now += 0.0 if tokens in first else 5.0
        first.add(tokens)

    clock.run = run
    found = measured(clock, budget=60.0)
    assert found.seconds == pytest.approx([1.01, 1.02, 1.04, 1.08, 1.16], rel=1e-6)
    assert found.uncertainty == pytest.approx(0.0, abs=1e-6)


def test_measuring_ends_with_its_budget(measured):
    clock = Clock()
    found = measured(clock, budget=8.0)
    assert 2 <= len(found.tokens) < 5
    assert clock.now < 8.0 + 5 * 1.2  # one number of tokens, and attention
    clock = Clock()
    assert measured(clock, budget=0.0, long=False).tokens == (1, 2)
    assert all(slots == 0 for _, slots in clock.ran)
    assert max(slots for _, slots in _ran(measured)) == LONG


def _ran(measured) -> list[tuple[int, int]]:
    clock = Clock()
    measured(clock, budget=60.0)
    return clock.ran


def test_of_two_measurements_the_less_is_right():
    """Something else ran at either time. Costs of more tokens are never less than those of fewer."""
    first = PassCosts((1, 2, 8), (3.0, 3.5, 4.0), (0.0, 0.1, 0.2), 1e-6, measured=5.0, held=3.0)
    later = PassCosts((1, 8, 16), (3.5, 3.2, 9.0), (0.3, 0.4, 0.5), measured=9.0)
    least = first.least(later)
    assert (least.tokens, least.seconds, least.spread) == (
        (1, 2, 8, 16), (3.0, 3.2, 3.2, 9.0), (0.0, 0.1, 0.4, 0.5))  # fmt: skip
    assert (least.attention, least.measured, least.held) == (1e-6, 9.0, 0.0)
    assert PassCosts.from_dict(least.to_dict()).measured == 9.0


def test_costs_of_older_files_say_not_when_they_were_measured(measured):
    told = measured(Clock(), budget=60.0).to_dict()
    assert told["measured"] > 1e9
    del told["measured"], told["held"]
    assert PassCosts.from_dict(told).measured == 0.0


@pytest.mark.parametrize("name", ["measured", "held"])
@pytest.mark.parametrize("said", [-1.0, float("nan"), float("inf"), "soon", None])
def test_a_time_that_is_none_is_an_error(name, said):
    told = PassCosts((1,), (1.0,), (0.0,)).to_dict()
    with pytest.raises(ValueError, match=r"measured at|convert|float"):
        PassCosts.from_dict({**told, name: said})


def test_costs_of_many_tokens_are_as_much_less_as_those_that_were_timed_again():
    """What else ran at the time was in all of them; none is thought to be less than one of fewer tokens."""
    kept = PassCosts((1, 8, 32, 128), (4.0, 6.0, 16.0, 60.0), (0.0,) * 4, attention=0.5)
    scaled = kept.scaled(PassCosts((1, 8, 32), (2.0, 3.0, 4.0), (0.0,) * 3))
    assert (scaled.seconds, scaled.attention) == ((4.0, 6.0, 15.0, 15.0), 0.125)
    slower = kept.scaled(PassCosts((1, 32), (2.0, 50.0), (0.0,) * 2))
    assert slower == kept
