"""Does the loop keep what counts, stop each row on its own, and ask no level for more than it may?"""

from __future__ import annotations

import pytest
import torch
from tables import CPU, VOCAB, PointMasses, TableRunner

from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.loop import decode
from hf_mlspec.speculation.sampling import Sampler

CYCLE = torch.full((VOCAB, VOCAB), 0.1).scatter(1, torch.tensor([[1], [2], [3], [0]]), 0.7)


class Watched(PointMasses):
    """Guesses the cycle, right but after token 2, and writes down what it is told."""

    def __init__(self):
        super().__init__([1, 2, 0, 0])
        self.limits, self.lengths, self.kept = [], [], []

    def propose(self, rows, limits):
        self.limits.append(list(limits))
        return super().propose(rows, limits)

    def rollback(self, lengths):
        self.lengths.append(list(lengths))

    def select(self, keep):
        self.kept.append(list(keep))


def run(rows, budgets, *, below=None, num_draft_tokens=3, **ends):
    target = Checker(TableRunner(CYCLE), Sampler(VOCAB), "target")
    target.start(len(rows), CPU)
    emitted = []
    stats = decode(
        target,
        below,
        rows,
        budgets,
        num_draft_tokens=num_draft_tokens,
        emit=lambda numbers, kept, verdict: emitted.append((list(numbers), [list(line) for line in kept])),
        device=CPU,
        **ends,
    )
    return stats, emitted


def cycle(start: int, count: int) -> list[int]:
    return [(start + i) % VOCAB for i in range(1, count + 1)]


@pytest.mark.parametrize("below", [None, Watched()])
def test_budgets_are_filled_exactly(below):
    rows = [[0], [2, 1], [3]]
    stats, _ = run(rows, [7, 1, 12], below=below)
    assert rows == [[0, *cycle(0, 7)], [2, 1, *cycle(1, 1)], [3, *cycle(3, 12)]]
    assert stats.new_tokens == 20


def test_limits_leave_room_for_the_correction():
    below = Watched()
    run([[0], [0]], [5, 2], below=below)
    assert below.limits[0] == [3, 1]
    assert all(0 <= limit <= 3 for limits in below.limits for limit in limits)


def test_levels_hear_what_was_true():
    below = Watched()
    run([[0]], [8], below=below)
    # 1, 2 are right and 0 is not: row and two guesses; then 3 is known, 0, 1, 2 are guessed right; one place is left.
    assert below.lengths == [[3], [7], [8]]
    assert below.stats.accepted == 5


def test_rows_leave_when_they_stop():
    below = Watched()
    rows = [[0], [1], [2]]

    def stop(number, row, tokens):
        if number == 1 and 3 in tokens:
            return tokens.index(3) + 1, True
        return len(tokens), False

    stats, emitted = run(rows, [9, 9, 4], below=below, stop=stop)
    assert rows == [[0, *cycle(0, 9)], [1, 2, 3], [2, *cycle(2, 4)]]
    assert emitted[0][0] == [0, 1, 2]
    assert all(numbers == [0] or 1 not in numbers for numbers, _ in emitted[1:])
    first = [kept[numbers.index(0)] for numbers, kept in emitted if 0 in numbers]
    assert [token for line in first for token in line] == cycle(0, 9)
    assert below.kept  # rows were taken out
    assert stats.new_tokens == 9 + 2 + 4


def test_tokens_behind_a_stop_are_dropped():
    rows = [[0]]
    stats, emitted = run(rows, [9], below=Watched(), stop=lambda number, row, tokens: (1, True))
    assert rows == [[0, 1]]
    assert emitted == [([0], [[1]])]
    assert (stats.new_tokens, stats.target_passes, stats.row_passes) == (1, 1, 1)


def test_a_row_ends_behind_the_first_of_the_ends_it_gains():
    rows = [[0], [1], [3]]  # an end in the prompt ends nothing
    stats, emitted = run(rows, [9, 9, 2], below=Watched(), ends=frozenset({3, 1000}))
    assert rows == [[0, *cycle(0, 3)], [1, 2, 3], [3, *cycle(3, 2)]]
    assert stats.new_tokens == 3 + 2 + 2 == sum(len(line) for _, kept in emitted for line in kept)


def test_a_level_in_the_targets_cache_waits_for_the_prefill():
    below = Watched()
    below.follows = True
    rows = [[0]]
    stats, emitted = run(rows, [9], below=below)
    assert emitted[0] == ([0], [[1]])
    assert rows == [[0, *cycle(0, 9)]]
    assert len(below.limits) == stats.target_passes - 1


def test_passes_are_counted_per_row():
    stats, _ = run([[0], [1]], [5, 2])
    assert (stats.target_passes, stats.row_passes) == (5, 7)
    assert 0 <= stats.target_seconds <= stats.seconds


def test_the_first_pass_is_the_prefill():
    stats, _ = run([[0], [1]], [5, 1])
    assert stats.prefill_tokens == 2
    assert 0 <= stats.prefill_target_seconds <= stats.prefill_seconds < stats.seconds


def test_every_level_that_drafts_before_the_prefill_counts_to_it():
    class Timed(Watched):
        def propose(self, rows, limits):
            self.stats.seconds += 1.0
            return super().propose(rows, limits)

    below = Timed()
    below.inner = Timed()
    below.inner.stats.seconds = 3.0
    below.inner.inner = object()  # of a drafter of the user's own: no level
    run([[0]], [9], below=below)
    assert below.stats.seconds > below.stats.prefill_seconds == 1.0
    assert below.inner.stats.prefill_seconds == 3.0


def test_a_draft_before_the_prefill_counts_to_it():
    class Timed(Watched):
        def propose(self, rows, limits):
            self.stats.seconds += 1.0
            return super().propose(rows, limits)

    stats, emitted = run([[0]], [9], below=Timed())
    assert stats.prefill_tokens == len(emitted[0][1][0]) > 1
    assert stats.prefill_draft_seconds == 1.0
    below = Timed()
    below.follows = True
    assert run([[0]], [9], below=below)[0].prefill_draft_seconds == 0.0
