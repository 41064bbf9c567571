"""Do calls that choose their plans write what the target alone writes, whatever the plans, and say what they chose?"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import VOCAB, letters, near, packed, prompts, tiny

import hf_mlspec
from hf_mlspec.integration import adaptive
from hf_mlspec.integration.config import SpeculationConfig
from hf_mlspec.speculation.controller import Choice, Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.draft import Draft, Rows
from hf_mlspec.speculation.plans import LENGTHS, Plan, Situation, off
from hf_mlspec.speculation.stats import LevelStats

pytestmark = pytest.mark.plans

TARGET = tiny(seed=1, dtype=torch.float32)  # the compiled engine takes it: no plan changes a bit
NEAR, FAR = near(TARGET, 0.02), tiny(seed=5, dtype=torch.float32)
FOREIGN = tiny(seed=2, dtype=torch.float32, vocab_size=VOCAB + 7)
CHAINS = {
    "model": [NEAR],
    "cast": ["mxfp4"],
    "cast and model": ["mxfp4", NEAR],
    "three levels": ["mxfp4", FAR, "prompt_lookup"],
    "early exit and table": ["early_exit:1", "ngram"],
}


@pytest.fixture
def restless(monkeypatch):
    """A controller that takes another plan, with other limits for every row, in every round; -> the plans."""
    dice, plans = random.Random(3), []

    def choose(self: Controller, situation: Situation) -> Plan:
        active = dice.choice([(), *self._choices.at(0)])
        lengths = [dice.choice(LENGTHS) if index in active else 0 for index in range(len(self.levels))]
        plan = Plan(tuple(lengths))
        limits = [dice.choice((0, plan.most, plan.most)) for _ in situation.rooms]
        self.choice = Choice(plan, limits, self.forecast)
        plans.append(plan)
        return plan

    monkeypatch.setattr(Controller, "choose", choose)
    return plans


def write(levels: list, inputs: dict, **options: object) -> torch.Tensor:
    torch.manual_seed(4)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, **options}
    return TARGET.generate(**inputs, assistant_models=levels, **settings)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}],
                         ids=["greedy", "sampled", "warped"])
@pytest.mark.parametrize("name", CHAINS)
def test_plans_that_change_at_random_change_no_token(name, sampling, restless):
    inputs = prompts([9, 4, 6])
    assert torch.equal(write(CHAINS[name], inputs, **sampling), write([], inputs, **sampling))
    assert len({plan.active for plan in restless}) > 1


SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "dtype": torch.float32}  # several groups
OWN_WEIGHTS = {
    "qspec": (lambda: packed(tiny(**SHAPE), "int4"), ["w4a8"]),
    "qspec and a lookup": (lambda: packed(tiny(**SHAPE), "mxfp4"), ["qspec", "prompt_lookup"]),
    "nested": (lambda: hf_mlspec.nest(tiny(**{**SHAPE, "dtype": torch.bfloat16})), ["nested", "early_exit:1"]),
    "planes": (lambda: packed(tiny(**SHAPE), "planes"), ["planes4", "planes2"]),
}


@pytest.mark.parametrize("stream", [False, True], ids=["call", "stream"])
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", OWN_WEIGHTS)
def test_levels_that_are_the_targets_own_weights_come_and_go_at_random(name, sampling, stream, restless):
    make, levels = OWN_WEIGHTS[name]
    target, inputs = make(), prompts([9, 4, 6])

    def written(levels: list) -> list:
        torch.manual_seed(4)
        settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, **sampling}
        if not stream:
            return target.generate(**inputs, assistant_models=levels, **settings).tolist()
        asked = [hf_mlspec.Request(prompts([5 + n])["input_ids"], id=n, seed=n, **settings) for n in range(4)]
        done = hf_mlspec.generate_stream(target, asked, assistant_models=levels, max_batch=2)
        return sorted((one.id, list(one.new_tokens)) for one in done)

    assert written(levels) == written([])
    assert len({plan.active for plan in restless}) > 1


def test_a_level_of_another_vocabulary_is_left_out_and_comes_back(restless):
    inputs, own, other = prompts([6, 9]), letters(), letters(7)
    options = {"tokenizer": own, "assistant_tokenizers": [other]}
    assert torch.equal(write([FOREIGN], inputs, **options), write([], inputs))
    assert {plan.active for plan in restless} == {(), (0,)}


def test_requests_of_a_stream_depend_on_no_plan(restless):
    asked = [hf_mlspec.Request(prompts([5 + n])["input_ids"], seed=n, do_sample=n % 2 == 0, eos_token_id=None)
             for n in range(6)]
    written = [
        {one.id: one.new_tokens for one in hf_mlspec.generate_stream(
            TARGET, [hf_mlspec.Request(one.input_ids, seed=n, id=n, **one.options) for n, one in enumerate(asked)],
            assistant_models=levels, max_new_tokens=20, max_batch=3)}
        for levels in (["mxfp4", NEAR], [])
    ]
    assert written[0] == written[1]
    assert len(set(restless)) > 3


def test_a_request_says_which_level_drafted_for_the_target(restless):
    asked = [hf_mlspec.Request(prompts([5])["input_ids"], eos_token_id=None)]
    (done,) = hf_mlspec.generate_stream(TARGET, asked, assistant_models=["mxfp4", NEAR], max_new_tokens=60)
    counts = {level.name: level for level in done.speculation.levels}
    assert len(counts) == 2  # the cast, and the model below it where the cast was left out
    assert all(level.drafted > 0 for level in counts.values())


def test_threads_share_what_was_learned():
    inputs = prompts([9, 4])
    alone = write([], inputs)
    write(["mxfp4", NEAR], inputs)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: write(["mxfp4", NEAR], inputs), range(12)))
    assert all(torch.equal(one, alone) for one in found)


def test_what_was_chosen_is_told():
    out = write(["mxfp4", NEAR], prompts([9]), return_dict_in_generate=True, max_new_tokens=80)
    found = out.speculation
    assert sum(plan.rounds for plan in found.plans.values()) == found.target_passes
    assert found.tokens_per_second > 0
    assert found.expected_tokens_per_second > 0
    assert found.to_dict()["plans"].keys() == found.plans.keys()
    assert found.gain_over_off == pytest.approx(
        sum(plan.off_seconds for plan in found.plans.values()) / sum(plan.seconds for plan in found.plans.values()))


@pytest.mark.parametrize("given", [{"num_draft_tokens": 3}, {"confidence_threshold": 0.5}])
def test_lengths_or_thresholds_that_are_given_are_obeyed(given):
    config = SpeculationConfig(**given)
    out = write([NEAR], prompts([9]), return_dict_in_generate=True, speculation_config=config)
    assert out.speculation.plans == {}
    assert out.speculation.levels[0].drafted > 0


def test_a_levels_own_generation_config_is_obeyed():
    level = near(TARGET, 0.02)
    level.generation_config.num_assistant_tokens = 2
    out = write([level], prompts([9]), return_dict_in_generate=True)
    assert out.speculation.plans == {}
    assert out.speculation.levels[0].drafted > 0


@pytest.mark.parametrize("value", ["auto", None, SpeculationConfig(max_ngram=2), {"cast_head": False}])
def test_other_options_leave_it_on(value):
    out = write(["mxfp4"], prompts([9]), return_dict_in_generate=True, speculation_config=value)
    assert out.speculation.plans


def test_another_word_is_refused():
    with pytest.raises(TypeError, match='SpeculationConfig, a dict or "auto", got \'off\''):
        write(["mxfp4"], prompts([9]), speculation_config="off")


class Failing:
    """Drafts what the row's last token was, and then raises."""

    name = "failing"

    def __init__(self, good: int):
        self.good, self.stats = good, LevelStats(self.name)

    def start(self, batch: int, device: torch.device) -> None:
        self.stats.reset()

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        self.good -= 1
        if self.good < 0:
            raise RuntimeError("the table is gone")
        return Draft.from_lists([row[-1:] * limit for row, limit in zip(rows, limits, strict=True)])

    def rollback(self, lengths: list[int]) -> None: ...
    def select(self, keep: list[int]) -> None: ...
    def admit(self, count: int) -> None: ...
    def replace(self, row: int) -> None: ...


