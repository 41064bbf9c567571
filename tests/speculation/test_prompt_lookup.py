"""Does prompt lookup copy what followed the longest, latest match, whatever was rolled back before?"""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rounds import CPU, Plan, play, proposals

from hf_mlspec.speculation.draft import Drafter
from hf_mlspec.speculation.drafters.agreement import agreed_length
from hf_mlspec.speculation.drafters.prompt_lookup import PromptLookup, SuffixIndex


def started(batch: int, **options) -> PromptLookup:
    drafter = PromptLookup(**options)
    drafter.start(batch, CPU)
    return drafter


def by_definition(row: list[int], limit: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The same by scanning the row."""
    for n in range(min(max_ngram, len(row)), min_ngram - 1, -1):
        for end in range(len(row) - 1, n - 1, -1):
            if row[end - n:end] == row[-n:]:
                return row[end:end + limit]
    return []


def test_copies_after_the_latest_of_the_longest_matches():
    row = [7, 1, 2, 3, 50, 1, 2, 3, 60, 9, 3, 70, 1, 2, 3]
    assert proposals(started(1), [row], [4]) == [[60, 9, 3, 70]]


def test_a_longer_earlier_match_beats_a_shorter_later_one():
    row = [1, 2, 3, 50, 4, 2, 3, 60, 9, 1, 2, 3]
    assert proposals(started(1, max_ngram=3), [row], [1]) == [[50]]
    assert proposals(started(1, max_ngram=2), [row], [1]) == [[60]]


def test_never_copies_past_the_end_of_the_row():
    assert proposals(started(1), [[5, 5]], [8]) == [[5]]
    assert proposals(started(1), [[1, 2, 1, 2]], [8]) == [[1, 2]]


def test_min_ngram_refuses_shorter_matches():
    row = [3, 50, 8, 3]
    assert proposals(started(1, min_ngram=1), [row], [2]) == [[50, 8]]
    assert proposals(started(1, min_ngram=2), [row], [2]) == [[]]


def test_ragged_rows_limits_and_select():
    drafter = started(3)
    rows = [[1, 2, 1], [4, 4, 4], [9]]
    assert proposals(drafter, rows, [5, 0, 5]) == [[2, 1], [], []]
    drafter.rollback([3, 3, 1])
    drafter.select([2, 0])
    assert proposals(drafter, [[9, 9], [1, 2, 1, 7, 1]], [1, 2]) == [[9], [7, 1]]


def test_it_is_a_drafter_and_counts_rounds():
    drafter = started(1)
    assert isinstance(drafter, Drafter)
    assert drafter.propose([[1, 1]], [1]).lengths == [1]
    assert (drafter.stats.rounds, drafter.stats.forwards) == (1, 0)
    assert drafter.stats.seconds > 0
    drafter.start(1, CPU)
    assert drafter.stats.rounds == 0


@given(st.integers(0, 10**9), st.integers(1, 4), st.integers(2, 6), st.booleans(), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_random_rollbacks_leave_what_a_fresh_drafter_has(seed, batch, vocab, tentative, min_ngram):
    def check(rows, limits, proposed):
        assert proposed == [by_definition(row, limit, 3, min_ngram) for row, limit in zip(rows, limits, strict=True)]

    play(PromptLookup(min_ngram=min_ngram), Plan(seed, batch, 8, vocab, tentative), check)


@given(st.lists(st.integers(0, 2), max_size=25), st.integers(0, 25))
def test_forgetting_undoes_learning_exactly(tokens, length):
    index, fresh = SuffixIndex(3), SuffixIndex(3)
    index.update(tokens)
    index.truncate(length)
    fresh.update(tokens[:length])
    assert vars(index) == vars(fresh)


def test_rollback_forgets_at_once():
    drafter = started(2)
    proposals(drafter, [[1, 2, 1, 2], [3, 3]], [1, 1])
    drafter.rollback([2, 5])
    assert [index.tokens for index in drafter._indices] == [[1, 2], [3, 3]]


def test_a_row_that_changed_without_a_rollback_is_learned_anew():
    drafter = started(1)
    proposals(drafter, [[1, 2, 3, 8, 8]], [2])
    assert proposals(drafter, [[1, 2, 3, 1, 2]], [2]) == [[3, 1]]
    assert proposals(drafter, [[1, 2, 1]], [2]) == [[2, 1]]


def test_time_per_call_does_not_grow_with_the_row():
    def seconds_per_call(length: int) -> float:
        drafter, row = started(1), list(range(length))
        proposals(drafter, [row], [4])
        times = []
        for token in range(60):
            row.append(token)
            begin = time.perf_counter()
            drafter.propose([row], [4])
            times.append(time.perf_counter() - begin)
            drafter.rollback([len(row)])
        return sorted(times)[len(times) // 2]

    # A scan of 100,000 tokens takes milliseconds; the index does not see them again.
    assert seconds_per_call(100_000) < 10 * seconds_per_call(100) + 2e-4


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(0, 0), (2, 3), (3, 0)])
def test_bad_sizes_are_refused_by_name(max_ngram, min_ngram):
    with pytest.raises(ValueError, match=f"min_ngram={min_ngram} and max_ngram={max_ngram}"):
        PromptLookup(max_ngram, min_ngram)


@pytest.mark.parametrize(("known", "row", "agreed"), [
    ([1, 2, 3], [1, 9, 3], 1), ([1, 2, 3], [1, 2, 3, 4], 3), ([1, 2, 3, 4], [1, 2], 2), ([], [1], 0),
    ([1, *[5] * 30, 7], [2, *[5] * 30, 7], 0),
])  # fmt: skip
def test_what_a_row_still_says_is_looked_for_far_back(known, row, agreed):
    """Other tokens may come back before ones that are the same."""
    assert agreed_length(known, row) == agreed
