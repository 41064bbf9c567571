"""Are levels found that costs speak against because they were measured beside a load, and is little lost by that?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated import Simulated, costs

from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.fixed_shapes import Captured, FixedController
from hf_mlspec.speculation.memory import LevelCosts
from hf_mlspec.speculation.plans import Situation, off

TARGET = costs(1.0, 2e-3)
CAST, DRAFT = LevelCosts("cast", costs(0.4, 1e-3), 0.85, own_cache=False), LevelCosts("draft", costs(0.1, 1e-4), 0.65)


def believed(level: LevelCosts, times: float) -> LevelCosts:
    """The level as it seems where its passes were timed beside a load."""
    return replace(level, costs=replace(level.costs, seconds=tuple(times * one for one in level.costs.seconds)))


@pytest.fixture(autouse=True)
def choosing_takes_no_time(monkeypatch):
    monkeypatch.setattr("hf_mlspec.speculation.controller.perf_counter", lambda: 0.0)


def calls(level: LevelCosts, told: LevelCosts, chance: float, rows: int, count: int = 12, tokens: int = 200, **how):
    """Of calls one behind another: seconds over those of the target alone, rounds of trials of costs, and the number
    of the call in which costs were found to be too high, None for never."""
    memory, over, tried = None, [], 0
    for number in range(count):
        machine = Simulated(TARGET, [level], lambda *_: chance, seed=number)
        controller = Controller(TARGET, [told], memory=memory, **how)
        seen, shown = [], []
        controller.on_disproved = lambda s=shown: s.append(1)
        original = controller.observe
        controller.observe = lambda *given, f=original, c=controller, s=seen, **more: (
            s.append(c.choice.of_costs), f(*given, **more))  # fmt: skip
        took = machine.decode(controller, rows, tokens)
        over.append(took / (tokens * TARGET.of(float(rows))))
        tried += sum(seen)
        if shown:
            return over, tried, number
        memory = controller.memory.kept()
    return over, tried, None


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("level", "chance", "times"), [(CAST, 0.95, 4.0), (CAST, 0.95, 8.0), (DRAFT, 0.8, 12.0),
                                                        (DRAFT, 0.8, 24.0)])  # fmt: skip
def test_a_level_that_seemed_too_dear_is_found_and_little_is_lost_until_then(level, chance, times, rows):
    over, tried, found = calls(level, believed(level, times), chance, rows)
    assert found is not None
    assert tried <= 2
    assert max(over) < 1.03  # seconds over those of the target alone


@pytest.mark.parametrize(("level", "chance"), [(believed(CAST, 4.0), 0.95), (believed(DRAFT, 20.0), 0.1)])
def test_a_level_that_is_as_dear_as_it_seems_is_timed_once(level, chance):
    over, tried, found = calls(level, level, chance, 1, count=20)
    assert found is None
    assert tried <= 2
    assert max(over) < 1.05
    assert sum(over) / len(over) < 1.01


def test_what_a_call_cannot_pay_is_not_tried():
    over, tried, found = calls(CAST, believed(CAST, 40.0), 0.95, 1)  # rounds that seem to take 17 of the target's
    assert (tried, found) == (0, None)
    assert max(over) < 1.01


def test_where_plans_follow_counts_costs_are_not_tried():
    _, tried, found = calls(CAST, believed(CAST, 4.0), 0.95, 1, by_clock=False)
    assert (tried, found) == (0, None)


def test_lookups_have_no_costs_that_could_be_wrong():
    lookup = LevelCosts("lookup", None, 0.02)
    _, tried, found = calls(lookup, lookup, 0.02, 1)
    assert (tried, found) == (0, None)


def test_a_clock_that_jumps_says_nothing_of_costs():
    controller, shown = trying(Controller(TARGET, [believed(CAST, 4.0)]))
    plan = controller.plan
    controller.observe([plan.most], [plan.most], [plan.most], 2.8)  # cold caches
    controller.observe([plan.most], [plan.most], [plan.most], -1.0)
    assert not shown


def test_the_first_round_of_a_trial_is_not_timed():
    controller, shown = trying(Controller(TARGET, [believed(CAST, 4.0)]))
    plan = controller.plan
    for seconds, found in ((1.4, False), (1.4, True)):
        controller.observe([plan.most], [plan.most], [plan.most], seconds)
        assert bool(shown) is found


def test_captured_rounds_of_a_level_that_seemed_too_dear_are_timed():
    controller, shown = trying(FixedController(TARGET, [believed(CAST, 4.0)], captures=Captured()))
    plan = controller.plan
    for _ in range(2):
        controller.observe([plan.most], [plan.most], [plan.most], 1.4)
    assert shown


def test_a_plan_that_is_questioned_and_found_best_again_is_questioned_later():
    controller = Controller(TARGET, [LevelCosts("draft", costs(0.1, 1e-4), 0.9)])
    controller.start(1)
    controller.memory.correct(off(1), 1, 1.0)
    controller.memory.spare, calm = -1e9, []  # no trials
    controller.choose(Situation([1000], 0.0, [[0]]))
    assert controller.plan.active
    for _ in range(3):
        controller._surprised()
        controller.choose(Situation([1000], 0.0, [[0]]))
        calm.append(controller.memory.kept().calm)
    assert calm == [2, 4, 4]
    controller._surprised()
    controller.choose(Situation([2], 0.0, [[50000]]))  # it would have much to read
    assert not controller.plan.active
    assert controller.memory.calm == 1


def trying(controller: Controller) -> tuple[Controller, list]:
    """A controller that has rows and much to spend, in a trial of costs; and what is told once it shows something."""
    shown = []
    controller.on_disproved = lambda: shown.append(1)
    controller.start(1)
    controller.memory.spare = controller.memory.capturing = 100.0
    for _ in range(8):
        controller.choose(Situation([1000], 0.0, [[0]]))
        if controller.choice.of_costs:
            assert controller.plan.active
            return controller, shown
        for _ in range(4):
            limits = [controller.plan.most]
            controller.observe(limits, limits, [0], controller.choice.forecast.seconds)
    raise AssertionError("no trial of costs")
