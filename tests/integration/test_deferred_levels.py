"""Do calls that stay "off" do without their levels, and get them when a plan uses them, with the same ids?"""

from __future__ import annotations

import pytest
import torch
from built_levels import levels_built
from models import near, prompts, tiny

import hf_mlspec
from hf_mlspec.integration import adaptive
from hf_mlspec.integration.stream.stream import stream_in_rounds
from hf_mlspec.nn.state import state_of
from hf_mlspec.speculation.controller import Controller
from hf_mlspec.speculation.costs import PassCosts
from hf_mlspec.speculation.fixed_shapes import FixedController
from hf_mlspec.speculation.forecast import Forecast
from hf_mlspec.speculation.plans import Plan, Situation, off
from hf_mlspec.speculation.search import Choice

pytestmark = pytest.mark.plans

CHEAP = PassCosts((1, 256), (1e-3, 2e-3), (0.0, 0.0))


@pytest.fixture
def target():
    return tiny(seed=1, dtype=torch.float32)


@pytest.fixture
def built(monkeypatch):
    """Costs are given. -> per call of Wiring the levels that it built."""
    monkeypatch.setattr(adaptive, "costs_of", lambda own, levels, **_: [CHEAP] * (1 + len(levels)))
    return levels_built(monkeypatch)


@pytest.fixture
def chooses(monkeypatch):
    """Every choice is the next of these lengths, and then the last of them for ever."""
    wanted = [0]

    def choose(self: Controller, situation: Situation) -> Plan:
        length = wanted.pop(0) if len(wanted) > 1 else wanted[0]
        plan = Plan((length, *[0] * (len(self.levels) - 1))) if length else off(len(self.levels))
        self.choice = Choice(plan, [plan.most] * len(situation.rooms), self.forecast)
        return plan

    monkeypatch.setattr(Controller, "choose", choose)
    return wanted


def write(model, levels: list, lengths: tuple[int, ...] = (9, 4), **options):
    torch.manual_seed(4)
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    return model.generate(**prompts(list(lengths)), assistant_models=levels, **{**settings, **options})


@pytest.mark.parametrize("levels", [["mxfp4"], ["early_exit:1", "prompt_lookup"], ["ngram"]], ids=str)
def test_only_the_first_call_builds_levels_that_never_draft(target, levels, built, chooses):
    for _ in range(3):
        out = write(target, levels)
    assert [bool(names) for names in built] == [True, False, False]
    assert [level.name for level in out.speculation.levels] == levels
    assert all(level.drafted == level.cache_bytes == 0 for level in out.speculation.levels)
    assert list(out.speculation.plans) == ["off"]
    assert out.speculation.plans["off"].rounds == 30


def test_a_server_has_its_levels_and_their_caches_from_the_beginning(target, built, chooses):
    draft, how = near(target, 0.02), {"prefill_chunk": None, "prefix_cache": None, "speculation_config": None}
    request = {"input_ids": [5, 6, 7], "max_new_tokens": 3, "do_sample": False, "eos_token_id": []}
    for _ in range(2):
        list(hf_mlspec.generate_stream(target, [request], assistant_models=["mxfp4", draft]))
    assert [bool(names) for names in built] == [True, False]
    for told in stream_in_rounds(target, [request], max_batch=2, assistant_models=["mxfp4", draft], tokenizer=None,
                                 **how):
        held = [level.cache_bytes for level in hf_mlspec.last_stats(target).levels]
        assert told
        assert held[1] > 0
    assert built[-1] == ["mxfp4", "LlamaForCausalLM"]


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["cast", "model", "cast and model", "early exit and lookup"])
def test_levels_come_in_the_middle_of_a_call(target, kind, sampling, built, chooses):
    draft = near(target, 0.02)
    levels = {"cast": ["mxfp4"], "model": [draft], "cast and model": ["mxfp4", draft],
              "early exit and lookup": ["early_exit:1", "prompt_lookup"]}[kind]
    alone = write(target, [], (9, 4, 6), **sampling)
    write(target, levels, (9, 4, 6), **sampling)
    chooses[:] = [0, 0, 0, 0, 0, 3]
    out = write(target, levels, (9, 4, 6), **sampling)
    assert torch.equal(out.sequences, alone.sequences)
    assert built[-2:] == [[], [level if isinstance(level, str) else "LlamaForCausalLM" for level in levels]]
    told = out.speculation
    assert told.plans["off"].rounds in (5, 6)  # one more where the target first reads the prompts
    assert told.levels[0].accepted > 0
    assert sum(plan.rounds for plan in told.plans.values()) == told.target_passes


