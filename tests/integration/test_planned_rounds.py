"""Does a controller of captured rounds change time and never a token, and do levels that come back know the rows?

On the CPU a round runs as it would be captured; tests/cuda/test_chosen_plans.py is the same on a GPU.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from device_path import OPTIONS, draft, rounds, stepwise, target
from models import VOCAB, letters, near, prompts, tiny

import hf_mlspec
from hf_mlspec.evaluation import certify
from hf_mlspec.integration import adaptive
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.chain import Chain
from hf_mlspec.speculation.draft import Draft
from hf_mlspec.speculation.fixed_shapes import FixedController
from hf_mlspec.speculation.plans import LENGTHS, Plan, Situation
from hf_mlspec.speculation.rounds.captured import CapturedRounds
from hf_mlspec.speculation.rounds.graphs import RoundGraphs
from hf_mlspec.speculation.search import Choice
from hf_mlspec.speculation.shelf import Outlook

__all__ = ["draft", "rounds", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.plans,
    pytest.mark.usefixtures("nothing_said_yet"),
]
BATCHES = {"one row": [9], "three": [3, 17, 1], "eight": [3, 17, 1, 9, 9, 2, 30, 5]}


def chains(draft) -> dict[str, list]:
    return {
        "draft": [draft],
        "mxfp4": ["mxfp4"],
        "mxfp4, draft": ["mxfp4", draft],
        "draft, early exit of it": [draft, hf_mlspec.early_exit(draft, 1) if draft else None],
        "mxfp4, early exit, draft": ["mxfp4", "early_exit:1", draft],
        "lookup": ["prompt_lookup"],
        "mxfp4, draft, lookup": ["mxfp4", draft, "prompt_lookup"],
    }


@pytest.fixture
def restless(monkeypatch):
    """A controller that takes another plan almost every round; -> the plans."""
    dice, plans = random.Random(5), []

    def choose(self: FixedController, situation: Situation) -> Plan:
        active = dice.choice([(), *self._choices.at(0)])
        plan = Plan(tuple(dice.choice(LENGTHS[:5]) if index in active else 0 for index in range(len(self.levels))))
        assert all(n >= 0 for line in situation.missing for n in line)
        self.choice = Choice(plan, [plan.most] * len(situation.rooms), self.forecast)
        self._left = dice.choice((0, 0, 2))
        plans.append(plan)
        return plan

    monkeypatch.setattr(FixedController, "choose", choose)
    return plans


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}],
                         ids=["greedy", "sampled", "warped"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("chain", chains(None))
def test_plans_that_change_at_random_change_no_token(rounds, restless, target, draft, chain, lengths, sampling):
    asked = {**OPTIONS, **sampling, "max_new_tokens": 60}
    torch.manual_seed(4)
    alone = target.generate(**prompts(lengths), **asked, assistant_models=[])
    torch.manual_seed(4)
    out = target.generate(**prompts(lengths), **asked, assistant_models=chains(draft)[chain])
    assert torch.equal(out, alone)
    assert rounds
    assert len(set(restless)) > 2
    stats = hf_mlspec.last_stats(target)
    assert sum(plan.tokens for plan in stats.plans.values()) >= stats.new_tokens > 0


@pytest.mark.parametrize("config", [{}, {"shared_cache": False}], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_levels_that_come_back_have_read_what_was_written_without_them(rounds, restless, target, count, config):
    """Twins of the target are always right, if they see what it sees."""
    twins = [near(target, 0.0) for _ in range(count)]
    for lengths in BATCHES.values():
        target.generate(**prompts(lengths), **{**OPTIONS, "max_new_tokens": 90}, assistant_models=twins,
                        speculation_config=config)  # fmt: skip
        levels = hf_mlspec.last_stats(target).levels
        assert [level.accepted for level in levels] == [level.drafted for level in levels]
        assert all(level.drafted for level in levels)
    assert len(set(restless)) > 2


def test_rows_that_outgrow_their_slots_go_on(rounds, restless, target, monkeypatch):
    monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", 4)
    twin, inputs = near(target, 0.0), prompts([250, 3, 100])
    asked = {"max_new_tokens": 200}
    alone = stepwise(target, inputs, **asked)
    out = target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=[twin])
    assert torch.equal(out, alone)
    (level,) = hf_mlspec.last_stats(target).levels
    assert level.accepted == level.drafted > 0


def test_rows_that_end_early_leave_the_others_as_they_are(rounds, restless, target, draft):
    inputs = prompts([3, 17, 1, 9, 5, 2])
    written = stepwise(target, inputs)[:, 17:].tolist()
    asked = {"eos_token_id": sorted({written[0][1], written[1][3], written[2][9]}), "pad_token_id": 0}
    alone = stepwise(target, inputs, **asked)
    assert torch.equal(target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=["mxfp4", draft]), alone)
    assert len(set(rounds)) > 1


@pytest.mark.parametrize(("seconds", "moves"), [(0.0, True), (100.0, False)], ids=["cheap", "dear"])
def test_the_rows_that_are_left_move_where_capturing_that_pays(rounds, target, draft, monkeypatch, seconds, moves):
    """Few tokens before the end, rounds of as many rows as before are launched."""
    monkeypatch.setattr(RoundGraphs, "has", lambda self, program, batch: batch == 8)
    monkeypatch.setattr(RoundGraphs, "capture", lambda self, program, batch: None)
    monkeypatch.setattr(RoundGraphs, "seconds_to_capture", lambda self, program: seconds)
    lengths = [3, 17, 1, 9, 5, 2]
    written = stepwise(target, prompts(lengths))[:, 17:].tolist()
    asked = {"eos_token_id": sorted({written[0][1], written[1][3], written[2][9]}), "pad_token_id": 0}
    alone = stepwise(target, prompts(lengths), **asked)
    out = target.generate(**prompts(lengths), **{**OPTIONS, **asked}, assistant_models=[draft])
    assert torch.equal(out, alone)
    assert (min(rounds) < 8) == moves


def test_what_was_chosen_is_told(rounds, target, draft):
    for _ in range(2):
        target.generate(**prompts([9]), **{**OPTIONS, "max_new_tokens": 200}, assistant_models=["mxfp4", draft])
    stats = hf_mlspec.last_stats(target)
    assert rounds
    assert sum(plan.tokens for plan in stats.plans.values()) >= 192  # without levels, those behind the first round
    for words, plan in stats.plans.items():
        assert plan.timed == plan.rounds > 0
        assert words == "off" or words.split()[0] in ("mxfp4", "draft", "LlamaForCausalLM")
        assert plan.seconds > 0 < plan.expected_seconds
    assert stats.tokens_per_second > 0 < stats.expected_tokens_per_second


def test_lengths_that_are_given_are_obeyed(rounds, target, draft):
    config = {"num_draft_tokens": 3, "confidence_threshold": 0.0}
    target.generate(**prompts([9]), **OPTIONS, assistant_models=[draft], speculation_config=config)
    stats = hf_mlspec.last_stats(target)
    assert not stats.plans
    assert rounds
    assert stats.levels[0].drafted == pytest.approx(3 * stats.levels[0].rounds, abs=9)


def test_without_memory_for_rounds_with_levels_the_target_goes_on_alone(rounds, target, draft, monkeypatch, caplog):
    def full(self, program, batch):
        if program.active:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def choose(self: FixedController, situation: Situation) -> Plan:
        self.choice = Choice(Plan((4,)), [4] * len(situation.rooms), self.forecast)
        return self.plan

    inputs = prompts([3, 17, 1])
    alone = stepwise(target, inputs)
    monkeypatch.setattr(FixedController, "choose", choose)
    monkeypatch.setattr(RoundGraphs, "capture", full)
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_models=[draft]), alone)
    said = [line for line in caplog.messages if "not captured, not enough memory: the target goes on alone" in line]
    assert len(said) == 1
    assert hf_mlspec.last_stats(target).levels[0].drafted == 0


def test_a_plan_is_chosen_while_a_round_is_under_way(target, draft, monkeypatch):
    """Only the first one is chosen while the device waits."""
    under_way, choose, chosen = [], FixedController.choose, CapturedRounds.run
    running: list[CapturedRounds] = []

    def run(self, *args):
        running.append(self)
        return chosen(self, *args)

    def watched(self, situation):
        under_way.append(bool(running and running[-1].chain.graphs.batch))
        return choose(self, situation)

    monkeypatch.setattr(CapturedRounds, "run", run)
    monkeypatch.setattr(FixedController, "choose", watched)
    monkeypatch.setattr(FixedController, "_rounds_for", lambda *_: 0)  # however long choosing takes on a busy machine
    target.generate(**prompts([9]), **{**OPTIONS, "max_new_tokens": 120}, assistant_models=[draft])
    assert under_way[0] is False
    assert len(under_way) > 2
    assert all(under_way[1:])


def test_where_choosing_takes_long_the_first_rounds_are_those_of_the_last_call(target, draft, monkeypatch):
    """Rounds of microseconds do not wait for it; what they showed is learned when it comes."""
    asked = {**OPTIONS, "assistant_models": [draft]}
    target.generate(**prompts([9]), **{**asked, "max_new_tokens": 8})
    (chain,) = (one for one in state_of(target).chains if one.planned)
    for _ in range(20):  # a trial is not remembered
        if not chain.first_choices:
            target.generate(**prompts([9]), **{**asked, "max_new_tokens": 8})
    chain.unquestioned = 0
    chain.choosing_seconds, made = 1e6, []
    make = FixedController.start

    def start(self, rows):
        made.append(len(made))
        make(self, rows)

    monkeypatch.setattr(FixedController, "start", start)
    for _ in range(7):  # calls of a round or a few
        assert target.generate(**prompts([9]), **{**asked, "max_new_tokens": 8}).shape[1] == 17
    assert not made
    assert chain.unquestioned == 7
    assert hf_mlspec.last_stats(target).plans
    for _ in range(2):  # the next one has a controller, and every call that is long enough
        target.generate(**prompts([9]), **{**asked, "max_new_tokens": 8})
    assert made
    chain.choosing_seconds, before = 1e6, len(made)
    target.generate(**prompts([9]), **{**asked, "max_new_tokens": 200})
    assert len(made) == before + 1


def test_first_choices_that_the_device_waits_for_take_a_share_of_the_time(target, draft, monkeypatch):
    """A choice takes .1 s, rounds take milliseconds: where nothing is saved for it, every eighth call has one."""
    asked = {**OPTIONS, "max_new_tokens": 60, "assistant_models": [draft]}
    for _ in range(3):
        target.generate(**prompts([9]), **asked)
    (chain,) = (one for one in state_of(target).chains if one.planned)
    made, calls, make = [], [], FixedController.start

    def start(self, rows):
        made.append(calls[-1])
        make(self, rows)

    monkeypatch.setattr(FixedController, "start", start)
    chain.may_wait, chain.unquestioned = 0.0, 0
    for number in range(16):
        calls.append(number)
        chain.choosing_seconds, chain.may_wait = 0.1, min(chain.may_wait, 0.01)
        target.generate(**prompts([9]), **asked)
    assert made == [7, 15]
    chain.may_wait, chain.unquestioned, chain.choosing_seconds = 0.05, 0, 0.0
    calls.append("with time to spare")
    target.generate(**prompts([9]), **asked)
    assert made[2:] == calls[16:]


@pytest.mark.parametrize("chain", ["draft", "mxfp4, draft"])
@pytest.mark.parametrize("lengths", [[3, 17, 1], [3, 17, 1, 9, 9, 2, 30, 5]], ids=["three", "eight"])
def test_rows_may_end_before_a_call_has_chosen(rounds, target, draft, chain, lengths):
    """Its controller is made when the first of them leaves, for all that were there."""
    inputs = prompts(lengths)
    levels, longest = chains(draft)[chain], max(lengths)
    written = stepwise(target, inputs)[:, longest:].tolist()
    asked = {"eos_token_id": sorted({written[0][0], written[1][2], written[2][3]}), "pad_token_id": 0}
    alone = stepwise(target, inputs, **asked)
    for _ in range(8):
        out = target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=levels)
        assert torch.equal(out, alone)
        for one in state_of(target).chains:
            one.choosing_seconds, one.unquestioned = 1e6, 0
    assert any(one.first_choices for one in state_of(target).chains)
    assert rounds


def test_the_first_plan_of_a_call_is_what_its_beginning_asks_for(target, monkeypatch):
    """Not what was best behind the first round, where fewer tokens were left than "off" writes in one."""
    poor = tiny(seed=9, dtype=torch.bfloat16)
    asked = {**OPTIONS, "max_new_tokens": 8, "assistant_models": [poor]}
    for _ in range(2):
        target.generate(**prompts([9]), **asked)
    (chain,) = (one for one in state_of(target).chains if one.planned)
    seen = []
    monkeypatch.setattr(FixedController, "best_of", lambda self, situation: seen.append(situation) or self.choice)
    chain.choosing_seconds = 0.0
    target.generate(**prompts([9]), **asked)
    assert [one.rooms for one in seen] == [[7]]
    assert seen[0].missing == [[9], [9]]  # a level stands for itself, and for itself with a draft window


@pytest.fixture
def outlooks(monkeypatch):
    """What calls are told that their levels lose; -> what they would have been told."""
    found, outlook = [], adaptive._outlook

    def told(*args):
        found.append(outlook(*args))
        return Outlook(told.lost, told.off_speed or found[-1].off_speed)

    told.off_speed = None
    monkeypatch.setattr(adaptive, "_outlook", told)
    return SimpleNamespace(found=found, told=told)


def test_what_levels_lose_is_reckoned_with_draft_windows(rounds, outlooks, target, monkeypatch):
    asked = []

    class Told(adaptive.Controller):
        def outlook(self, situation):
            asked.append((self.seen, [level.twin for level in self.levels], situation.missing))
            return super().outlook(situation)

    monkeypatch.setattr(adaptive, "Controller", Told)
    outlooks.told.lost = 0.5
    target.generate(**prompts([9, 3]), **OPTIONS, assistant_models=["mxfp4", "ngram"])
    assert asked[0] == (1088, [2, 3, 0, 1], [[0, 0]] * 4)


FOREIGN = tiny(seed=2, dtype=torch.bfloat16, vocab_size=VOCAB + 7)


UNCAPTURED = {"n-grams": ["ngram"], "another tokenizer": [FOREIGN], "two levels": ["mxfp4", "ngram"]}


@pytest.mark.parametrize("levels", UNCAPTURED.values(), ids=UNCAPTURED)
def test_levels_that_keep_the_target_from_graphs_are_left_out_where_they_lose(rounds, outlooks, target, levels):
    alone, options = stepwise(target, prompts([9, 3])), {**OPTIONS, "assistant_models": levels}
    if levels == [FOREIGN]:
        options |= {"tokenizer": letters(), "assistant_tokenizers": [letters(7)]}
    outlooks.told.lost = 0.5
    for _ in range(2):
        rounds.clear()
        assert torch.equal(target.generate(**prompts([9, 3]), **options), alone)
        stats = hf_mlspec.last_stats(target)
        assert rounds
        assert list(stats.plans) == ["off"]
        assert [level.drafted for level in stats.levels] == [0] * len(levels)
        assert stats.expected_tokens_per_second == pytest.approx(outlooks.found[0].off_speed)
    assert len(outlooks.found) == 1  # nothing new is known of the second call
    assert all(abs(one.lost) < 60 < one.off_speed for one in outlooks.found)
    (shelf,) = state_of(target).shelved.values()
    shelf.outlooks.clear()  # it has a speed by the clock; by this one, a call with levels takes longer
    shelf.spare, outlooks.told.off_speed = 0.5, 1e9
    for outlooks.told.lost in (0.4, -1.0):  # a trial, and then because it is better
        rounds.clear()
        assert torch.equal(target.generate(**prompts([9, 3]), **options), alone)
        assert not rounds
        assert shelf.spare < 0.5
    assert sum(plan.rounds for plan in hf_mlspec.last_stats(target).plans.values()) > 1


def test_where_the_target_cannot_be_captured_either_levels_stay(rounds, outlooks, target):
    outlooks.told.lost = 9.0
    for levels in (["mxfp4"], ["ngram"]):
        target.generate(**prompts([9]), **OPTIONS | {"do_sample": True, "eta_cutoff": 0.01}, assistant_models=levels)
        assert not rounds
    assert not outlooks.found


def test_without_memory_for_graphs_levels_come_back(rounds, outlooks, target, monkeypatch):
    def full(self, program, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    outlooks.told.lost = 9.0
    alone = stepwise(target, prompts([9, 3]))
    left_out: list[Chain] = []
    monkeypatch.setattr(Chain, "leave_out_levels", left_out.append)
    monkeypatch.setattr(RoundGraphs, "capture", full)
    for _ in range(2):
        assert torch.equal(target.generate(**prompts([9, 3]), **OPTIONS, assistant_models=["ngram"]), alone)
        assert outlooks.found
        assert not rounds
        assert not left_out


class Silent(hf_mlspec.PromptLookup):
    """Finds nothing."""

    def fork(self):
        return self

    def propose(self, rows, limits):
        return Draft.from_lists([[] for _ in rows], "cpu")


def test_a_lookup_of_another_class_is_asked_itself(rounds, target):
    given = {"speculation_config": {"num_draft_tokens": 4}}
    target.generate(**prompts([9]), **OPTIONS, assistant_models=[Silent()], **given)
    assert not rounds
    assert hf_mlspec.last_stats(target).levels[0].drafted == 0


def test_what_was_left_out_is_told_and_leaves_no_counts(rounds, outlooks, target, caplog):
    table, own = hf_mlspec.NGram(), {**OPTIONS, "max_new_tokens": 90}
    for outlooks.told.lost in (-1.0, 1.0):
        state_of(target).shelved.clear()
        caplog.clear()
        target.generate(**prompts([9]), **own, assistant_models=["mxfp4", table])
    stats = hf_mlspec.last_stats(target)
    assert [(level.drafted, level.rounds) for level in stats.levels] == [(0, 0), (0, 0)]
    assert stats.plans["off"].tokens == 90 - stats.prefill_tokens
    assert [one for one in caplog.messages if "left mxfp4 + ngram out" in one]
    assert not [one for one in caplog.messages if "does not pay" in one]


def test_a_certificate_is_of_the_levels(rounds, outlooks, target):
    outlooks.told.lost = 9.0
    found = certify(target, letters(), ["abc abc abc"], ["ngram"], max_new_tokens=30)
    assert found.lossless
    assert not outlooks.found


def test_lengths_that_are_given_keep_all_levels(rounds, outlooks, target):
    outlooks.told.lost = 9.0
    target.generate(**prompts([9]), **OPTIONS, assistant_models=["ngram"], speculation_config={"num_draft_tokens": 2})
    assert not rounds
    assert not outlooks.found


def test_measuring_costs_leaves_the_captured_chain_as_it_is(target, draft):
    """Longer rotary tables would make the next call build it anew."""
    target.generate(**prompts([9]), **OPTIONS, assistant_models=[draft])
    chains_kept = [one for one in state_of(target).chains if one.planned]
    target.generate(**prompts([9]), **OPTIONS, assistant_models=[draft])
    assert [one for one in state_of(target).chains if one.planned] == chains_kept
    assert chains_kept
