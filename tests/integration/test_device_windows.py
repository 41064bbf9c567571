"""Do levels on the engine of GPUs see a part of the text, in captured rounds and step by step, and change no token?

On the CPU a round runs as it would be captured; tests/cuda/test_windowed_rounds.py is the same on a GPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from device_path import OPTIONS, draft, on_cuda, rounds, stepwise, target
from models import near, prompts, tiny

import hf_mlspec
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.integration import adaptive
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.attention_plain import FIRST_SLOTS
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.controller import Choice
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.fixed_shapes import FixedController
from hf_mlspec.speculation.plans import LENGTHS, Plan, Situation

__all__ = ["draft", "rounds", "target"]
pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
LONG = prompts([190, 70, 130])
LEVELS = ("draft", "mxfp4", "mxfp4, draft", "mxfp4, early exit", "draft, lookup")


def levels(name: str, draft) -> list:
    words = {"draft": draft, "early exit": "early_exit:1", "lookup": "prompt_lookup"}
    return [words.get(word, word) for word in name.split(", ")]


@pytest.fixture
def seen(monkeypatch, target):
    """Of every forward pass its window, and whether it was the target's."""
    found, forward = [], CudaDecoder.forward

    def told(self, *operands, draft_window: int = 0, **how):
        _, own = state_of(target).decoders.get(CudaDecoder, (None, None))
        found.append((draft_window, self is own))
        return forward(self, *operands, draft_window=draft_window, **how)

    monkeypatch.setattr(CudaDecoder, "forward", told)
    return found


def only_levels_have(window: int, seen: list) -> bool:
    return set(seen) == {(0, True), (window, False)}


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [1, 50])
@pytest.mark.parametrize("name", LEVELS)
def test_a_window_changes_no_token(rounds, seen, target, draft, name, window, sampling):
    config = {"draft_window": window, "num_draft_tokens": 4}
    for play in ("captured", "stepwise"):
        torch.manual_seed(4)
        alone = stepwise(target, LONG, **sampling)
        torch.manual_seed(4)
        del seen[:], rounds[:]
        asked = {**OPTIONS, **sampling, "speculation_config": config}
        if play == "captured":
            out = target.generate(**LONG, **asked, assistant_models=levels(name, draft))
        else:
            out = stepwise(target, LONG, levels(name, draft), **sampling, speculation_config=config)
        assert bool(rounds) == (play == "captured")
        assert torch.equal(out, alone)
        assert only_levels_have(window, seen)
        assert hf_mlspec.last_stats(target).levels[0].drafted > 0


def test_captured_rounds_draft_what_rounds_of_the_host_draft(rounds, target):
    """A level's own cache is read with the window in both; without one a twin of the target is always right."""
    twin, accepted = near(target, 0.0), {}
    for window in (0, 30):
        asked = {"speculation_config": {"draft_window": window, "num_draft_tokens": 4, "confidence_threshold": 0.0}}
        del rounds[:]
        target.generate(**LONG, **OPTIONS, **asked, assistant_models=[twin])
        (captured,) = hf_mlspec.last_stats(target).levels
        assert rounds
        stepwise(target, LONG, [twin], **asked)
        (played,) = hf_mlspec.last_stats(target).levels
        assert captured.accepted == pytest.approx(played.accepted, abs=3 * 4)  # the last drafts of rows differ
        accepted[window] = captured.accepted, captured.drafted
    assert accepted[0][0] == accepted[0][1]
    assert 0 < accepted[30][0] < accepted[30][1]


def test_a_window_longer_than_the_rows_is_none(target, draft):
    accepted = []
    for window in (0, 400):
        config = {"draft_window": window, "num_draft_tokens": 4, "confidence_threshold": 0.0}
        target.generate(**LONG, **OPTIONS, assistant_models=[draft], speculation_config=config)
        accepted.append(hf_mlspec.last_stats(target).levels[0].accepted)
    assert accepted[0] == accepted[1] > 0


def test_calls_with_other_windows_have_rounds_of_their_own(rounds, seen, target, draft):
    """A captured round holds its window."""
    for window in (30, 0, 20, 30):
        config = {"draft_window": window, "num_draft_tokens": 4}
        del seen[:]
        target.generate(**LONG, **OPTIONS, assistant_models=["mxfp4", draft], speculation_config=config)
        assert only_levels_have(window, seen)


