"""Does attention on a GPU see the first slots and the last ones only behind a draft window, and read no others?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ragged_cases import Case, check, make

WINDOWS = (1, 63, 64, 65, 512, 4096)
RULES = [{}, {"softcap": 5.0}, {"window": 70}, {"window": 1100}, {"window": 300, "softcap": 20.0}]
STARTS = [0, 63, 64, 127, 130, 700, 1499, 4711]  # rows in front of the window's end, at its edges and behind it


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_window", WINDOWS)
@pytest.mark.parametrize("width", [1, 9])
def test_against_float64(width, draft_window, rule):
    counts = [width, width, 1, width, 2, width, width + 5, width]
    check(make(STARTS, counts, width, slots=5056, draft_window=draft_window, **rule))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (32, 1, 128), (6, 2, 96), (3, 1, 16),
                                                        (4, 2, 112), (8, 4, 256), (5, 1, 160), (40, 8, 80)])
@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("draft_window", [1, 65, 512])
def test_shapes(heads, kv_heads, dim, width, draft_window):
    counts = [width, max(1, width - 2), width]
    check(make([0, 333, 1300], counts, width, heads, kv_heads, dim, 1400, draft_window=draft_window))


@pytest.mark.parametrize("draft_window", [1, 64, 200])
def test_prefill(draft_window):
    check(make([0, 730], [200, 150], 200, heads=4, kv_heads=1, slots=1000, draft_window=draft_window))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft_window", WINDOWS)
@pytest.mark.parametrize(("dim", "heads"), [(128, 8), (64, 14), (256, 4)])
def test_bits_depend_on_position_and_window_alone(dim, heads, draft_window, rule):
    """One token, 9, 13 and a piece of a prompt, in a batch and alone: clusters, tiles and the kernel for prompts."""
    starts, width = [0, 2000, 4600, 4711], 330
    case = make(starts, [width, width, width, 7], width, heads, 2, dim, 5056, draft_window=draft_window, **rule)
    whole = case.attend()
    for first, count in ((0, 1), (100, 9), (200, 13), (64, 33), (5, 200)):
        taken, counts = slice(first, first + count), [max(0, min(count, n - first)) for n in case.counts]
        piece = replace(case, q=case.q[:, taken].contiguous(), starts=[s + first for s in starts], counts=counts)
        assert torch.equal(piece.attend(), whole[:, taken]), (first, count)
        one, length = slice(1, 2), starts[1] + first + count
        alone = Case(piece.q[one], case.keys[one, :, :length], case.values[one, :, :length], piece.starts[one],
                     counts[one], draft_window=draft_window, **rule)
        assert torch.equal(alone.attend(), whole[one, taken]), (first, count)


@pytest.mark.parametrize("rule", RULES)
def test_a_window_as_long_as_its_rows_changes_no_bit(rule):
    case = make(STARTS, [9] * 8, 9, slots=5056, **rule)
    assert torch.equal(replace(case, draft_window=5056).attend(), case.attend())
    assert torch.equal(replace(case, draft_window=2**40).attend(), case.attend())


@pytest.mark.parametrize("width", [1, 9, 160])
@pytest.mark.parametrize("draft_window", [1, 64, 512])
def test_chunks_that_nobody_sees_are_not_read(width, draft_window):
    """Chunks of 64 slots: NaN in one that no token of the step sees reaches no result."""
    starts = [1000, 4711, 2048]
    case = make(starts, [width] * 3, width, slots=5056, draft_window=draft_window)
    clean = case.attend()
    for row, start in enumerate(starts):
        hole = slice(64, (start - draft_window + 1) // 64 * 64)
        case.keys[row, :, hole], case.values[row, :, hole] = torch.nan, torch.nan
    assert not clean.isnan().any()
    assert torch.equal(case.attend(), clean)
