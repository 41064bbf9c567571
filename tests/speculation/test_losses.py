"""How much time may rounds lose against the target alone, and is it noticed where its time was measured wrongly?"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from simulated import Simulated, costs

from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.memory import LevelCosts, Memory
from hf_mlspec.speculation.plans import Plan, Situation, off

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TARGET = PassCosts(COUNTS, tuple(1e-3 * x for x in (3.5, 3.6, 3.9, 5.0, 8.2, 14.5, 27, 53, 104)), (0.02,) * 9)
CAST = PassCosts(COUNTS, tuple(1e-3 * x for x in (1.6, 1.9, 2.6, 4.0, 7.0, 12.5, 24, 47, 92)), (0.02,) * 9)
NEAR = PassCosts(COUNTS, tuple(0.8 * x for x in TARGET.seconds), (0.02,) * 9)  # .8 of the target
TINY = PassCosts(COUNTS, tuple(1e-3 * x for x in (0.4, 0.43, 0.5, 0.62, 0.95, 1.7, 3, 5.8, 11.4)), (0.02,) * 9)


def drifting(seconds: float) -> float:
    return 1.5 if int(5.0 * seconds) % 2 else 1.0


def speed(
    levels: list[LevelCosts], chance: float, rows: int, tokens: int, memory: Memory | None = None, **machine: object
) -> float:
    """Over that of the target alone, of calls one after another, each told what the one before learned."""
    auto = alone = 0.0
    for seed in range(3):
        simulated = partial(Simulated, TARGET, levels, lambda *_: chance, seed=seed, **machine)
        controller = Controller(TARGET, levels, memory=memory)
        auto += simulated().decode(controller, rows, tokens)
        alone += simulated().decode(None, rows, tokens, off(len(levels)))
        memory = controller.memory.kept()
    return alone / auto


@pytest.mark.parametrize(("tokens", "least"), [(256, 0.97), (64, 0.97), (32, 0.95)])
def test_a_draft_nearly_as_dear_as_the_target_loses_nothing(tokens, least):
    level = LevelCosts("near", NEAR, prior=0.85, own_cache=False)
    assert speed([level], 0.55, 8, tokens) > least


@pytest.mark.parametrize("chance", [0.01, 0.6, 0.9])
def test_a_noisy_machine_whose_speed_drifts(chance):
    level = LevelCosts("tiny", TINY, prior=0.65)
    assert speed([level], chance, 4, 256, noise=0.3, drift=drifting) > (1.2 if chance == 0.9 else 0.97)


def test_four_rows_find_their_length():
    levels, chance = [LevelCosts("tiny", costs(2e-4, 1e-5), prior=0.65)], 0.93
    machine = partial(Simulated, costs(5e-3, 1e-4), levels, lambda *_: chance)
    auto = machine().decode(Controller(costs(5e-3, 1e-4), levels), 4, 256)
    assert min(machine().decode(None, 4, 256, Plan((n,))) for n in (3, 8, 12)) / auto > 0.9


@pytest.mark.parametrize(("rows", "tokens", "least"), [(4, 256, 0.97), (8, 64, 0.95)])
def test_off_that_was_timed_on_a_busy_machine_is_timed_again(rows, tokens, least):
    """It seemed three times as slow as it is, so that plans seem to gain which lose, and nothing else times it."""
    level = LevelCosts("cast", CAST, prior=0.85, own_cache=False)
    memory = Memory()
    memory.correct(off(1), rows, 3.0, 64)
    assert speed([level], 0.8, rows, tokens, memory=memory, noise=0.1) > least


def test_what_timing_off_again_confirms_is_forgotten_more_slowly():
    memory = Memory()
    memory.correct(off(1), 4, 2.0, 20)

    def rounds_until_forgotten() -> int:
        count = 0
        while memory.factor_of_off(4) > 1.2 and count < 100:
            memory.correct(Plan((1,)), 4, 1.0)
            count += 1
        memory.correct(off(1), 4, 2.0, 20)
        return count

    first, second = rounds_until_forgotten(), rounds_until_forgotten()
    assert 0 < first < second < 100


def loser() -> Controller:
    """Of a plan that is thought to gain."""
    controller = Controller(TARGET, [LevelCosts("tiny", TINY, prior=0.65)])
    controller.start(1)
    assert controller.choose(Situation([200], 0.0, [[0]])).active == (0,)
    return controller


def test_rounds_that_lose_use_up_what_may_be_lost_and_gains_refill_it():
    controller = loser()
    begin, most = controller.memory.slack, controller.plan.most
    assert 0 < begin < 0.02 * 256 * TARGET.of(1.0)
    controller.observe([most], [most], [0], controller.forecast.seconds)
    lost = controller.memory.slack
    assert lost < begin
    controller.observe([most], [most], [most], controller.forecast.seconds)
    assert controller.memory.slack > lost


def test_without_slack_only_plans_that_surely_gain_are_left():
    controller = loser()
    search = controller._search(Situation([200], 0.0, [[0]]))
    everything = search._times()
    limited = controller._search(Situation([200], 0.0, [[0]]))
    limited.allow(-1.0)
    assert np.isfinite(everything).all()
    finite = np.isfinite(limited._times())
    assert not finite.all()
    found = search._borne(everything, 1)
    assert (found == everything).all()
