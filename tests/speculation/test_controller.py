"""Does a controller choose what the equations say, never lose to the target alone, and notice when things change?"""

from __future__ import annotations

from itertools import product
from statistics import geometric_mean, median

import pytest
from shared_machine import ratios
from simulated import Simulated, costs

from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.estimates import PairEstimate, RowEstimates
from hf_mlspec.speculation.forecast import Expectations
from hf_mlspec.speculation.memory import LevelCosts, Memory
from hf_mlspec.speculation.plans import LENGTHS, TARGET, Plan, Situation, off
from hf_mlspec.speculation.steady import Steady

FLAT = costs(1.0, 0.0)  # a pass costs the same whatever its tokens: memory is the limit
STEEP = costs(1.0, 1.0)  # every token costs what a pass does: arithmetic is
SURE = 1e9
pytestmark = pytest.mark.usefixtures("steady_clock")


def level(name: str = "draft", cost: PassCosts | None = FLAT, **options: object) -> LevelCosts:
    return LevelCosts(name, cost, **{"prior": 0.7, "own_cache": False, **options})


def known(*chances: float) -> Memory:
    """Pairs of each level and the target, whose chances are certain."""
    return Memory({(index, TARGET): PairEstimate(chance, SURE) for index, chance in enumerate(chances)})


def chosen(controller: Controller, rows: int = 1, rooms: int = 1000, missing: int = 0) -> Plan:
    """The best plan by what is known, whether or not another one is tried first."""
    controller.start(rows)
    return controller.best_of(Situation([rooms] * rows, 0.0, [[missing] * rows for _ in controller.levels])).plan


def one_row(room: int) -> Situation:
    """That lacks nothing, and may gain so many tokens."""
    return Situation([room], 0.0, [[0]])


def leviathan(chance: float, cost: float, length: int) -> float:
    """Theorem 3.8 of arXiv 2211.17192."""
    return (1 - chance ** (length + 1)) / ((1 - chance) * (length * cost + 1))


@pytest.mark.parametrize(("chance", "cost"), [*product((0.3, 0.5, 0.7, 0.8, 0.9, 0.95), (0.01, 0.05, 0.1, 0.3))])
def test_one_level_is_chosen_as_leviathans_theorem_says(chance, cost):
    plan = chosen(Controller(FLAT, [level(cost=costs(cost, 0.0))], memory=known(chance)))
    speeds = {length: leviathan(chance, cost, length) for length in LENGTHS}
    best = max(speeds, key=speeds.get)
    if speeds[best] > 1.02:
        assert leviathan(chance, cost, plan.most) == pytest.approx(speeds[best], rel=2e-3)
    else:
        assert plan == off(1)


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_where_every_token_costs_a_pass_nothing_is_drafted(chance, rows):
    assert chosen(Controller(STEEP, [level(cost=costs(0.01, 0.0))], memory=known(chance)), rows) == off(1)


def test_a_larger_batch_turns_drafting_off():
    target = PassCosts((1, 8, 16, 512), (1.0, 1.1, 1.5, 60.0), (0.0,) * 4)
    controller = Controller(target, [level(cost=costs(0.1, 0.01))], memory=known(0.8))
    assert chosen(controller, 1).active == (0,)
    assert chosen(controller, 32) == off(1)
    assert chosen(controller, 1).active == (0,)


def test_a_choice_says_how_much_better_it_is_than_what_calls_begin_with():
    controller = Controller(FLAT, [level(cost=costs(0.1, 0.0))], memory=known(0.8))
    controller.start(1)
    over = []
    for usual in (None, off(1), Plan((1,)), Plan((6,))):
        over.append(controller.best_of(Situation([1000], 0.0, [[0]], usual)).over_usual)
    best = controller.best_of(Situation([1000], 0.0, [[0]])).plan
    assert best.most in (6, 8)
    assert over[0] == float("inf")
    assert over[1] > over[2] > over[3] >= 1.0
    assert over[1] == pytest.approx(leviathan(0.8, 0.1, best.most), rel=0.01)
    other = Situation([1000], 0.0, [[0]], Plan((0, 3)))  # of a level that there is no more
    assert controller.best_of(other).over_usual == float("inf")