def always(monkeypatch, length: int = 3) -> None:
    def choose(self: Controller, situation: Situation) -> Plan:
        plan = Plan((length,)) if self._choices.all else off(1)
        self.choice = Choice(plan, [plan.most] * len(situation.rooms), self.forecast)
        return plan

    monkeypatch.setattr(Controller, "choose", choose)


def test_a_level_that_fails_while_decoding_leaves_the_target_to_itself(monkeypatch, caplog):
    always(monkeypatch)
    inputs = prompts([9, 4])
    assert torch.equal(write([Failing(4)], inputs), write([], inputs))
    said = [line for line in caplog.messages if "the target goes on alone" in line]
    assert len(said) == 1
    assert "the table is gone" in said[0]


def test_a_level_that_never_drafted_is_an_error(monkeypatch):
    always(monkeypatch)
    with pytest.raises(RuntimeError, match="the table is gone"):
        write([Failing(0)], prompts([9]))


def test_a_level_that_never_pays_is_named_once(caplog):
    for _ in range(2):
        TARGET.generate(**prompts([6]), assistant_models=[Failing(10**9)], max_new_tokens=200, eos_token_id=None)
    said = [line for line in caplog.messages if "does not pay here" in line]
    assert len(said) == 1
    assert "level failing took part in" in said[0]
    assert "tokens a second were written" in said[0]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_module_by_module_a_call_repeats_itself(sampling, monkeypatch):
    """Widths change bits there, so plans follow counts and nothing that an earlier call left."""
    dear, cheap = (PassCosts((1, 256), (one, 2 * one), (0.0, 0.0)) for one in (5e-3, 3e-4))
    monkeypatch.setattr(adaptive, "costs_of", lambda target, levels, **_: [dear, *[cheap] * len(levels)])
    target = tiny(seed=1, dtype=torch.float64)
    levels = [near(target, 0.1), "early_exit:1"]
    found = []
    for _ in range(3):
        torch.manual_seed(4)
        out = target.generate(**prompts([9, 4, 6]), assistant_models=levels, max_new_tokens=60, eos_token_id=None,
                              return_dict_in_generate=True, **sampling)
        plans = {words: plan.rounds for words, plan in out.speculation.plans.items()}
        found.append((out.sequences.tolist(), plans))
    assert found[0] == found[1] == found[2]
    assert any(words != "off" and rounds > 1 for words, rounds in found[0][1].items())


