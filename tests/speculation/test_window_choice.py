"""Does a controller let levels see a part of the cache where that pays, and all of it where that drafts better?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulated import Simulated, costs

from hf_mlspec.speculation import controller
from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.estimates import PairEstimate
from hf_mlspec.speculation.memory import LevelCosts, Memory
from hf_mlspec.speculation.plans import TARGET, Choices, Plan, names_of

SEEN = 1088
TARGET_COSTS = replace(costs(30e-3, 1e-4), attention=6e-7)  # of a 0.5B shape on two cores: 5 ms behind 8,192 slots
DRAFT_COSTS = replace(costs(7e-3, 1e-4), attention=6e-7)


def twins(*levels: LevelCosts) -> list[LevelCosts]:
    """Each level, and again with the window."""
    count = len(levels)
    whole = [replace(level, twin=index + count) for index, level in enumerate(levels)]
    views = [replace(level.costs, most_slots=SEEN) for level in levels]
    return whole + [replace(level, twin=index, costs=views[index]) for index, level in enumerate(levels)]


CAST = LevelCosts("cast", DRAFT_COSTS, prior=0.85, own_cache=False)
TINY = LevelCosts("tiny", replace(costs(1e-3, 1e-5), attention=1e-7), prior=0.65, own_cache=False)


def windowed(plan: Plan) -> bool:
    return plan.split()[1]


def test_slots_beyond_the_window_cost_nothing():
    seeing = replace(DRAFT_COSTS, most_slots=SEEN)
    assert seeing.of(4, 8192) == seeing.of(4, SEEN) == DRAFT_COSTS.of(4, SEEN) < DRAFT_COSTS.of(4, 8192)
    assert seeing.of(4, 100) == DRAFT_COSTS.of(4, 100)


def test_a_view_is_no_measurement():
    seeing = replace(DRAFT_COSTS, most_slots=SEEN)
    assert PassCosts.from_dict(seeing.to_dict()) == DRAFT_COSTS


def test_all_levels_of_a_plan_share_the_window():
    foreign = replace(CAST, joined=False)
    assert Choices(twins(CAST, TINY), SEEN).at(SEEN) == ((0,), (1,), (0, 1))
    assert Choices(twins(CAST, TINY), SEEN).at(8192) == ((0,), (1,), (0, 1), (2,), (3,), (2, 3))
    assert Choices(twins(foreign, TINY), SEEN).at(8192) == ((0,), (0, 1), (2,), (2, 3))
    assert Choices([CAST, TINY]).at(8192) == ((0,), (1,), (0, 1))


def test_levels_that_can_have_no_window_are_weighed_once():
    lookup, (cast, seeing) = LevelCosts("lookup", None, prior=0.3), twins(CAST)
    assert Choices([cast, lookup, seeing, lookup], SEEN).at(8192) == ((0,), (1,), (0, 1), (2,), (2, 3))
    assert Choices([TINY, lookup, TINY, lookup], SEEN).at(8192) == ((0,), (1,), (0, 1))


@pytest.mark.parametrize(("lengths", "split"), [((8, 4, 0, 0), ((8, 4), False)), ((0, 0, 8, 4), ((8, 4), True)),
                                                ((0, 0, 0, 2), ((0, 2), True)), ((0,) * 4, ((0, 0), False))])
def test_a_plan_of_twins_is_one_of_the_levels(lengths, split):
    plan, has_window = Plan(lengths).split()
    assert (plan.lengths, has_window) == split


def test_words_of_a_plan_say_how_much_is_seen():
    told = Plan((8, 4)).told(["cast", "tiny"], SEEN)
    assert told == "cast 8 + tiny 4, seeing 1088 tokens"
    assert names_of(told) == ["cast", "tiny"]
    assert Plan((0, 0)).told(["cast", "tiny"], SEEN) == "off"


def test_a_level_with_the_window_is_thought_as_good_as_without():
    levels, sure = twins(CAST, TINY), 1e9
    memory = Memory({(0, TARGET): PairEstimate(0.97, sure), (1, 0): PairEstimate(0.4, sure)})
    assert memory.pair(levels, 2, TARGET).mean == pytest.approx(0.97)
    assert memory.pair(levels, 3, 2).mean == pytest.approx(0.4)
    assert memory.pair(levels, 3, TARGET).mean == TINY.prior
    for _ in range(2):
        memory.observed(levels, 2, TARGET).observe(8, 8, 0)
    assert 0.8 < memory.pair(levels, 2, TARGET).mean < 0.9
    for _ in range(20):
        memory.observed(levels, 2, TARGET).observe(8, 8, 0)
    assert memory.pair(levels, 2, TARGET).mean < 0.4
    assert memory.pairs[0, TARGET].total.tried == 0  # twins learn for themselves


def test_what_sees_little_and_drafts_badly_says_nothing_of_its_twin():
    memory = Memory({(1, TARGET): PairEstimate(0.1, 1e9)})
    assert memory.pair(twins(CAST), 0, TARGET).mean == CAST.prior
    memory = Memory({(1, TARGET): PairEstimate(0.95, 1e9)})
    assert memory.pair(twins(CAST), 0, TARGET).mean == pytest.approx(0.95)


@pytest.mark.parametrize("slots", [100, SEEN, 1300])
def test_rows_that_are_hardly_longer_than_the_window_are_seen_whole(slots):
    machine = Simulated(TARGET_COSTS, twins(CAST), lambda *_: 0.9, slots=slots)
    machine.decode(Controller(TARGET_COSTS, machine.levels, seen=SEEN), 1, 256)
    assert any(plan.active for plan in machine.plans)
    assert not any(windowed(plan) for plan in machine.plans)


@pytest.mark.parametrize(("levels", "gain"), [((CAST,), 1.2), ((CAST, TINY), 1.05)], ids=["cast", "cast and tiny"])
def test_behind_a_long_context_levels_see_a_part(levels, gain, monkeypatch):
    monkeypatch.setattr(controller, "perf_counter", lambda: 0.0)  # choosing takes no time
    machine = Simulated(TARGET_COSTS, twins(*levels), lambda *_: 0.85, slots=16_384)
    seconds = machine.decode(Controller(TARGET_COSTS, machine.levels, seen=SEEN), 1, 512)
    assert sum(map(windowed, machine.plans)) > 0.8 * len(machine.plans)
    whole = Simulated(TARGET_COSTS, list(levels), lambda *_: 0.85, slots=16_384)
    assert seconds * gain < whole.decode(Controller(TARGET_COSTS, whole.levels), 1, 512)


@pytest.mark.parametrize("seed", range(4))
def test_where_a_part_is_not_enough_levels_see_all_again(seed, monkeypatch):
    """A text that copies what is far behind."""
    monkeypatch.setattr(controller, "perf_counter", lambda: 0.0)

    def chance(row: int, checker: int, proposer: int, so_far: int) -> float:
        return 0.95 if proposer == 0 else 0.1

    machine = Simulated(TARGET_COSTS, twins(CAST), chance, seed=seed, slots=8192)
    seconds = machine.decode(Controller(TARGET_COSTS, machine.levels, seen=SEEN), 1, 512)
    whole = Simulated(TARGET_COSTS, [CAST], chance, seed=seed, slots=8192)
    assert seconds < 1.1 * whole.decode(Controller(TARGET_COSTS, whole.levels), 1, 512)
    late = [plan for plan in machine.plans[len(machine.plans) // 2 :] if plan.active]
    assert sum(map(windowed, late)) < 0.2 * len(late)
