"""Does a stream whose level fails go on with the target alone, whenever that happens?"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from device_path import rounds
from models import near, tiny

import hf_mlspec
from hf_mlspec import Request, generate_stream
from hf_mlspec.integration.costs import probe
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.draft import Draft
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.stats import LevelStats

__all__ = ["rounds"]
SETTINGS = {"do_sample": False, "eos_token_id": None}


class Failing:
    """A level that drafts as often as it is told, and then fails."""

    name = "failing"

    def __init__(self, good: int):
        self.good, self.stats = good, LevelStats("failing")

    def start(self, batch, device): ...

    def select(self, keep): ...

    def admit(self, count): ...

    def replace(self, row): ...

    def rollback(self, lengths): ...

    def propose(self, rows, limits):
        self.good -= 1
        if self.good < 0:
            raise ArithmeticError("no more guesses")
        return Draft.from_lists([[7] * min(limit, 2) for limit in limits])


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("config", [None, {"num_draft_tokens": 2}], ids=["chosen", "given"])
def test_the_target_goes_on_alone(good, config, caplog):
    target = tiny(seed=2, dtype=torch.float32)
    asked = [Request([5, 6 + n], id=n, max_new_tokens=20) for n in range(5)]
    expected = [target.generate(torch.tensor([one.input_ids]), max_new_tokens=20, **SETTINGS)[0].tolist()
                for one in asked]
    done = list(generate_stream(target, asked, max_batch=2, assistant_models=[Failing(good)],
                                speculation_config=config, **SETTINGS))
    assert {one.id: one.sequence for one in done} == dict(enumerate(expected))
    assert "no more guesses" in hf_mlspec.last_stats(target).levels_error
    assert caplog.text.count("goes on with the target alone") == 1


class FailingIn(Failing):
    """A level that fails in another of its duties."""

    def __init__(self, duty: str, good: int):
        super().__init__(good=10**6)
        self.duty, self.left = duty, good
        for name in ("start", "select", "admit", "replace", "rollback"):
            setattr(self, name, partial(self._did, name))

    def _did(self, name, *_):
        if name == self.duty:
            self.left -= 1
            if self.left < 0:
                raise ArithmeticError("no more guesses")


@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize(("duty", "good"), [("start", 0), ("select", 0), ("admit", 0), ("replace", 0),
                                            ("rollback", 0), ("rollback", 3)])
@pytest.mark.parametrize("config", [None, {"num_draft_tokens": 2}], ids=["chosen", "given"])
def test_whatever_a_level_was_to_do(duty, good, config, caplog):
    target = tiny(seed=2, dtype=torch.float32)
    limits = [20, 9, 14, 3, 17, 6]
    expected = [target.generate(torch.tensor([[5, 6 + n]]), max_new_tokens=limit, **SETTINGS)[0].tolist()
                for n, limit in enumerate(limits)]

    def source():
        for n, limit in enumerate(limits):
            yield Request([5, 6 + n], id=n, max_new_tokens=limit)
            if n % 2 == 0:
                yield None  # the next one finds rows that run: it joins them

    level = FailingIn(duty, good)
    done = list(generate_stream(target, source(), max_batch=3, assistant_models=[level], speculation_config=config,
                                **SETTINGS))
    assert {one.id: one.sequence for one in done} == dict(enumerate(expected))
    assert level.left == -1
    assert "no more guesses" in hf_mlspec.last_stats(target).levels_error
    assert caplog.text.count("goes on with the target alone") == 1


@pytest.mark.plans
@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("again", [
    False, pytest.param(True, marks=pytest.mark.skipif(not has_compiled_decoder(), reason="no costs are timed again")),
], ids=["first", "again"])
def test_a_level_that_fails_while_it_is_timed(again, monkeypatch, caplog):
    """When nothing is known of it, or when what is known is timed once more."""
    target = tiny(seed=2, dtype=torch.float32)
    draft, own, failed = near(target, 0.05), probe.measured, []
    asked = [Request([5, 6 + n], id=n, max_new_tokens=20) for n in range(5)]
    expected = [target.generate(torch.tensor([one.input_ids]), max_new_tokens=20, **SETTINGS)[0].tolist()
                for one in asked]  # fmt: skip
    if again:
        monkeypatch.setattr(probe, "measured", partial(own, repeats=1))
        list(generate_stream(target, [[5, 6]], assistant_models=[draft], max_new_tokens=20, **SETTINGS))
        later = probe.monotonic() + 10**6
        monkeypatch.setattr(probe, "monotonic", lambda: later)

    def failing(engine, **how):
        if engine.model is draft:
            failed.append(how.get("tokens"))
            raise ArithmeticError("this level cannot run")
        return own(engine, **how)

    monkeypatch.setattr(probe, "_cached", lambda *_, **__: None)
    monkeypatch.setattr(probe, "measured", failing)
    done = list(generate_stream(target, asked, max_batch=2, assistant_models=[draft], **SETTINGS))
    assert [tokens and tokens[:2] for tokens in failed] == [(1, 8) if again else None]
    assert {one.id: one.sequence for one in done} == dict(enumerate(expected))
    assert hf_mlspec.last_stats(target).levels_error == "this level cannot run"
    assert caplog.text.count("goes on with the target alone") == 1


class Right(FailingIn):
    """A level that drafts what the target writes."""

    def __init__(self, duty: str, expected: list[int]):
        super().__init__(duty, 0)
        self.expected = expected

    def propose(self, rows, limits):
        return Draft.from_lists([self.expected[len(row) :][: min(limit, 2)]
                                 for row, limit in zip(rows, limits, strict=True)])  # fmt: skip


def test_the_round_in_which_a_level_fails_counts_as_it_was():
    target = tiny(seed=2, dtype=torch.float32)
    level = Right("rollback", target.generate(torch.tensor([[5, 6]]), max_new_tokens=20, **SETTINGS)[0].tolist())
    *told, done = generate_stream(target, [Request([5, 6], max_new_tokens=20)], assistant_models=[level], events=True,
                                  speculation_config={"num_draft_tokens": 2}, **SETTINGS)  # fmt: skip
    stats = hf_mlspec.last_stats(target)
    assert done.sequence == level.expected
    assert told[0].levels == ["failing", "failing", None]
    assert done.speculation.target_passes == stats.row_passes == stats.target_passes == 18
    assert [[one.drafted, one.accepted] for one in (*stats.levels, *done.speculation.levels)] == [[2, 2], [2, 2]]


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_a_stream_that_is_captured_makes_no_rounds_of_the_host(rounds, monkeypatch):
    target = hf_mlspec.prepare(tiny(seed=2, dtype=torch.bfloat16), engine="cuda")
    made, init = [], HostRounds.__init__

    def counted(self, *args, **how):
        made.append(1)
        init(self, *args, **how)

    monkeypatch.setattr(HostRounds, "__init__", counted)
    (done,) = generate_stream(target, [[5, 6]], assistant_models=[near(target, 0.05)], max_new_tokens=5, **SETTINGS)
    assert (len(done.new_tokens), bool(rounds), made) == (5, True, [])


def test_where_processes_share_the_model_an_error_of_a_level_ends_the_stream(monkeypatch):
    """It may be what another process told: to go on with the target alone would wait for that one for ever."""
    target = tiny(seed=2, dtype=torch.float32)
    level = Right("rollback", target.generate(torch.tensor([[5, 6]]), max_new_tokens=20, **SETTINGS)[0].tolist())

    def raised(model, error):
        raise error

    monkeypatch.setattr("hf_mlspec.integration.stream.rounds.raise_if_shared", raised)
    with pytest.raises(ArithmeticError, match="no more guesses"):
        list(generate_stream(target, [[5, 6]], assistant_models=[level], max_new_tokens=20,
                             speculation_config={"num_draft_tokens": 2}, **SETTINGS))  # fmt: skip
