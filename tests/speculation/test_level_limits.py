"""Does a level draft what it may, with the noise of its checker, and forget exactly what was rejected?"""

from __future__ import annotations

import torch
from tables import CPU, VOCAB, PointMasses, TableRunner, checker, drafter, table

from hf_mlspec.engines.modules.cache import RaggedCache
from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.drafters.checked import CheckedDrafter, engine_checks
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.sampling import Sampler

CYCLE = torch.full((VOCAB, VOCAB), 0.1).scatter(1, torch.tensor([[1], [2], [3], [0]]), 0.7)


class Watched(TableRunner):
    """Writes down what it is fed, and how much it says it holds then."""

    def __init__(self):
        super().__init__(CYCLE)
        self.fed = []

    def feed(self, rows, guess=None, alive=None):
        self.fed.append(([list(row) for row in rows], list(self.lengths)))
        return super().feed(rows, guess, alive)


def windowed() -> ModelDrafter:
    """Of a model of eight positions, behind a row of ten tokens: it sees the last four."""
    level = ModelDrafter(Watched(), Sampler(VOCAB), "windowed", max_positions=8)
    level.start(1, CPU)
    level.runner.lengths = [5]
    level.propose([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]], [2])
    return level


def test_a_model_drafts_as_many_tokens_as_it_may():
    level = drafter(table(1))
    level.start(3, CPU)
    assert level.propose([[0], [1], [2]], [3, 1, 0]).lengths == [3, 1, 0]


def test_a_sampled_draft_of_the_checkers_own_table_is_always_right():
    """Whose noise is that of another position is right by chance only."""
    for seed in range(6):
        rows, level, judge = [[0], [1, 2], [3, 3, 3]], drafter(table(seed), seed=seed), checker(table(seed), seed=seed)
        level.start(3, CPU)
        judge.start(3, CPU)
        draft = level.propose(rows, [6, 5, 6])
        assert judge.check(rows, draft).accepted == [6, 5, 6]


def test_the_level_below_hears_what_each_round_kept():
    told = []

    class Inner(PointMasses):
        def rollback(self, lengths):
            told.append(list(lengths))

    level = CheckedDrafter(Checker(TableRunner(CYCLE), Sampler(VOCAB), "cycle"), Inner([1, 0, 0, 0]),
                           num_draft_tokens=2)  # fmt: skip
    level.start(1, CPU)
    assert level.propose([[0]], [3]).rows() == [[1, 2, 3]]
    assert told == [[2], [3]]  # 1 is kept of 1, 0; then there is room for the check alone


def test_checks_inside_an_engine_end_with_what_they_settled():
    found = list(engine_checks([[5, 6, 7], [8]], [2, 1, 3, 0, 1, 0]))
    assert found == [([2, 3], [1, 0], [True, True]), ([1, 0], [0, 0], [True, False])]


def test_a_window_begins_with_an_empty_cache():
    assert windowed().runner.fed == [([[2, 3, 0, 1]], [0])]


def test_what_is_rejected_is_counted_from_the_window():
    level = windowed()
    assert (level.dropped, level.runner.lengths) == ([6], [4])
    level.rollback([9])
    assert level.runner.lengths == [3]


def test_a_row_in_the_place_of_another_is_seen_from_its_beginning():
    level = windowed()
    level.replace(0)
    level.propose([[3, 2, 1, 0, 3]], [1])
    assert level.runner.fed[-1] == ([[3, 2, 1, 0, 3]], [0])


def test_a_shrunk_lane_keeps_its_first_slots():
    cache = RaggedCache(1, 1024)
    states = torch.arange(1024.0).view(1, 1, 1024, 1)
    cache.load([(states, -states)], 1024)
    cache.shrink(300)
    keys, values = cache.row(0, 0, 1024)[0]
    assert keys.flatten().tolist() == list(range(512))
    assert torch.equal(values, -keys)