def test_a_call_that_stays_off_is_told_to_its_controller_and_counted_to_its_end(monkeypatch):
    """The controller hears of most rounds of "off" at once, and of the last ones when the call ends."""
    told, single = [], []
    observe, observe_off = Controller.observe, Controller.observe_off

    def choose(self: Controller, situation: Situation) -> Plan:
        self.choice = Choice(off(len(self.levels)), [0] * len(situation.rooms), self.forecast)
        self._left = 9
        return self.plan

    def all_(self: Controller, rounds: int, seconds: float) -> None:
        told.append((rounds, seconds))
        observe_off(self, rounds, seconds)

    def one(self: Controller, *given: object) -> None:
        single.append(given)
        observe(self, *given)

    monkeypatch.setattr(Controller, "choose", choose)
    monkeypatch.setattr(Controller, "observe_off", all_)
    monkeypatch.setattr(Controller, "observe", one)
    write([NEAR], prompts([9]))
    stats = hf_mlspec.last_stats(TARGET)
    assert stats.plans["off"].rounds == 40
    assert stats.plans["off"].tokens + 1 == 40  # the first one read the prompt
    assert sum(rounds for rounds, _ in told) + len(single) == 40
    assert sum(rounds for rounds, _ in told) > 30
    assert all(seconds > 0 for _, seconds in told)
