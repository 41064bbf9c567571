"""Does a controller of captured rounds on a GPU change time and never a token, in a bounded number of graphs?"""

from __future__ import annotations

import random

import pytest
import torch
from models import near, prompts, tiny
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.integration.costs.replayed import replays
from hf_mlspec.nn.state import state_of
from hf_mlspec.speculation.costs import measure
from hf_mlspec.speculation.fixed_shapes import FixedController
from hf_mlspec.speculation.plans import LENGTHS, Plan, Situation
from hf_mlspec.speculation.rounds import graphs
from hf_mlspec.speculation.search import Choice

pytestmark = pytest.mark.plans
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2}
OPTIONS = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": None}
BATCHES = {"one row": [9], "three": [3, 17, 1], "eight": [3, 17, 1, 9, 9, 2, 30, 5], "long": [700, 3]}


def asked(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompts(lengths).items()}


@pytest.fixture(scope="module")
def target():
    return tiny(**SHAPE, max_position_embeddings=2048).cuda()


@pytest.fixture(scope="module")
def draft(target):
    return near(tiny(**SHAPE, max_position_embeddings=2048), 0.02).cuda()


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


@pytest.fixture
def restless(monkeypatch):
    """A controller that takes another plan almost every round; -> the plans."""
    dice, plans = random.Random(5), []

    def choose(self: FixedController, situation: Situation) -> Plan:
        active = dice.choice([(), *self._choices.at(0)])
        plan = Plan(tuple(dice.choice(LENGTHS[:5]) if index in active else 0 for index in range(len(self.levels))))
        self.choice = Choice(plan, [plan.most] * len(situation.rooms), self.forecast)
        self._left = dice.choice((0, 0, 2))
        plans.append(plan)
        return plan

    monkeypatch.setattr(FixedController, "choose", choose)
    return plans


def chains(draft) -> dict[str, list]:
    return {"draft": [draft], "mxfp4": ["mxfp4"], "mxfp4, draft": ["mxfp4", draft],
            "mxfp4, early exit": ["mxfp4", "early_exit:1"], "lookup": ["prompt_lookup"],
            "mxfp4, lookup": ["mxfp4", "prompt_lookup"]}  # fmt: skip


def check(target, levels, lengths, **sampling) -> None:
    options = {**OPTIONS, **sampling}
    torch.manual_seed(4)
    alone = target.generate(**asked(lengths), **options, assistant_models=[])
    torch.manual_seed(4)
    assert torch.equal(target.generate(**asked(lengths), **options, assistant_models=levels), alone)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("chain", chains(None))
def test_plans_that_change_at_random_change_no_token(restless, target, draft, chain, lengths, sampling):
    check(target, chains(draft)[chain], lengths, **sampling)
    assert len(set(restless)) > 2
    kept = state_of(target).chains
    assert all(len(one.graphs._graphs) <= graphs._KEPT for one in kept)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("chain", chains(None))
def test_plans_that_are_chosen_change_no_token(target, draft, chain, lengths):
    for _ in range(3):
        check(target, chains(draft)[chain], lengths)
    stats = hf_mlspec.last_stats(target)
    first = max(len(lengths), stats.prefill_tokens)  # without levels, plans count what comes behind the first round
    assert sum(plan.tokens for plan in stats.plans.values()) >= stats.new_tokens - first


def test_twins_of_the_target_are_right_whatever_ran_before(restless, target):
    twins = [tiny(**SHAPE, max_position_embeddings=2048).cuda() for _ in range(2)]
    for lengths in BATCHES.values():
        target.generate(**asked(lengths), **OPTIONS, assistant_models=twins)
        levels = hf_mlspec.last_stats(target).levels
        assert [level.accepted for level in levels] == [level.drafted for level in levels]
        assert all(level.drafted for level in levels)


def test_without_memory_for_rounds_with_levels_the_target_goes_on_alone(target, draft, monkeypatch, caplog):
    capture = graphs.RoundGraphs.capture

    def full(self, program, batch):
        if program.active:
            raise torch.OutOfMemoryError("CUDA out of memory")
        capture(self, program, batch)

    def choose(self: FixedController, situation: Situation) -> Plan:
        self.choice = Choice(Plan((4,)), [4] * len(situation.rooms), self.forecast)
        return self.plan

    hf_mlspec.clear(target)
    alone = target.generate(**asked([3, 17, 1]), **OPTIONS, assistant_models=[])
    monkeypatch.setattr(FixedController, "choose", choose)
    monkeypatch.setattr(graphs.RoundGraphs, "capture", full)
    assert torch.equal(target.generate(**asked([3, 17, 1]), **OPTIONS, assistant_models=[draft]), alone)
    said = [line for line in caplog.messages if "not captured, not enough memory: the target goes on alone" in line]
    assert len(said) == 1


def test_a_pass_of_a_replay_takes_less_than_one_that_is_launched(target):
    """Costs of captured rounds are those of kernels, not of Python between them."""
    from hf_mlspec.engines.choose import engine_of

    engine = engine_of(target, name="cuda")
    with torch.inference_mode():
        found = measure(replays(engine), budget=1.0, tokens=(1, 8, 64), passes=4)
    assert found.tokens == (1, 8, 64)
    assert 0 < found.seconds[0] <= found.seconds[-1] < 2e-3
