"""What do the counts of levels and calls mean?"""

from __future__ import annotations

import json

import pytest

from hf_mlspec import LevelStats, SpeculationStats


def test_settle_adds_rows_up():
    level = LevelStats("draft")
    level.settle([4, 3, 0], [4, 1, 0])
    assert (level.drafted, level.accepted, level.tested) == (7, 5, 6)  # row 1: one kept, one refused, one unknown
    level.settle([2], [0])
    assert (level.drafted, level.accepted, level.tested) == (9, 5, 7)
    assert level.acceptance == 5 / 7


def test_an_untested_level_accepts_nothing():
    assert LevelStats("draft").acceptance == 0.0


def test_settle_wants_one_verdict_per_row():
    with pytest.raises(ValueError, match="zip"):
        LevelStats("draft").settle([1, 2], [1])


def test_reset_keeps_the_name():
    level = LevelStats("draft", drafted=3, accepted=2, tested=3, rounds=1, forwards=3, seconds=0.5)
    level.reset()
    assert level == LevelStats("draft")


def test_of_a_call():
    stats = SpeculationStats(
        [LevelStats("a", seconds=1.0), LevelStats("b", seconds=0.5)],
        new_tokens=12,
        target_passes=3,
        row_passes=4,
        seconds=4.0,
        target_seconds=2.0,
    )
    assert stats.tokens_per_target_pass == 3.0
    assert stats.seconds_outside_forwards == 0.5
    assert SpeculationStats().tokens_per_target_pass == 0.0


def test_to_dict_is_json():
    stats = SpeculationStats([LevelStats("a", drafted=4, accepted=1, tested=2)], new_tokens=2, row_passes=1)
    read = json.loads(json.dumps(stats.to_dict()))
    assert read["levels"][0] == {**vars(stats.levels[0]), "acceptance": 0.5}
    assert read["tokens_per_target_pass"] == 2.0
    assert {"seconds", "target_seconds", "seconds_outside_forwards", "target_passes"} <= read.keys()
