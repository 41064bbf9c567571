"""Do levels that see a part of the text change no token on a GPU, in captured rounds and step by step?"""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from models import near, prompts, tiny
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.integration import adaptive
from hf_mlspec.integration import call as decoding
from hf_mlspec.ops.attention_plain import FIRST_SLOTS
from hf_mlspec.speculation.controller import Choice
from hf_mlspec.speculation.fixed_shapes import FixedController
from hf_mlspec.speculation.plans import LENGTHS, Plan, Situation

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2,
         "max_position_embeddings": 4096}  # fmt: skip
OPTIONS = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": None}
BATCHES = {"one row": [1500], "three": [1500, 70, 700], "one that waits": [2100, 3]}
LEVELS = ("draft", "mxfp4", "mxfp4, draft", "mxfp4, early exit", "draft, lookup")


def asked(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompts(lengths).items()}


def levels(name: str, draft) -> list:
    words = {"draft": draft, "early exit": "early_exit:1", "lookup": "prompt_lookup"}
    return [words.get(word, word) for word in name.split(", ")]


@pytest.fixture(scope="module")
def target():
    return tiny(**SHAPE).cuda()


@pytest.fixture(scope="module")
def draft(target):
    return near(tiny(**SHAPE), 0.02).cuda()


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


def check(target, names, lengths, **options) -> None:
    config = options.pop("speculation_config", None)
    torch.manual_seed(4)
    alone = target.generate(**asked(lengths), **OPTIONS | options, assistant_models=[])
    torch.manual_seed(4)
    given = {} if config is None else {"speculation_config": config}
    out = target.generate(**asked(lengths), **OPTIONS | options, **given, assistant_models=names)
    assert torch.equal(out, alone)
    assert hf_mlspec.last_stats(target).levels[0].drafted > 0


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [1, 64, 512, 4096])
@pytest.mark.parametrize("name", LEVELS)
def test_a_window_changes_no_token(target, draft, name, window, lengths, sampling):
    config = {"draft_window": window, "num_draft_tokens": 4}
    check(target, levels(name, draft), lengths, speculation_config=config, **sampling)


@pytest.mark.parametrize("name", LEVELS)
def test_step_by_step_too(target, draft, name, monkeypatch):
    monkeypatch.setattr(decoding, "captured", lambda *_: nullcontext())
    for window in (0, 100, 30):  # steps of the same shape, captured with another window
        config = {"draft_window": window, "num_draft_tokens": 4}
        check(target, levels(name, draft), BATCHES["three"], speculation_config=config)


@pytest.mark.plans
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", LEVELS)
def test_windows_that_come_and_go_change_no_token(target, draft, name, lengths, monkeypatch):
    dice, plans = random.Random(5), []
    monkeypatch.setattr(adaptive, "DRAFT_WINDOW", 200)

    def choose(self: FixedController, situation: Situation) -> Plan:
        active = dice.choice([(), *self._choices.at(10_000)])
        plan = Plan(tuple(dice.choice(LENGTHS[:5]) if index in active else 0 for index in range(len(self.levels))))
        self.choice = Choice(plan, [plan.most] * len(situation.rooms), self.forecast)
        self._left = dice.choice((0, 0, 2))
        plans.append(plan)
        return plan

    monkeypatch.setattr(FixedController, "choose", choose)
    check(target, levels(name, draft), lengths)
    told = hf_mlspec.last_stats(target).plans
    assert any(words.endswith(f", seeing {FIRST_SLOTS + 200} tokens") for words in told)
    assert len({plan.split()[1] for plan in plans}) == 2


def test_the_window_decides_what_is_drafted(target):
    """A twin of the target is always right, if it sees what the target sees."""
    twin, accepted = near(tiny(**SHAPE), 0.0).cuda(), {}
    for window in (0, 30, 4096):
        config = {"draft_window": window, "num_draft_tokens": 4, "confidence_threshold": 0.0}
        target.generate(**asked([1500]), **OPTIONS, assistant_models=[twin], speculation_config=config)
        (level,) = hf_mlspec.last_stats(target).levels
        accepted[window] = level.accepted, level.drafted
    assert accepted[0] == accepted[4096]
    assert accepted[0][0] == accepted[0][1]
    assert accepted[30][0] < accepted[30][1]
