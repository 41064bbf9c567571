"""Does a trace hold what happened, refuse what cannot have, and make a chain repeat it?"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import CPU, VOCAB, PointMasses, TableRunner

from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.drafters.checked import CheckedDrafter, engine_checks
from hf_mlspec.speculation.loop import Loop, decode
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.sampling import Sampler
from hf_mlspec.speculation.traces.file import (
    read_trace,
    rows_from_list,
    rows_to_list,
    trace_from_dict,
    trace_to_dict,
    write_trace,
)
from hf_mlspec.speculation.traces.recorder import TraceRecorder
from hf_mlspec.speculation.traces.script import ScriptedChecker, scripted
from hf_mlspec.speculation.traces.trace import SCHEMA, Round, Trace, TracedLevel, TracedModel, TracedRow, longest

MOST = 6  # tokens a draft of these traces may hold


def level(name: str = "draft", most: int = MOST) -> TracedLevel:
    return TracedLevel(name, num_draft_tokens=most)


def trace_of(rows: list[TracedRow], depth: int, **more) -> Trace:
    settings = {"data": "words", "prompts_sha256": "0" * 64, "max_new_tokens": 40, "batch_size": 2, **more}
    levels = tuple(level(f"level {n}") for n in range(depth))
    return Trace(TracedModel("target", "float32", layers=2), levels, rows=tuple(rows), **settings)


@st.composite
def rounds(draw, depth: int, drafted: int | None = None) -> Round:
    """A round whose draft was made by `depth` levels, of `drafted` tokens where that is given."""
    if depth == 0:
        return Round(0, 0)
    inner: list[Round] = []
    if depth == 1:
        drafted = draw(st.integers(0, MOST)) if drafted is None else drafted
    else:
        target, drafted = draw(st.integers(0, MOST)) if drafted is None else drafted, 0
        while drafted < target:
            one = draw(rounds(depth - 1))
            one = one if drafted + one.settled <= target else Round(0, 0)
            inner.append(one)
            drafted += one.settled
    return Round(drafted, draw(st.integers(0, drafted)), tuple(inner))


@st.composite
def traced_rows(draw, depth: int) -> TracedRow:
    """At most 5 rounds of at most 7 tokens: below max_new_tokens. The last may be cut."""
    made = draw(st.lists(rounds(depth), min_size=1, max_size=5))
    before = sum(one.settled for one in made[:-1])
    return TracedRow(draw(st.integers(1, 9)), before + draw(st.integers(1, made[-1].settled)), tuple(made))


@st.composite
def traces(draw) -> Trace:
    depth = draw(st.integers(0, 3))
    return trace_of(draw(st.lists(traced_rows(depth), min_size=1, max_size=4)), depth)


def chain_of(depth: int) -> tuple[Checker, list[CheckedDrafter | PointMasses]]:
    """Models that are tables, which know nothing of any trace: a target, `depth` levels, all over four tokens."""
    generator = torch.Generator().manual_seed(depth)
    def checker(name: str) -> Checker:
        return Checker(TableRunner(torch.rand(VOCAB, VOCAB, generator=generator)), Sampler(VOCAB), name)
    found = []
    for number in range(depth):
        found.insert(0, PointMasses([1, 2, 3, 0]) if not number else CheckedDrafter(
            checker(f"level {number}"), found[0], num_draft_tokens=3))
    return checker("target"), found


def run(target, drafter, rows, budgets, watch=None, num_draft_tokens=MOST):
    """Decode; -> the rows, and the counts of the loop."""
    rows = [list(row) for row in rows]

    def emit(numbers, kept, verdict):
        """Nobody listens."""

    listening = emit if watch is None else watch.watch(target, drafter, [len(row) for row in rows], emit)
    stats = decode(target, drafter, rows, budgets, num_draft_tokens=num_draft_tokens, emit=listening, device=CPU,
                   stop=lambda number, row, tokens: (len(tokens), False))
    return rows, stats


@settings(max_examples=60, deadline=None)
@given(traces())
def test_a_replay_recorded_again_is_the_trace(trace):
    """The strongest statement there is: whatever a trace says, chains do, round by round and level by level."""
    plain, levels = chain_of(len(trace.levels))
    target = ScriptedChecker(plain)
    found = scripted(levels[0], target) if levels else []
    target.start(len(trace.rows), CPU)
    target.follow([row.rounds for row in trace.rows])
    recorder = TraceRecorder()
    prompts = [[1] * row.prompt_tokens for row in trace.rows]
    written, _ = run(target, found[0] if found else None, prompts, [row.new_tokens for row in trace.rows], recorder)
    assert recorder.rows() == list(trace.rows)
    assert [len(row) for row in written] == [row.prompt_tokens + row.new_tokens for row in trace.rows]
    for at, one in enumerate(found):  # a level whose draft is empty throughout is asked nothing
        rounds = list(trace.rounds(at))
        assert (one.stats.drafted, one.stats.accepted) == (
            sum(r.drafted for r in rounds), sum(r.accepted for r in rounds))


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_listening_changes_nothing_and_hears_all(depth):
    prompts, budgets = [[0], [2, 1], [3, 3, 3]], [9, 1, 14]

    def once(recorder):
        target, levels = chain_of(depth)
        target.start(3, CPU)
        rows, stats = run(target, levels[0] if levels else None, prompts, budgets, recorder)
        return rows, stats, [replace(one.stats, seconds=0.0) for one in levels]

    recorder = TraceRecorder()
    (rows, stats, levels), (plain_rows, _, plain_levels) = once(recorder), once(None)
    assert rows == plain_rows
    assert levels == plain_levels
    trace = trace_of(recorder.rows(), depth)
    assert [row.new_tokens for row in trace.rows] == budgets
    assert (trace.new_tokens, trace.passes) == (stats.new_tokens, stats.row_passes)
    for at, one in enumerate(levels):
        heard = list(trace.rounds(at))
        assert (sum(r.drafted for r in heard), sum(r.accepted for r in heard)) == (one.drafted, one.accepted)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4))
def test_rounds_inside_one_call_are_told_apart(accepted):
    """accepted: per row, of each of its rounds. Pairs of finished rows are not there."""
    width = max(map(len, accepted))
    checks = [n for i in range(width) for row in accepted if i < len(row) for n in (row[i] + 1, row[i])]
    found = list(engine_checks([[0] * (sum(row) + len(row)) for row in accepted], checks))
    assert len(found) == width
    heard = [[a for _, line, alive in found for a in line[r:r + 1] if alive[r]] for r in range(len(accepted))]
    assert heard == accepted
    assert all(d == a + alive for drafted, line, on in found for d, a, alive in zip(drafted, line, on, strict=True))


@settings(max_examples=40, deadline=None)
@given(traces())
def test_a_trace_comes_back_from_json(trace):
    assert trace_from_dict(json.loads(json.dumps(trace_to_dict(trace)))) == trace
    assert rows_from_list(json.loads(json.dumps(rows_to_list(list(trace.rows))))) == list(trace.rows)


def test_a_trace_comes_back_from_its_file(tmp_path):
    rows = [TracedRow(3, 4, (Round(0, 0), Round(3, 2, (Round(2, 1), Round(0, 0)))))]
    trace = trace_of(rows, 2, origin={"commit": "abc", "ä": [1]})
    file = tmp_path / "folder" / "one.json"
    write_trace(trace, file)
    assert read_trace(file) == trace
    assert '{"prompt_tokens":3,"new_tokens":4,"rounds":[[0,0],[3,2,[[2,1],[0,0]]]]}' in file.read_text()
    assert list(file.parent.iterdir()) == [file]


def test_the_target_alone_takes_a_round_a_token():
    trace = trace_of([TracedRow(3, 4, (Round(0, 0), Round(3, 2)))], 1).alone()
    assert trace.levels == ()
    assert trace.rows == (TracedRow(3, 4, (Round(0, 0),) * 4),)


def test_the_longest_guess_may_lie_inside_a_round():
    inside = Round(3, 1, (Round(5, 2),))  # guessed 5, kept 2 and one more: 3 drafted
    row = TracedRow(10, 4, (Round(0, 0), inside, Round(0, 0)))
    assert [longest(row, n) for n in (1, 2, 4)] == [10, 16, 16]


ROW = {"prompt_tokens": 2, "new_tokens": 5, "rounds": [[0, 0], [6, 3, [[2, 2], [4, 2]]]]}
BAD_ROWS = {
    "more accepted than drafted": ([[0, 0], [2, 3]], 1, r"row 0, round 1: 3 of 2 drafted tokens accepted"),
    "negative": ([[0, 0], [4, -1]], 1, "-1 of 4"),
    "longer than asked": ([[0, 0], [7, 3]], 1, "a draft holds at most 6"),
    "too few tokens": ([[0, 0]], 1, "5 new tokens, but its 1 rounds commit 1"),
    "rounds after the end": ([[6, 4], [1, 0]], 1, "commit 6, 5 of them before the last"),
    "no rounds": ([], 1, "its 0 rounds commit 0"),
    "inner sum": ([[0, 0], [6, 3, [[2, 2], [4, 1]]]], 2, "6 tokens drafted, but its inner rounds commit 5"),
    "no inner rounds": ([[0, 0], [6, 3]], 2, "inner rounds commit 0"),
    "inner verdict": ([[0, 0], [6, 3, [[1, 2], [4, 2]]]], 2, "row 0, round 1, inner round 0: 2 of 1"),
    "inner rounds of the last": ([[0, 0], [6, 3, [[2, 2], [4, 2]]]], 1, "there is no level below"),
    "drafts of nobody": ([[0, 0], [6, 3]], 0, "holds at most 0"),
    "a float": ([[0, 0], [6, 3.0]], 1, r"row 0, round 1 is \[6, 3.0\], no \[drafted, accepted\]"),
    "a word": ([[0, 0], "six"], 1, 'is "six", no'),
    "true": ([[0, 0], [6, True]], 1, r"\[6, true\]"),
    "inner no list": ([[0, 0], [6, 3, 2]], 2, r"\[6, 3, 2\], no"),
}


@pytest.mark.parametrize(("found", "depth", "words"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_rounds_that_cannot_be_are_refused(found, depth, words):
    data = trace_to_dict(trace_of([], depth))
    with pytest.raises(ValueError, match=words):
        trace_from_dict({**data, "rows": [{**ROW, "rounds": found}]})


BAD_HEADS = {
    "no trace": ([], "is not a trace"),
    "no schema": ({"rows": []}, 'has no "schema"'),
    "another version": ({"schema": "mlspec-trace/2"}, f"is 'mlspec-trace/2', this version reads '{SCHEMA}'"),
    "nothing else": ({"schema": SCHEMA}, "the trace has no 'data'"),
}


@pytest.mark.parametrize(("data", "words"), BAD_HEADS.values(), ids=BAD_HEADS)
def test_another_document_is_refused(data, words):
    with pytest.raises(ValueError, match=words):
        trace_from_dict(data)


@pytest.mark.parametrize(("change", "words"), [
    ({"max_new_tokens": "5"}, "'max_new_tokens' is \"5\", no int"),
    ({"max_new_tokens": 4}, "of the new ones at most max_new_tokens"),
    ({"levels": [{}]}, "level 0 has no 'name'"),
    ({"levels": [3]}, "level 0 is 3, no object"),
    ({"target": {"name": 5}}, "the target: 'name' is 5"),
    ({"rows": [{"prompt_tokens": 2, "new_tokens": 1}]}, "row 0 has no 'rounds'"),
    ({"rows": [{**ROW, "prompt_tokens": 0}]}, "0 prompt tokens"),
    ({"rows": 3}, "'rows' is 3, no list"),
])
def test_a_damaged_part_is_named(change, words):
    data = trace_to_dict(trace_of([TracedRow(2, 5, (Round(0, 0), Round(6, 3, (Round(2, 2), Round(4, 2)))))], 2))
    with pytest.raises(ValueError, match=words):
        trace_from_dict({**data, **change})


@pytest.mark.parametrize("text", ["", "{", '{"schema"', "\x00"])
def test_a_damaged_file_is_named(text, tmp_path):
    file = tmp_path / "cut.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"cut\.json: "):
        read_trace(file)


def test_every_cut_of_a_file_is_refused(tmp_path):
    trace = trace_of([TracedRow(3, 4, (Round(0, 0), Round(3, 2)))], 1)
    write_trace(trace, file := tmp_path / "one.json")
    whole = file.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"one\.json"):
            read_trace(file)


def test_rows_that_are_not_there_are_refused():
    trace = trace_of([TracedRow(3, 1, (Round(0, 0),))] * 2, 1)
    assert len(trace.of_rows([1, 1, 0]).rows) == 3
    for row in (2, -1):
        with pytest.raises(ValueError, match=f"2 rows, numbered from 0; there is no row {row}"):
            trace.of_rows([0, row])


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_join_a_replay_draft_nothing_and_disturb_nobody(depth):
    inner = () if depth == 1 else (Round(2, 1), Round(0, 0))
    plain, levels = chain_of(depth)
    target = ScriptedChecker(plain)
    found = scripted(levels[0], target)
    target.start(2, CPU)
    target.follow([(Round(0, 0), Round(3, 2, inner), Round(0, 0)), (Round(0, 0),)])
    heard, rounds = [], HostRounds(target, found[0], num_draft_tokens=MOST, device=CPU)
    loop = Loop(rounds, stop=lambda number, row, tokens: (len(tokens), False),
                emit=lambda numbers, kept, verdict: heard.append([len(tokens) for tokens in kept]))
    loop.start([[1], [1]], [5, 1])
    assert loop.round() == [0]
    loop.replace([1], [[2, 3]], [4], [2])
    loop.admit([[3]], [2], [3])
    assert loop.round() == [0, 1, 2]
    assert loop.drafted == [3, 0, 0]
    assert loop.round() == [1]
    assert heard == [[1, 1], [3, 1, 1], [1, 1, 1]]


def test_a_draft_of_another_length_is_an_error():
    plain, levels = chain_of(1)
    target = ScriptedChecker(plain)
    target.start(1, CPU)
    target.follow([(Round(2, 1),)])
    with pytest.raises(RuntimeError, match="brings 4 drafted tokens where the trace says 2"):
        target.check([[0, 1]], levels[0].propose([[0, 1]], [4]))