def test_what_a_level_has_to_read_first_counts_against_the_tokens_still_to_come():
    late = level(cost=costs(0.1, 0.1), own_cache=True)
    assert chosen(Controller(FLAT, [late], memory=known(0.8)), missing=20).active == (0,)
    assert chosen(Controller(FLAT, [late], memory=known(0.8)), rooms=8, missing=2000) == off(1)


def test_a_level_of_another_vocabulary_is_not_skipped():
    middle, last = level("foreign", joined=False), level("lookup", None)
    plans = Controller(FLAT, [middle, last])._choices.at(0)
    assert plans == ((0,), (0, 1))
    assert Controller(FLAT, [level(), last])._choices.at(0) == ((0,), (1,), (0, 1))


def test_a_chain_is_chosen_where_the_middle_level_is_dear_and_its_own_draft_cheap():
    levels = [level("cast", costs(0.3, 0.0)), level("tiny", costs(0.01, 0.0))]
    memory = known(0.95, 0.3)
    memory.pairs[1, 0] = PairEstimate(0.8, SURE)
    assert chosen(Controller(FLAT, levels, memory=memory)).active == (0, 1)


def test_uncertain_costs_make_the_plan_cautious():
    rough = PassCosts((1, 64), (1.0, 1.0), (1.0, 1.0))
    gain = [level(cost=costs(0.5, 0.0))]
    assert chosen(Controller(FLAT, gain, memory=known(0.7))).active == (0,)
    assert chosen(Controller(rough, gain, memory=known(0.7))) == off(1)


CHANCES = (0.02, 0.4, 0.7, 0.9)
TARGETS = {"memory": costs(5e-3, 2e-5), "arithmetic": PassCosts((1, 2, 4, 8, 16, 64), tuple(
    x * 1e-3 for x in (6.5, 7.9, 9.3, 15.1, 24.3, 100.0)), (0.02,) * 6)}  # fmt: skip


@pytest.mark.parametrize(("target", "chance", "rows"), [*product(TARGETS, CHANCES, (1, 4, 32))])
def test_a_poor_draft_costs_at_most_three_in_a_hundred_and_a_good_one_pays(target, chance, rows, monkeypatch):
    monkeypatch.setattr("hf_mlspec.speculation.controller.perf_counter", lambda: 0.0)  # choosing takes no time
    machine = TARGETS[target]
    levels = [LevelCosts("draft", costs(4e-4, 4e-5), prior=0.6)]
    seconds = {"auto": 0.0, "alone": 0.0, **{length: 0.0 for length in (2, 4, 8)}}
    for seed in range(3):
        simulated = Simulated(machine, levels, lambda *_: chance, seed=seed)
        seconds["auto"] += simulated.decode(Controller(machine, levels), rows, 128)
        seconds["alone"] += simulated.decode(None, rows, 128, off(1))
        for length in (2, 4, 8):
            seconds[length] += simulated.decode(None, rows, 128, Plan((length,)))
    assert seconds["alone"] / seconds["auto"] > 0.97
    assert min(seconds.values()) / seconds["auto"] > 0.85


def test_chances_that_change_are_noticed_both_ways():
    def chance(row: int, checker: int, proposer: int, so_far: int) -> float:
        return 0.9 if so_far < 300 or so_far > 1500 else 0.02

    levels = [LevelCosts("draft", costs(4e-4, 0.0), prior=0.6)]
    simulated = Simulated(TARGETS["memory"], levels, chance)
    simulated.decode(Controller(TARGETS["memory"], levels), 1, 3000)
    lengths = [plan.most for plan in simulated.plans]
    assert max(lengths[:20]) >= 4  # it pays at first
    assert lengths.count(0) > 700  # then it does not
    assert sum(length > 0 for length in lengths[-100:]) > 80  # then again
    assert len(lengths) < 2200


