"""Do calls whose levels see a part of the text only write what the target alone writes, and who gets such a window?"""

from __future__ import annotations

import random

import pytest
import torch
from models import letters, near, prompts, refused, tiny

import hf_mlspec
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.integration import adaptive
from hf_mlspec.ops.attention_plain import FIRST_SLOTS
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.controller import Choice, Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.plans import LENGTHS, Plan, Situation

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
TARGET = tiny(seed=1, dtype=torch.float32)
NEAR = near(TARGET, 0.02)
FOREIGN = tiny(seed=2, dtype=torch.float32, vocab_size=71)
LONG = prompts([190, 70, 130])
CHAINS = {"cast": ["mxfp4"], "model": [NEAR], "cast and model": ["mxfp4", NEAR],
          "early exit and lookup": ["early_exit:1", "prompt_lookup"], "cast, cast": ["mxfp4", "int3"]}  # fmt: skip


def write(levels: list, inputs: dict, config: dict | None = None, target=TARGET, **options: object):
    torch.manual_seed(4)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    settings |= {"speculation_config": config} if config else {}
    return target.generate(**inputs, assistant_models=levels, **{**settings, **options})


@pytest.fixture
def seen(monkeypatch):
    """The windows of all engines' calls, 0 without one, and the models that had them."""
    found, view = [], CpuEngine._view.fget

    def told(self):
        found.append((self.draft_window, self.model))
        return view(self)

    monkeypatch.setattr(CpuEngine, "_view", property(told))
    return found


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("window", [1, 30, 100])
@pytest.mark.parametrize("name", CHAINS)
def test_a_window_changes_no_token(name, window, sampling, seen):
    out = write(CHAINS[name], LONG, {"draft_window": window, "num_draft_tokens": 4}, **sampling)
    windows = {(used, model is TARGET) for used, model in seen}
    assert (window, False) in windows
    assert not any(is_target and used for used, is_target in windows)
    assert torch.equal(out.sequences, write([], LONG, **sampling).sequences)
    assert out.speculation.levels[0].drafted > 0


def test_the_window_decides_what_is_drafted():
    accepted = [write([NEAR], LONG, {"draft_window": window, "num_draft_tokens": 4}).speculation.levels[0].accepted
                for window in (0, 1, 400)]  # fmt: skip
    assert accepted[0] == accepted[2] > accepted[1]


def test_a_target_that_drafts_for_itself_has_a_window_as_a_level_only(seen):
    model = tiny(seed=1, dtype=torch.bfloat16)
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    hf_mlspec.nest(model)
    alone = model.generate(**LONG, assistant_models=[], **settings)
    del seen[:]
    config = {"draft_window": 20, "num_draft_tokens": 3}
    out = model.generate(**LONG, assistant_models=["nested"], speculation_config=config, **settings)
    assert torch.equal(out, alone)
    assert {used for used, _ in seen} == {0, 20}


def test_levels_of_another_tokenizer_have_it_too(seen):
    options = {"tokenizer": letters(), "assistant_tokenizers": [letters(7)]}
    out = write([FOREIGN], LONG, {"draft_window": 25, "num_draft_tokens": 3}, **options)
    assert torch.equal(out.sequences, write([], LONG).sequences)
    assert {used for used, model in seen if model is FOREIGN} == {25}


def test_requests_of_a_stream(seen):
    asked = [hf_mlspec.Request(prompts([80 + 20 * n])["input_ids"], id=n, seed=n, do_sample=n % 2 == 0,
                               eos_token_id=None) for n in range(5)]  # fmt: skip
    written = [
        {one.id: one.new_tokens for one in hf_mlspec.generate_stream(
            TARGET, asked, assistant_models=levels, max_new_tokens=20, max_batch=3,
            speculation_config={"draft_window": 30, "num_draft_tokens": 4})}
        for levels in ([], ["mxfp4", NEAR])
    ]  # fmt: skip
    assert written[0] == written[1]
    assert {used for used, _ in seen} == {0, 30}


