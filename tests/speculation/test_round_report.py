"""Is what a captured round reported told check by check, and what a lookup could have drafted?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hf_mlspec.speculation.rounds.program import NOT_CHECKED, LookupLevel, RoundLevel, RoundProgram
from hf_mlspec.speculation.rounds.report import told

GONE = NOT_CHECKED


def model(name: str) -> RoundLevel:
    return RoundLevel(name, SimpleNamespace(num_layers=2), own_cache=False, bits=None, vocab_size=9)


def program(*levels, most: list[int]) -> RoundProgram:
    return RoundProgram([model("target"), *levels], most=most, active=tuple(range(len(levels))))


LOOKUP = LookupLevel("lookup", 1, 3)


def test_a_lookup_could_have_drafted_as_much_as_there_is_room_for():
    report = told(program(LOOKUP, most=[4]), [
        [0, 0, 0, 7, -1, -1, -1, -1], [0, 2, 1, 7, 8, -1, -1, -1], [0, 2, 2, 7, 8, 9, -1, -1], [0, *[GONE] * 7]
    ], [9, 9, 2, 9])  # fmt: skip
    (check,) = report.checks
    assert report.tokens == [[7], [7, 8], [7, 8, 9], []]
    assert check.asked == [4, 4, 2, 0]
    assert (check.drafted, check.accepted, check.alive) == ([0, 2, 2, 0], [0, 1, 2, 0], [True, True, True, False])
    assert (check.checker, check.drafter) == (-1, 0)


def test_a_draft_of_a_model_is_as_long_as_it_could_be():
    (check,) = told(program(model("draft"), most=[3]), [[0, 2, 1, 7, 8, -1, -1]], [9]).checks
    assert check.asked == check.drafted == [2]


@pytest.mark.parametrize(("room", "asked"), [(9, [4, 4]), (5, [4, 3]), (1, [0, 0]), (0, [0, 0])])
def test_below_a_level_in_the_middle_there_is_room_for_what_is_left_of_its_draft(room, asked):
    rounds = program(model("middle"), LOOKUP, most=[2, 4])
    lines = [[0, 1, 0, 0, 0, *[0] * 12]]  # two checks of the middle, then the target's
    first, second, last = told(rounds, lines, [room]).checks
    assert [first.asked, second.asked] == [[asked[0]], [asked[1]]]
    assert (first.checker, first.drafter, last.checker, last.drafter) == (0, 1, -1, 0)


def test_of_rounds_without_levels_tokens_are_told():
    report = told(RoundProgram([model("target")]), [[0, *[0, 0, 5] * 8]], [20])
    assert report.tokens == [[5] * 8]
    assert report.checks == []
