"""Does a call of the target alone stop where its rows end, and not at the end of a round of many steps?"""

from __future__ import annotations

import pytest
import torch
from device_path import OPTIONS, draft, stepwise, target
from models import prompts

import hf_mlspec
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds.graphs import RoundGraphs
from hf_mlspec.speculation.rounds.program import UNROLLED
from hf_mlspec.speculation.rounds.steps import Steps

__all__ = ["draft", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]
INPUTS = prompts([9, 4])


@pytest.fixture
def steps(monkeypatch):
    """Steps of the target in every round that was launched, in order."""
    launched, launch = [], RoundGraphs.launch

    def counted(self, program, batch):
        launched.append(program.forwards(0))
        launch(self, program, batch)

    monkeypatch.setattr(RoundGraphs, "launch", counted)
    return launched


@pytest.mark.parametrize(("tokens", "expected"), [(1, [1]), (3, [1, 1, 1]), (8, [8]), (10, [8, 1, 1]), (16, [8, 8])])
def test_the_last_tokens_are_single_steps(target, steps, tokens, expected):
    out = target.generate(**INPUTS, **{**OPTIONS, "max_new_tokens": tokens}, assistant_models=[])
    assert steps == expected
    assert torch.equal(out, stepwise(target, INPUTS, max_new_tokens=tokens))


@pytest.mark.plans
def test_also_where_plans_are_chosen(target, draft, steps):
    settings = {**OPTIONS, "max_new_tokens": 3}
    out = target.generate(**INPUTS, **settings, assistant_models=[draft])
    stats = target.generate(**INPUTS, **settings, assistant_models=[draft], return_dict_in_generate=True).speculation
    assert UNROLLED not in steps
    assert torch.equal(out, stepwise(target, INPUTS, max_new_tokens=3))
    assert sum(plan.rounds for plan in stats.plans.values()) <= 3


def test_single_steps_are_captured_when_they_would_have_saved_as_much(target, steps, monkeypatch):
    """Each call of 2 tokens runs 6 steps for nothing, of 1 second each, as the first one shows; capturing takes 14."""
    captured, capture = set(), RoundGraphs.capture

    def first_of(self, program, batch):
        captured.add(id(program))
        capture(self, program, batch)

    monkeypatch.setattr(RoundGraphs, "capture", first_of)
    monkeypatch.setattr(RoundGraphs, "has", lambda self, program, batch: id(program) in captured)
    monkeypatch.setattr(RoundGraphs, "seconds_to_capture", lambda self, program: 14.0)
    always = property(lambda self: 8.0, lambda self, seconds: None)
    monkeypatch.setattr(RoundGraphs, "round_seconds", always, raising=False)
    settings = {**OPTIONS, "max_new_tokens": 2}
    expected = stepwise(target, INPUTS, max_new_tokens=2)
    told = []
    for _ in range(4):
        del steps[:]
        out = target.generate(**INPUTS, **settings, assistant_models=[])
        told.append(list(steps))
        assert torch.equal(out, expected)
    assert told == [[8], [8], [8], [1, 1]]


@pytest.mark.parametrize(("step", "host", "expected"), [(1.0, 0.5, [1, 8, 1, 8]), (1.0, 9.0, [8, 1, 8, 1])])
def test_rows_of_a_stream_get_their_first_token_early(target, steps, monkeypatch, step, host, expected):
    """Unless all rows would wait longer for the host, between two rounds more, than those that join wait less."""
    def known(self, *_):
        self.chain.step_seconds, self._host = step, host

    for name in ("ended", "waits"):
        monkeypatch.setattr(Steps, name, known)
    made = Steps.__init__
    monkeypatch.setattr(Steps, "__init__", lambda self, chain: (made(self, chain), known(self))[0])
    rows = [INPUTS["input_ids"][r][INPUTS["attention_mask"][r].bool()].tolist() for r in range(2)]
    done = list(hf_mlspec.generate_stream(target, rows, max_batch=1, max_new_tokens=9, do_sample=False,
                                          eos_token_id=[]))
    assert steps == expected
    for row, one in zip(rows, done, strict=True):
        alone = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
        assert one.sequence == stepwise(target, alone, max_new_tokens=9)[0].tolist()