def test_rows_are_drafted_for_as_their_own_tokens_are_kept(monkeypatch):
    monkeypatch.setattr("hf_mlspec.speculation.controller.perf_counter", lambda: 0.0)  # however long choosing takes
    levels = [LevelCosts("draft", costs(4e-4, 1e-4), prior=0.9)]
    machine = PassCosts((1, 8, 64), (5e-3, 6e-3, 15e-3), (0.0,) * 3)
    simulated = Simulated(machine, levels, lambda row, *_: 0.95 if row < 4 else 0.1)
    controller = Controller(machine, levels)
    seen: list[list[int]] = []
    choose = controller.choose

    def watched(situation: Situation) -> Plan:
        plan = choose(situation)
        if len(situation.rooms) == 8:
            seen.append(list(controller.limits))
        return plan

    controller.choose = watched
    simulated.decode(controller, 8, 200)
    good, poor = (sum(sum(line[rows]) for line in seen[-20:]) for rows in (slice(0, 4), slice(4, 8)))
    assert good > 3 * poor


def test_slow_rounds_of_a_plan_count_against_it():
    """What the costs leave out, here a draft that takes ten times its measured time, comes out in the rounds."""
    told = [LevelCosts("draft", costs(4e-4, 0.0), prior=0.8)]
    true = [LevelCosts("draft", costs(8e-3, 0.0), prior=0.8)]
    simulated = Simulated(TARGETS["memory"], true, lambda *_: 0.7)
    simulated.decode(Controller(TARGETS["memory"], told), 1, 400)
    assert [plan.most for plan in simulated.plans[-100:]].count(0) > 90


def test_without_a_clock_plans_follow_counts_alone():
    levels = [LevelCosts("draft", costs(4e-4, 0.0), prior=0.6)]
    plans = []
    for busy in (1.0, 3.0, 0.2):
        simulated = Simulated(TARGETS["memory"], levels, lambda *_: 0.6, busy=busy)
        simulated.decode(Controller(TARGETS["memory"], levels, by_clock=False), 2, 200)
        plans.append(simulated.plans)
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("seconds", [0.0, -5.0, 1e6])
def test_a_clock_that_jumps_does_not_decide(seconds):
    controller = Controller(FLAT, [level(cost=costs(0.05, 0.0))], memory=known(0.8))
    usual = chosen(controller)
    whole = [usual.most]
    controller.observe(whole, whole, whole, seconds)
    assert chosen(controller).active == usual.active
    for _ in range(5):
        controller.observe(whole, whole, whole, controller.forecast.seconds)
    assert chosen(controller).active == usual.active


def test_what_was_learned_is_the_next_calls_start():
    levels = [LevelCosts("draft", costs(4e-4, 0.0), prior=0.9)]
    simulated = Simulated(TARGETS["memory"], levels, lambda *_: 0.02)
    first = Controller(TARGETS["memory"], levels)
    simulated.decode(first, 1, 200)
    assert max(plan.most for plan in simulated.plans) > 0
    simulated.decode(Controller(TARGETS["memory"], levels, memory=first.memory.kept()), 1, 8)
    assert sum(plan != off(1) for plan in simulated.plans) <= 1  # a trial


def test_a_pair_never_seen_is_guessed_from_what_both_are_under_a_third():
    levels = [level("cast", prior=0.85), level("tiny", prior=0.65)]
    memory = known(0.9)
    assert memory.pair(levels, 1, TARGET).mean == 0.65
    memory.pairs[1, 0] = PairEstimate(0.5, SURE)
    assert memory.pair(levels, 1, TARGET).mean == pytest.approx(0.475)  # .5 where both agree, .25 where they differ
    assert (1, TARGET) not in memory.pairs


def test_rows_that_stay_are_known_better_than_all():
    estimate, rows = PairEstimate(0.5), RowEstimates()
    rows.start(4)
    for _ in range(20):
        for r in range(4):
            rows.rows[r].add(*estimate.observe(2, 2, 2 if r < 2 else 0))
    before = estimate.mean
    estimate.shift(rows.share_of([2, 3], before))
    assert estimate.mean < 0.5 * before
    assert rows.share_of([0, 1, 2, 3], before) == pytest.approx(1.0)


def test_only_what_rows_that_draft_have_missed_is_charged():
    """Four rows gain much, four nothing and have long been idle: what these lack does not speak against the others."""
    late = level(cost=costs(0.02, 0.005), own_cache=True)
    controller = Controller(PassCosts((1, 8, 64), (1.0, 1.1, 3.0), (0.0,) * 3), [late], memory=known(0.6))
    controller.start(8)
    controller.memory.correct(off(1), 8, 1.0)
    for r, row in enumerate(controller.rows.rows):
        row.add(24, 24 if r < 4 else 0)
    plan = controller.choose(Situation([200] * 8, 0.0, [[0] * 4 + [4000] * 4]))
    assert plan.active == (0,)
    assert controller.limits[4:] == [0] * 4