@pytest.mark.usefixtures("nothing_said_yet")
def test_a_level_that_can_have_none_says_so_once(caplog):
    config = {"draft_window": 30, "num_draft_tokens": 3, "engine": "modules"}
    for _ in range(2):
        out = write([NEAR], LONG, config)
    said = [line for line in caplog.messages if "draft_window" in line]
    assert len(said) == 1
    assert "draft_window is 30, and level LlamaForCausalLM sees all tokens: it runs module by module" in said[0]
    assert out.speculation.levels[0].drafted > 0


@pytest.mark.parametrize("value", [-1, 2.5, "64", True])
def test_what_no_window_can_be(value):
    words = f"draft_window is {value!r}, it must be an integer: the last tokens levels see, 0 for all"
    refused(ValueError, words, LONG, TARGET, assistant_models=[NEAR], speculation_config={"draft_window": value})


@pytest.fixture
def restless(monkeypatch):
    """A controller that takes another plan in every round, with the window or without; -> the plans."""
    dice, plans = random.Random(3), []
    monkeypatch.setattr(adaptive, "DRAFT_WINDOW", 20)

    def choose(self: Controller, situation: Situation) -> Plan:
        active = dice.choice([(), *self._choices.at(1000)])
        lengths = [dice.choice(LENGTHS) if index in active else 0 for index in range(len(self.levels))]
        plan = Plan(tuple(lengths))
        self.choice = Choice(plan, [plan.most] * len(situation.rooms), self.forecast)
        plans.append(plan)
        return plan

    monkeypatch.setattr(Controller, "choose", choose)
    return plans


@pytest.mark.plans
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CHAINS)
def test_windows_that_come_and_go_change_no_token(name, sampling, restless, seen):
    out = write(CHAINS[name], LONG, **sampling)
    assert {used for used, _ in seen} == {0, 20}
    assert len({plan.split()[1] for plan in restless}) == 2
    assert torch.equal(out.sequences, write([], LONG, **sampling).sequences)


@pytest.mark.plans
@pytest.mark.parametrize("window", [None, 0])
def test_a_window_is_chosen_where_attention_costs_much_unless_there_shall_be_none(window, monkeypatch, seen):
    """Costs say that a level's attention to 190 slots takes three of its passes."""
    costs = PassCosts((1, 8, 64), (1e-3, 1.1e-3, 2e-3), (0.0,) * 3)
    cheap = PassCosts((1, 8, 64), (2e-5, 2.2e-5, 4e-5), (0.0,) * 3, attention=3e-7)
    monkeypatch.setattr(adaptive, "costs_of", lambda target, levels, **_: [costs, *(cheap for _ in levels)])
    monkeypatch.setattr(adaptive, "DRAFT_WINDOW", 20)
    monkeypatch.setattr(adaptive, "Controller", lambda *given, **how: Controller(*given, **{**how, "by_clock": False}))
    target = tiny(seed=1, dtype=torch.float32)
    for layer in target.model.layers:  # what a token says depends on itself alone: any window drafts well
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    target.lm_head.weight.data *= 10  # no draft ends for want of confidence
    same = near(target, 0.0)
    config = {} if window is None else {"draft_window": window}
    out = write([same], prompts([190]), config, target, max_new_tokens=200)
    rounds = {False: 0, True: 0}
    for words, plan in out.speculation.plans.items():
        rounds[words.endswith(f", seeing {FIRST_SLOTS + 20} tokens")] += plan.rounds
    if window is None:
        assert rounds[True] > 3 * rounds[False]  # trials
    else:
        assert rounds[True] == 0
        assert {used for used, _ in seen} == {0}
    short = write([same], prompts([70]), config, target, max_new_tokens=20)
    assert not any("seeing" in words for words in short.speculation.plans)


@pytest.mark.plans
def test_a_window_that_is_given_is_no_choice(seen):
    out = write([NEAR], prompts([190]), {"draft_window": 40})
    assert out.speculation.plans
    assert not any("seeing" in words for words in out.speculation.plans)
    assert {used for used, model in seen if model is NEAR} <= {40}
