"""Does a trace say the same of other draft lengths as rounds of these lengths would have said?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hf_mlspec.evaluation import Trace, level_acceptance, read_trace
from hf_mlspec.evaluation.traces_schedule import agreement_rates, agreements, reschedule
from hf_mlspec.speculation.traces.trace import Round, TracedLevel, TracedModel, TracedRow

COMMITTED = Path(__file__).resolve().parents[2] / "eval" / "traces"
NEW = 60


def rounds_over(truth: list[list[bool]], start: int, draft: int, unroll: int, off_text: random.Random) -> Round:
    """The round that a pair with these agreements would have made at `start`; what is no text is drawn."""

    def run(level: int, at: int, most: int) -> int:
        verdicts = truth[level][at : at + most]
        return next((n for n, agrees in enumerate(verdicts) if not agrees), most)

    if len(truth) == 1:
        return Round(draft, run(0, start, draft))
    inner, at, on_text = [], start, True
    for _ in range(unroll):
        accepted = run(1, at, draft) if on_text else off_text.randrange(draft + 1)
        inner.append(Round(draft, accepted))
        on_text = on_text and run(0, at, accepted + 1) == accepted + 1
        at += accepted + 1
    return Round(at - start, run(0, start, at - start), tuple(inner))


def recorded(truth: list[list[list[bool]]], draft: int, unroll: int = 1, new_tokens: int = NEW) -> Trace:
    """The trace of rows whose agreements are `truth` [row][level][position], drafted at one length throughout."""
    rows = []
    for number, levels in enumerate(truth):
        at, found, off_text = 1, [Round(0, 0)], random.Random(number)
        while at < new_tokens:
            found.append(rounds_over(levels, at, draft, unroll, off_text))
            at += found[-1].settled
        rows.append(TracedRow(7, new_tokens, tuple(found)))
    widest = [draft] if len(truth[0]) == 1 else [unroll * (draft + 1), draft]
    levels = tuple(TracedLevel(f"level {n}", num_draft_tokens=most) for n, most in enumerate(widest))
    return Trace(TracedModel("target"), levels, "random", "0", new_tokens, 1, tuple(rows))


def kept(round: Round) -> list[Round]:
    """The inner rounds up to the one in which the checker's first rejection lies."""
    found, at = [], 0
    for inner in round.inner:
        if at > round.accepted:
            break
        found.append(inner)
        at += inner.settled
    return found


def truths(levels: int, rows: int = 12, seed: int = 0) -> list[list[list[bool]]]:
    draw = random.Random(seed)
    return [[[draw.random() < 0.8 for _ in range(3 * NEW)] for _ in range(levels)] for _ in range(rows)]


@pytest.mark.parametrize("levels", [1, 2])
def test_what_a_trace_reveals_is_true(levels):
    truth = truths(levels)
    for found, row in zip(agreements(recorded(truth, 4, unroll=2)), truth, strict=True):
        for revealed, real in zip(found.levels, row, strict=True):
            known = [(at, verdict) for at, verdict in enumerate(revealed) if verdict is not None]
            assert len(known) > NEW / 3
            assert all(real[at] == verdict for at, verdict in known)


def test_a_level_reveals_every_position_but_those_behind_whole_drafts():
    trace = recorded(truths(1), 4)
    for found, row in zip(agreements(trace), trace.rows, strict=True):
        behind, at = set(), 0
        for round in row.rounds:
            if round.accepted == round.drafted:
                behind.add(at + round.accepted)
            at += round.settled
        unknown = {at for at, verdict in enumerate(found.levels[0]) if verdict is None}
        assert unknown == {at for at in behind if at < NEW}


@pytest.mark.parametrize(("levels", "unroll"), [(1, 1), (2, 1), (2, 3)])
def test_the_lengths_of_the_recording_give_its_rounds(levels, unroll):
    trace = recorded(truths(levels), 4, unroll)
    asked = [4] if levels == 1 else [unroll * 5, 4]
    again = reschedule(trace, asked)
    for row, was in zip(again.rows, trace.rows, strict=True):
        # The last round reaches behind the row, and what a level drafts behind a rejection is drawn.
        assert [round.accepted for round in row.rounds[:-1]] == [round.accepted for round in was.rounds[:-1]]
        for one, other in zip(row.rounds[:-1], was.rounds[:-1], strict=True):
            assert kept(one) == kept(other)
    if levels == 1:
        assert again.rows[0].rounds[:-1] == trace.rows[0].rounds[:-1]