def test_off_is_not_thought_slow_before_it_was_timed():
    memory, levels = Memory(), [level()]
    for _ in range(20):
        memory.correct(Plan((4,)), 1, 3.0)

    def seconds() -> float:
        return Expectations(FLAT, levels, memory, corrected=True).off(1, 0.0).seconds

    assert seconds() == pytest.approx(1.0, rel=1e-3)
    for _ in range(20):
        memory.correct(off(1), 1, 2.0)
    assert seconds() > 1.5


def test_no_round_is_thought_faster_than_off_and_its_draft():
    memory, levels = Memory(), [level(cost=costs(0.2, 0.0))]
    for _ in range(20):
        memory.correct(off(1), 1, 2.0)
        memory.correct(Plan((4,)), 1, 0.5)
    known = Expectations(FLAT, levels, memory, corrected=True)
    alone = known.off(1, 0.0).seconds
    assert all(known.of(Plan((length,)), 1, 1, 0.0).seconds > alone + 0.199 * length for length in LENGTHS)


def test_a_trial_pays_for_what_it_reads():
    late = level(cost=costs(0.3, 0.002), own_cache=True, prior=0.2)
    controller = Controller(FLAT, [late])
    controller.start(1)
    controller.memory.spare = 40.0
    plan = controller.choose(Situation([1000], 0.0, [[100]]))
    assert plan.active == (0,)
    spare = controller.memory.spare
    controller.observe([plan.most], [plan.most], [0], 12.0, usual=False)
    assert controller.memory.spare < spare - 10.0


@pytest.mark.parametrize(("target", "draft", "prior", "rows"), [
    (costs(1.0, 1e-4), costs(0.45, 0.0), 0.4, 8), (costs(1.0, 0.05), costs(0.05, 0.03), 0.5, 1),
], ids=["rows cost little", "rows cost much"])  # fmt: skip
def test_all_rows_try_another_plan_where_that_loses_little_more_than_one_row(target, draft, prior, rows):
    """Where a round of one drafting row takes nearly as long as one of eight, it brings an eighth for that time."""
    controller = Controller(target, [level(cost=draft, prior=prior)])
    controller.start(8)
    controller.memory.spare = 100.0
    plan = controller.choose(Situation([1000] * 8, 0.0, [[0] * 8]))
    assert controller.choice.trial
    assert plan.active
    assert sum(limit > 0 for limit in controller.limits) == rows


def test_plans_in_words():
    assert Plan((8, 0, 4)).told(["cast", "middle", "tiny"]) == "cast 8 + tiny 4"
    assert off(2).told(["cast", "tiny"]) == "off"


@pytest.mark.parametrize("remembers", [True, False])
def test_where_earlier_calls_told_few_choices_may_take_more_of_the_time(monkeypatch, remembers):
    clock = iter(range(1000))
    monkeypatch.setattr(Steady, "holds", lambda *_: False)  # asked at the end of every stay
    monkeypatch.setattr("hf_mlspec.speculation.controller.perf_counter", lambda: float(next(clock)))  # 1 s a choice
    controller = Controller(FLAT, [level(cost=costs(0.1, 0.0))], memory=known(0.9) if remembers else None)
    controller.start(1)
    controller.memory.correct(off(1), 1, 1.0)
    controller.memory.spare = -1e9  # no trials
    stays = []
    for _ in range(3):
        controller.choose(Situation([1000], 0.0, [[0]]))
        stays.append(sum(iter(lambda: controller.stay(1), False)))
    assert 64 < stays[0] <= 512 if remembers else stays[0] < 10  # however short rounds are beside a choice
    assert stays[2] == stays[0]


def resting(by_clock: bool = True) -> Controller:
    """A controller that has chosen "off" for two rows, and knows of a level."""
    controller = Controller(STEEP, [level(cost=costs(0.5, 0.5))], memory=known(0.3), by_clock=by_clock)
    controller.start(2)
    assert controller.choose(Situation([1000] * 2, 0.0, [[0] * 2])) == off(1)
    return controller