def test_a_level_that_comes_late_knows_which_rows_are_left(target, built, chooses):
    """The noise of a row goes by its number: with that of another one a draft of the target itself would be rejected.
    """
    levels, sampling = [near(target, 0.0)], {"do_sample": True, "max_new_tokens": 40}
    rows = write(target, [], (9, 4, 6), **sampling).sequences[:, 9:]
    end = int(rows[0, 2])  # the first row ends early
    alone = write(target, [], (9, 4, 6), **sampling, eos_token_id=end, pad_token_id=0)
    write(target, levels, (9, 4, 6), **sampling)
    chooses[:] = [0] * 8 + [3]
    out = write(target, levels, (9, 4, 6), **sampling, eos_token_id=end, pad_token_id=0)
    assert torch.equal(out.sequences, alone.sequences)
    if not out.speculation.levels[0].drafted:
        pytest.skip("all rows ended before a level came")
    assert out.speculation.levels[0].acceptance > 0.9


def test_what_changed_is_looked_at_in_every_call(target, built, chooses):
    draft = near(target, 0.02)
    write(target, [draft])
    assert not built[-1] or write(target, [draft])
    draft.generation_config.num_assistant_tokens = 2  # obeyed: nothing is chosen
    assert not write(target, [draft]).speculation.plans
    draft.generation_config.num_assistant_tokens = None
    with torch.no_grad():
        target.model.norm.weight.mul_(1.5)  # the decoder is built anew, and with it the levels
    assert torch.equal(write(target, [draft]).sequences, write(target, []).sequences)
    assert built[-2:] == [["LlamaForCausalLM"], []]


def test_words_of_a_call_that_could_not_be_are_refused_each_time(target, built, chooses):
    for _ in range(2):
        with pytest.raises(ValueError, match="neither an existing folder nor a known word"):
            write(target, ["mxfp5"])
    write(target, ["mxfp4"])
    with pytest.raises(ValueError, match="cannot check drafts"):
        write(target, ["ngram", "mxfp4"])


def test_nothing_is_known_of_what_was_cleared(target, built, chooses):
    write(target, ["mxfp4"])
    hf_mlspec.clear(target)
    assert not state_of(target).known
    write(target, ["mxfp4"])
    assert built[-1] == ["mxfp4"]


def test_a_short_call_in_captured_rounds_does_without_levels_to_its_end(target, built):
    options = {"speculation_config": {"engine": "cuda"}, "max_new_tokens": 8}
    levels = ["early_exit:1"]
    for _ in range(3):
        alone = write(target, levels, **options)
    (chain,) = [one for one in state_of(target).chains if one.planned]
    chain.unquestioned, chain.choosing_seconds = 0, 1e6  # no call has time to choose
    assert {choice.plan.active for choice in chain.first_choices.values()} == {()}
    built.clear()
    for _ in range(7):
        out = write(target, levels, **options)
        assert torch.equal(out.sequences, alone.sequences)
    assert built == [[]] * 7
    assert chain.unquestioned == 7
    told = out.speculation
    assert [level.name for level in told.levels] == levels
    assert list(told.plans) == ["off"]
    assert told.plans["off"].rounds == 8
    write(target, levels, **options)  # one in eight asks again
    assert built[-1] == levels


def test_long_calls_in_captured_rounds_do_without_levels_as_long_as_choices_agree(target, built, monkeypatch):
    def off_again(self: FixedController, situation: Situation) -> Choice:
        rounds = Forecast(8.0, 1e-3, 1e-3)  # however busy the machine is
        self.choice = Choice(off(len(self.levels)), [0] * len(situation.rooms), rounds, off_speed=8e3)
        return self.choice

    monkeypatch.setattr(FixedController, "choose", off_again)
    monkeypatch.setattr(FixedController, "best_of", off_again)
    monkeypatch.setattr(Choice, "correct_off", lambda *_: None)
    options = {"speculation_config": {"engine": "cuda"}, "max_new_tokens": 200}
    levels, alone = ["early_exit:1"], write(target, [], **{"max_new_tokens": 200})
    write(target, levels, **options)
    (chain,) = [one for one in state_of(target).chains if one.planned]
    asked = []
    for _ in range(13):
        chain.choosing_seconds, chain.may_wait = 0.04, 0.05  # little enough to be done in the call, and not little
        built.clear()
        assert torch.equal(write(target, levels, **options).sequences, alone.sequences)
        asked.append(built[-1] == levels)
    assert {choice.plan.active for choice in chain.first_choices.values()} == {()}
    assert asked == [True, False, True, *[False] * 3, True, *[False] * 6]
