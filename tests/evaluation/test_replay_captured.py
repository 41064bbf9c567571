"""Do captured rounds settle what a trace says, in as many rounds as it has, with the passes of their fixed shapes?

Rounds run uncaptured on the CPU, through the same program as the one that a GPU replays.
"""

from __future__ import annotations

import pytest
import torch
from models import near, tiny

import hf_mlspec
from hf_mlspec.evaluation import level_acceptance, replay, replay_captured, reschedule
from hf_mlspec.speculation.traces.script import ScriptedChecker
from hf_mlspec.speculation.traces.trace import Round, Trace, TracedLevel, TracedModel, TracedRow

ONE = (((0, 0), (3, 3), (3, 0), (3, 2), (3, 3)), ((0, 0), (3, 1), (3, 1), (3, 3), (3, 2), (3, 0)),
       ((0, 0), (3, 0), (3, 0), (3, 0), (3, 0), (3, 1), (3, 2), (3, 3)))  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return hf_mlspec.prepare(tiny(dtype=torch.float32), engine="cuda")


@pytest.fixture(scope="module")
def draft(target):
    return near(target, 0.03)


def trace_of(rows, levels, new_tokens=13) -> Trace:
    """rows: rounds as tuples; every row has as many new tokens as its rounds settle, at most new_tokens."""
    found = []
    for number, rounds in enumerate(rows):
        plain = tuple(_round(*round) for round in rounds)
        found.append(TracedRow(4 + number, min(new_tokens, sum(round.settled for round in plain)), plain))
    asked = tuple(TracedLevel(f"level {n}", num_draft_tokens=most) for n, most in enumerate(levels))
    return Trace(TracedModel("target"), asked, "made up", "0", new_tokens, 1, tuple(found))


def _round(drafted: int, accepted: int, inner=()) -> Round:
    return Round(drafted, accepted, tuple(_round(*pair) for pair in inner))


def single() -> Trace:
    return trace_of(ONE, [3])


def nested() -> Trace:
    rows = (
        ((0, 0), (4, 4, ((2, 0), (2, 2))), (6, 2, ((2, 2), (2, 2)))),
        ((0, 0), (2, 0, ((2, 0), (2, 0))), (3, 3, ((2, 1), (2, 0))), (5, 4, ((2, 1), (2, 2)))),
    )
    return trace_of(rows, [6, 2])


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_cast_settles_what_the_trace_says(target, batch):
    trace = single()
    found = replay_captured(target, trace, ["mxfp4"], batch_size=batch)
    level = found.stats.levels[0]
    assert found.tokens == sum(row.new_tokens - 1 for row in trace.rows)
    assert found.stats.row_passes == sum(len(row.rounds) - 1 for row in trace.rows)
    # The last round of a row drafts no further than the row goes, and accepts no more.
    assert level.accepted == found.tokens - found.stats.row_passes
    assert (level.name, found.fused_rounds) == ("mxfp4 (replayed)", True)
    assert 0 < found.decode_seconds < found.seconds


@pytest.mark.parametrize("batch", [1, 2])
def test_two_levels_settle_what_the_trace_says(target, draft, batch):
    trace = nested()
    found = replay_captured(target, trace, ["mxfp4", draft], batch_size=batch)
    assert found.tokens == sum(row.new_tokens - 1 for row in trace.rows)
    assert found.stats.row_passes == sum(len(row.rounds) - 1 for row in trace.rows)


def test_verdicts_of_every_check_are_those_of_the_trace(target, draft):
    """The last round ends with the row: nothing is cut, every check is the trace's."""
    trace = trace_of((((0, 0), (4, 4, ((2, 0), (2, 2))), (6, 6, ((2, 2), (2, 2)))),), [6, 2])
    found = replay_captured(target, trace, ["mxfp4", draft]).stats.levels
    expected = level_acceptance(trace)
    assert [(one.drafted, one.accepted, one.tested) for one in found] == [
        (one.drafted, one.accepted, one.tested) for one in expected]


def test_passes_are_those_of_the_rounds_shape(target):
    trace = single()
    found = replay_captured(target, trace, ["mxfp4"], batch_size=3)
    rounds = max(len(row.rounds) - 1 for row in trace.rows)
    assert found.stats.target_passes == rounds
    assert found.stats.levels[0].forwards == 3 * rounds


def test_the_target_alone_gains_every_token(target):
    trace = single().alone()
    found = replay_captured(target, trace, [], batch_size=3)
    assert found.tokens == sum(row.new_tokens - 1 for row in trace.rows)
    assert found.stats.levels == []


def test_fewer_tokens_than_were_recorded(target):
    found = replay_captured(target, single(), ["mxfp4"], max_new_tokens=4)
    assert found.tokens == 3 * 3


def test_a_draft_that_begins_with_the_prompt(target, draft):
    rows = (((3, 2), (3, 3), (3, 0)),)
    trace = trace_of(rows, [3], new_tokens=8)
    found = replay_captured(target, trace, [draft])
    assert found.tokens == 8
    assert found.stats.row_passes == 3


def test_rescheduled_traces_fit(target, draft):
    for trace, levels, lengths in ((single(), ["mxfp4"], [5]), (nested(), ["mxfp4", draft], [4, 3])):
        again = reschedule(trace, lengths)
        found = replay_captured(target, again, levels, batch_size=2)
        assert found.tokens == sum(row.new_tokens - 1 for row in again.rows)
        assert found.stats.row_passes == sum(len(row.rounds) - 1 for row in again.rows)


def test_tokens_a_pass_are_those_of_the_step_by_step_replay(target):
    trace = single()
    captured = replay_captured(target, trace, ["mxfp4"]).stats
    stepped = replay(target, trace, ["mxfp4"]).stats
    assert captured.row_passes == stepped.row_passes - len(trace.rows)
    assert captured.new_tokens == stepped.new_tokens - len(trace.rows)


def test_no_check_is_decided_on_the_host(target, monkeypatch):
    monkeypatch.setattr(ScriptedChecker, "_accept", None)
    assert replay_captured(target, single(), ["mxfp4"]).tokens


def test_rounds_too_large_for_the_shape_are_refused(target, draft):
    many = trace_of((((0, 0), (3, 3, ((0, 0), (0, 0), (0, 0)))),), [6, 2])
    with pytest.raises(ValueError, match=r"row 0 .* a round of 3 drafted tokens in 3 inner rounds, .* hold 6 in 2"):
        replay_captured(target, many, ["mxfp4", draft])


def test_models_on_another_engine_are_refused():
    how = r"the target runs (module by module|in steps, some of which wait for the host)"
    with pytest.raises(ValueError, match=rf"these rounds cannot be captured: {how}; replay"):
        replay_captured(tiny(dtype=torch.float32), single(), ["mxfp4"])


@pytest.mark.parametrize(("asked", "named"), [({"batch_size": 4}, "a batch of 4"), ({"rows": [7]}, "no row 7"),
                                              ({"max_new_tokens": 99}, "max_new_tokens is 99")])
def test_what_replay_refuses_is_refused(target, asked, named):
    with pytest.raises(ValueError, match=named):
        replay_captured(target, single(), ["mxfp4"], **asked)
    with pytest.raises(ValueError, match="1 levels"):
        replay_captured(target, single(), [])