def test_off_is_timed_before_a_level_drafts():
    """Plans are compared with it, and its costs may have been measured beside a load."""
    controller, situation = Controller(FLAT, [level(cost=costs(0.1, 0.0))], memory=known(0.9)), one_row(100)
    controller.start(1)
    for _ in range(Controller.FIRST_TIMES):
        assert (controller.plan if controller.stay(1) else controller.choose(situation)) == off(1)
        controller.observe([0], [0], [0], 0.4)
    assert not controller.stay(1)
    assert controller.choose(situation).active == (0,)
    assert controller.off_speed > 1.5


def test_a_prompt_that_the_target_reads_is_no_cost_of_a_trial():
    controller = Controller(FLAT, [level(cost=costs(0.1, 0.0))], memory=known(0.9))
    controller.start(1)
    assert controller.choose(one_row(1000)) == off(1)
    assert controller.choice.trial
    spare = controller.memory.spare
    controller.observe([0], [0], [0], 90.0, usual=False)
    assert controller.memory.spare > spare - 1.0


@pytest.mark.parametrize("room", [1, 2 * Controller.FIRST_TIMES])
def test_a_call_that_ends_soon_does_not_time_off(room):
    controller = Controller(FLAT, [level(cost=costs(0.1, 0.0))], memory=known(0.9))
    controller.start(1)
    assert controller.choose(one_row(room)).active == (0,)


def test_rounds_in_which_drafts_are_cut_say_nothing_of_a_plan():
    controller = Controller(FLAT, [level(cost=costs(0.1, 0.0))], memory=known(0.9))
    controller.start(1)
    plan = controller.choose(one_row(4))
    assert plan.most > 4
    controller.observe([4], [4], [4], 0.5 * controller.forecast.seconds)
    assert not controller.memory.ratios
    controller.observe([plan.most], [plan.most], [4], controller.forecast.seconds)
    assert controller.memory.ratios


def test_a_machine_that_is_slow_for_a_while_speaks_against_no_plan():
    """Rounds of the target alone, then of a level while all takes twice as long: neither is thought slower."""
    memory = Memory()
    memory.correct(Plan((4,)), 1, 1.0, rounds=8)
    memory.correct(off(1), 1, 1.0, rounds=16)
    memory.correct(off(1), 1, 2.0, rounds=16)
    assert memory.pace == pytest.approx(2.0, rel=0.05)
    memory.correct(Plan((4,)), 1, 2.0, rounds=16)
    drafts, alone = memory.factors([(0,)], 1)[0][0][LENGTHS.index(4)], memory.factor_of_off(1)
    assert drafts == pytest.approx(2.0, rel=0.05)  # as long as rounds take now,
    assert alone == pytest.approx(drafts, rel=0.05)  # all of them
    assert memory.kept().pace == memory.pace
    memory.correct(off(1), 1, 1.0, rounds=16)
    assert memory.pace == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("by_clock", [True, False])
def test_rounds_of_off_that_are_told_together_teach_what_single_ones_do(by_clock):
    one, all_ = resting(by_clock), resting(by_clock)
    seconds = one.forecast.seconds
    for share in (0.9, 1.0, 1.1, 1.4):
        one.observe([0, 0], [0, 0], [0, 0], share * seconds)
    all_.observe_off(4, 4.4 * seconds)
    assert one.rows.gained == all_.rows.gained == [4, 4]
    for memory in (one.memory, all_.memory):
        assert [pair.idle for pair in memory.pairs.values()] == [8]
    assert one.memory.spare == pytest.approx(all_.memory.spare)
    assert one.memory.ratios.keys() == all_.memory.ratios.keys()
    for key, ratio in one.memory.ratios.items():
        assert all_.memory.ratios[key].tried == ratio.tried == 4
        assert all_.memory.ratios[key].kept == pytest.approx(ratio.kept, rel=0.1)  # the machine's pace is told apart


def test_slow_rounds_of_off_ask_for_no_other_choice():
    controller = resting()
    controller._left = 50
    for _ in range(20):
        controller.observe([0, 0], [0, 0], [0, 0], 2.0 * controller.forecast.seconds)
    assert controller._left == 50


