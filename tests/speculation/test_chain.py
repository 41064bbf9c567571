"""Is a drafter whose guesses were checked a drafter again: what does it hand up, and when does it end?"""

from __future__ import annotations

import pytest
import torch
from tables import CPU, VOCAB, PointMasses, TableRunner, chain, drafter, table

from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.draft import Draft, Drafter
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.sampling import Sampler

# The greedy successor of token t is (t + 1) % VOCAB, with probability 0.7; of token 3 it is 0, with probability 0.4.
CYCLE = torch.tensor([[0.1, 0.7, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1], [0.1, 0.1, 0.1, 0.7], [0.4, 0.3, 0.2, 0.1]])
RIGHT = [1, 2, 3, 0]
WRONG = [0, 0, 0, 3]


def greedy(threshold: float = 0.0, *, successor=RIGHT, num_draft_tokens: int = 2, **options) -> CheckedDrafter:
    level = CheckedDrafter(
        Checker(TableRunner(CYCLE), Sampler(VOCAB), "cycle"),
        PointMasses(successor),
        num_draft_tokens=num_draft_tokens,
        threshold=threshold,
        **options,
    )
    return level


def propose(level: Drafter, rows: list[list[int]], limits: list[int]) -> list[list[int]]:
    level.start(len(rows), CPU)
    before = [list(row) for row in rows]
    draft = level.propose(rows, limits)
    assert rows == before
    assert all(length <= limit for length, limit in zip(draft.lengths, limits, strict=True))
    return [line[:n] for line, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


def test_it_is_a_drafter():
    assert isinstance(greedy(), Drafter)


@pytest.mark.parametrize("successor", [RIGHT, WRONG], ids=["right guesses", "wrong guesses"])
@pytest.mark.parametrize("limits", [[5, 5], [1, 4], [0, 3], [0, 0], [7, 1]])
def test_limits_are_filled_whatever_the_guesses_are(successor, limits):
    written = propose(greedy(successor=successor), [[0], [2, 2]], limits)
    expected = [[1, 2, 3, 0, 1, 2, 3], [3, 0, 1, 2, 3, 0, 1]]
    assert written == [line[:n] for line, n in zip(expected, limits, strict=True)]


def test_corrections_are_handed_up():
    level = greedy(successor=WRONG)
    assert propose(level, [[0]], [3]) == [[1, 2, 3]]
    assert level.inner.stats.accepted == 0
    assert level.inner.stats.drafted == 2 + 1  # at most num_draft_tokens, and one place is the correction's


def test_a_threshold_ends_the_draft_behind_the_doubtful_token():
    # Token 0 after 3 has probability 0.4: it is handed up, and ends the draft; so may the rest of its round.
    assert propose(greedy(0.5, num_draft_tokens=1), [[1], [2]], [8, 8]) == [[2, 3, 0, 1], [3, 0]]
    assert propose(greedy(0.0, num_draft_tokens=1), [[1]], [8]) == [[2, 3, 0, 1, 2, 3, 0, 1]]
    assert propose(greedy(0.8), [[0]], [8]) == [[1, 2, 3]]  # the first round is always handed up


def test_a_row_that_is_done_does_not_disturb_the_others():
    level = greedy(0.5, num_draft_tokens=1)
    both = propose(level, [[2], [0]], [8, 8])
    assert both == [propose(level, [[2]], [8])[0], propose(level, [[0]], [8])[0]]


def test_sampled_tokens_are_those_the_checker_draws_alone():
    level, alone = (chain([CYCLE], below) for below in (drafter(table(1)), PointMasses(WRONG)))
    rows, limits = [[0], [1], [2, 3]], [5, 2, 4]
    assert propose(level, rows, limits) == propose(alone, rows, limits)
    assert [len(line) for line in propose(level, rows, limits)] == limits


def test_counts():
    level = greedy(num_draft_tokens=2)
    level.start(2, CPU)
    level.propose([[0], [1]], [6, 3])
    inner = level.inner.stats
    assert (inner.drafted, inner.accepted) == (4 + 2, 4 + 2)  # a round gives two guesses and one token more
    assert level.stats.rounds == 1
    assert level.stats.forwards == level.checker.runner.forwards == 2
    level.start(1, CPU)
    assert level.stats.rounds == 0


def test_rollback_and_select_reach_both_halves():
    calls = []

    class Inner(PointMasses):
        def rollback(self, lengths):
            calls.append(("rollback", list(lengths)))

        def select(self, keep):
            calls.append(("select", list(keep)))

    level = CheckedDrafter(
        Checker(TableRunner(CYCLE), Sampler(VOCAB), "cycle"), Inner(RIGHT), num_draft_tokens=2, threshold=0.0
    )
    level.start(3, CPU)
    rows = [[0], [1], [2]]
    level.propose(rows, [3, 3, 3])
    calls.clear()
    level.rollback([2, 1, 4])
    level.select([2, 0])
    assert calls == [("rollback", [2, 1, 4]), ("select", [2, 0])]
    assert level.checker.runner.lengths == [3, 2]
    assert level.checker.sampler.row_ids == [2, 0]


def test_rows_beyond_its_positions_rest(caplog):
    level = greedy(max_positions=6)
    assert propose(level, [[0], [0, 1, 2, 3]], [3, 3]) == [[1, 2, 3], []]
    assert "level cycle has only 6 positions: no drafts for longer rows" in caplog.text


def test_depth_is_free():
    level: Drafter = PointMasses(WRONG)
    for _ in range(5):
        runner = Checker(TableRunner(CYCLE), Sampler(VOCAB), "cycle")
        level = CheckedDrafter(runner, level, num_draft_tokens=3, threshold=0.0)
    assert propose(level, [[0], [3]], [7, 2]) == [[1, 2, 3, 0, 1, 2, 3], [0, 1]]


def test_nan_is_an_error_that_names_the_level():
    bad = CYCLE.clone()
    bad[2] = float("nan")
    for seed in (None, 3):
        level = Checker(TableRunner(bad), Sampler(VOCAB, seed=seed), "the middle")
        level.start(2, CPU)
        with pytest.raises(FloatingPointError, match=r"logits of the middle are NaN.*float32"):
            level.check([[0], [2]], Draft.from_lists([[], []]))