@pytest.fixture
def restless(monkeypatch):
    """A controller that takes another plan almost every round, with the window or without; -> the plans."""
    dice, plans = random.Random(5), []
    monkeypatch.setattr(adaptive, "DRAFT_WINDOW", 20)

    def choose(self: FixedController, situation: Situation) -> Plan:
        active = dice.choice([(), *self._choices.at(1000)])
        plan = Plan(tuple(dice.choice(LENGTHS[:5]) if index in active else 0 for index in range(len(self.levels))))
        assert len(situation.missing) == len(self.levels)
        self.choice = Choice(plan, [plan.most] * len(situation.rooms), self.forecast)
        self._left = dice.choice((0, 0, 2))
        plans.append(plan)
        return plan

    monkeypatch.setattr(FixedController, "choose", choose)
    return plans


@pytest.mark.plans
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", LEVELS)
def test_windows_that_come_and_go_change_no_token(rounds, restless, seen, target, draft, name, sampling):
    asked = {**OPTIONS, **sampling, "max_new_tokens": 60}
    torch.manual_seed(4)
    alone = target.generate(**LONG, **asked, assistant_models=[])
    torch.manual_seed(4)
    out = target.generate(**LONG, **asked, assistant_models=levels(name, draft))
    assert torch.equal(out, alone)
    assert rounds
    assert {window for window, _ in seen} == {0, 20}
    assert (20, True) not in seen
    assert len({plan.split()[1] for plan in restless}) == 2
    told = hf_mlspec.last_stats(target).plans
    assert any(words.endswith(f", seeing {FIRST_SLOTS + 20} tokens") for words in told)


@pytest.mark.plans
def test_rows_that_leave_and_outgrow_their_slots_keep_the_windows(rounds, restless, seen, target, draft, monkeypatch):
    monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", 4)
    inputs = prompts([250, 3, 100])
    asked = {"max_new_tokens": 150}
    alone = stepwise(target, inputs, **asked)
    out = target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=["mxfp4", draft])
    assert torch.equal(out, alone)
    assert (20, True) not in seen
    assert (20, False) in seen


@pytest.mark.plans
@pytest.mark.parametrize("window", [None, 0])
def test_a_window_is_chosen_where_attention_costs_much_unless_there_shall_be_none(rounds, monkeypatch, window):
    """Costs say that a level's attention to 190 slots takes three of its passes."""
    costs = PassCosts((1, 8, 64), (1e-3, 1.1e-3, 2e-3), (0.0,) * 3)
    cheap = PassCosts((1, 8, 64), (2e-5, 2.2e-5, 4e-5), (0.0,) * 3, attention=3e-7)
    monkeypatch.setattr(adaptive, "costs_of", lambda target, levels, **_: [costs, *(cheap for _ in levels)])
    monkeypatch.setattr(adaptive, "DRAFT_WINDOW", 20)
    monkeypatch.setattr(adaptive, "FixedController",
                        lambda *given, **how: FixedController(*given, **{**how, "by_clock": False}))
    model = tiny(seed=1, dtype=torch.bfloat16)
    for layer in model.model.layers:  # what a token says depends on itself alone: any window drafts well
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    model = on_cuda(model)
    same = near(model, 0.0)
    config = {} if window is None else {"speculation_config": {"draft_window": window}}
    asked = {**OPTIONS, "max_new_tokens": 200, **config}
    model.generate(**prompts([190]), **asked, assistant_models=[same])
    assert rounds
    counted = {False: 0, True: 0}
    for words, plan in hf_mlspec.last_stats(model).plans.items():
        if words == "off":  # a captured round of it counts eight times
            continue
        counted[words.endswith(f", seeing {FIRST_SLOTS + 20} tokens")] += plan.rounds
    assert (counted[True] > counted[False]) if window is None else (counted[True] == 0), counted  # trials take four
    model.generate(**prompts([70]), **{**asked, "max_new_tokens": 20}, assistant_models=[same])
    assert not any("seeing" in words for words in hf_mlspec.last_stats(model).plans)