def test_on_a_shared_machine_short_calls_are_seldom_slower(monkeypatch):
    """Times that say too much, and levels that take longer than was measured: see shared_machine.py."""
    monkeypatch.setattr("hf_mlspec.speculation.controller.perf_counter", lambda: 0.0)
    cells = [(("cast",), (0.7,), 1.0), (("draft",), (0.02,), 1.8), (("draft",), (0.65,), 1.8),
             (("lookup",), (0.3,), 1.0), (("cast", "draft"), (0.8, 0.3), 1.8)]  # fmt: skip
    measured = [ratios(("memory", *cell, 8), 32, seeds=1) for cell in cells]
    found = [(median(calls), best) for calls, best in measured]
    assert min(auto for auto, _ in found) > 0.85
    assert geometric_mean([auto for auto, _ in found]) > 1.0
    assert geometric_mean([auto / best for auto, best in found]) > 0.93


@pytest.mark.parametrize("wrong", [3.0, 1 / 3])
def test_what_rounds_took_by_costs_that_did_not_hold_says_nothing_of_others(wrong, monkeypatch):
    """"Off" seemed to take a third of its cost; by the right costs it would seem a third as slow as it is."""
    monkeypatch.setattr("hf_mlspec.speculation.controller.perf_counter", lambda: 0.0)  # choosing takes no time
    target, right = TARGETS["memory"], [LevelCosts("draft", costs(4e-4, 0.0), prior=0.6)]
    believed = PassCosts(target.tokens, tuple(wrong * s for s in target.seconds), target.spread)
    simulated, memory = Simulated(target, right, lambda *_: 0.7), None
    for _ in range(3):
        first = Controller(believed, right, memory=memory)
        simulated.decode(first, 1, 100)
        memory = first.memory.kept()
    fresh = simulated.decode(Controller(target, right), 1, 200)
    made = Controller(target, right, memory=Memory.from_dict(memory.to_dict(), 1))
    assert not made.memory.ratios
    assert made.memory.pairs
    assert simulated.decode(made, 1, 200) < 1.05 * fresh
    again = Controller(target, right, memory=made.memory.kept())
    assert again.memory.ratios  # the same costs


@pytest.mark.parametrize(("share", "rows", "disproved"), [(0.3, 1, True), (0.3, 5, True), (0.7, 1, True),
                                                          (0.95, 1, False), (1.5, 4, False)])  # fmt: skip
def test_rounds_of_off_that_take_less_than_their_pass_disprove_costs(share, rows, disproved):
    controller = Controller(TARGETS["arithmetic"], [level()])
    controller.start(rows)
    for _ in range(3):
        controller.memory.correct(off(1), rows, share)
    assert not controller.disproves_costs  # three rounds are chance
    controller.memory.correct(off(1), rows, share)
    assert controller.disproves_costs is disproved
    assert not Controller(TARGETS["arithmetic"], [level()], by_clock=False, memory=controller.memory).disproves_costs


@pytest.mark.parametrize("bits", [-1, 0, 10**9])
def test_a_number_of_rows_that_no_call_has_disproves_no_costs(bits):
    told = {"pairs": [], "ratios": [{"rounds": [[], 0, bits], "counted": [6.0, 0.6]}]}
    assert not Memory.from_dict(told, 1).disproves(TARGETS["memory"], 1e-4)


def test_rounds_with_drafts_disprove_no_costs():
    controller = Controller(TARGETS["memory"], [level()])
    for _ in range(20):
        controller.memory.correct(Plan((4,)), 1, 0.1)
    assert not controller.disproves_costs


@pytest.mark.parametrize(("ratio", "bound"), [(1e3, 4.0), (1e-3, 0.25)])
def test_the_pace_is_no_more_than_a_load_explains(ratio, bound):
    """What rounds take beyond it is learned of them, so that forecasts are right all the same."""
    memory = Memory()
    memory.correct(off(1), 1, 1.0)
    for _ in range(200):
        memory.correct(off(1), 1, ratio)
    assert memory.pace == pytest.approx(bound)
    assert memory.factor_of_off(1) == pytest.approx(ratio, rel=0.5)