@pytest.mark.parametrize("draft", [1, 2, 3, 5, 9])
def test_other_lengths_give_the_rounds_that_such_drafts_would_have_had(draft):
    """From drafts of one token every agreement but those behind an accepted one is known: compare where nothing was
    drawn."""
    truth = truths(1, rows=40)
    trace = recorded(truth, 12)
    again, real, compared = reschedule(trace, draft), recorded(truth, draft), 0
    for row, was, found in zip(again.rows, real.rows, agreements(trace), strict=True):
        unknown = next((at for at, verdict in enumerate(found.levels[0]) if at and verdict is None), NEW)
        at = 0
        for one, other in zip(row.rounds, was.rounds, strict=False):
            if at + max(one.drafted, 1) > unknown:
                break
            assert one == other
            at, compared = at + one.settled, compared + 1
    assert compared > 40


def test_drawn_verdicts_follow_the_rate_and_are_the_same_again():
    trace = recorded(truths(1, rows=60), 2)
    again = reschedule(trace, 6, seed=3)
    assert again.rows == reschedule(trace, 6, seed=3).rows
    assert again.rows != reschedule(trace, 6, seed=4).rows
    told = again.origin["rescheduled"]
    assert told["agreement"] == agreement_rates(agreements(trace))
    assert told["agreement"][0] == pytest.approx(0.8, abs=0.03)
    assert 0.05 < told["drawn"] < 0.5
    assert level_acceptance(again)[0].acceptance == pytest.approx(0.8, abs=0.03)


def test_levels_prompts_and_lengths_of_the_result():
    trace = recorded(truths(2), 4, unroll=2)
    again = reschedule(trace, [8, 3], prompt_tokens=500)
    assert [level.num_draft_tokens for level in again.levels] == [8, 3]
    assert [level.confidence_threshold for level in again.levels] == [0.0, 0.0]
    assert {row.prompt_tokens for row in again.rows} == {500}
    for row in again.rows:
        assert row.rounds[0] == Round(0, 0)
        assert all(len(round.inner) == 2 for round in row.rounds[1:])
        assert all(inner.drafted == 3 for round in row.rounds[1:] for inner in round.inner)
    assert reschedule(trace, [9, 3]).levels[0].num_draft_tokens == 12  # whole rounds of 3 + 1


def test_the_committed_traces_keep_their_speed():
    """Tokens a pass at the recorded length, without the thresholds that cut drafts short, are at least the recorded
    ones, and more drafted tokens a pass never settle fewer."""
    trace = read_trace(COMMITTED / "code-76m-mxfp4-best-humaneval.json")
    found = [again.new_tokens / again.passes for again in (reschedule(trace, k) for k in (2, 4, 8, 12))]
    assert found == sorted(found)
    assert found[-1] > trace.new_tokens / trace.passes


@pytest.mark.parametrize("data", ["humaneval", "gsm8k"])
def test_a_committed_trace_at_its_own_length_is_itself(data):
    """Recorded without a threshold: all rounds are full but the last of a row, which may end behind the row."""
    trace = read_trace(COMMITTED / f"code-76m-mxfp4-long-{data}.json")
    again = reschedule(trace, 16)
    assert again.passes == trace.passes
    for row, was in zip(again.rows, trace.rows, strict=True):
        full = [round for round in was.rounds[:-1] if round.drafted == 16]
        assert len(full) >= len(was.rounds) - 3
        assert list(row.rounds[1 : len(full) + 1]) == full


@pytest.mark.parametrize(("asked", "named"), [
    ([4, 2], "2 numbers and the trace 1 levels"), ([0], r"num_draft_tokens \[0\]"), (0, r"num_draft_tokens \[0\]")])
def test_lengths_that_do_not_fit_are_refused(asked, named):
    with pytest.raises(ValueError, match=named):
        reschedule(recorded(truths(1, rows=1), 4), asked)


def test_a_trace_that_cannot_be_scheduled_anew_is_refused():
    trace = recorded(truths(1, rows=1), 4)
    with pytest.raises(ValueError, match="0 levels"):
        reschedule(trace.alone(), [])
    silent = recorded([[[True] * 9]], 4, new_tokens=1)
    with pytest.raises(ValueError, match="level 0 drafted nothing"):
        reschedule(silent, 4)
    with pytest.raises(ValueError, match="prompt_tokens 0"):
        reschedule(trace, 4, prompt_tokens=0)
