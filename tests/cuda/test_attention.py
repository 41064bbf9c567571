"""Is attention over a ragged cache right on a GPU, with bits that depend on a token's position alone?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ragged_cases import DEVICE, Case, check, make

RULES = [{}, {"window": 5}, {"window": 70}, {"softcap": 5.0}, {"window": 300, "softcap": 20.0}]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [1, 9])
def test_against_float64(width, rule):
    check(make([0, 63, 64, 511, 520, 200, 7, 3], [width, width, 1, width, 2, 0, width + 5, -1], width, **rule))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (32, 1, 128), (6, 2, 96), (3, 1, 16),
                                                        (4, 2, 112), (8, 4, 256), (5, 1, 160), (40, 8, 80)])
@pytest.mark.parametrize("width", [1, 3, 20])
def test_shapes(heads, kv_heads, dim, width):
    check(make([0, 100, 333], [width, max(1, width - 2), width], width, heads, kv_heads, dim, 400))


def test_prefill():
    check(make([0, 130], [200, 150], 200, heads=4, kv_heads=1, slots=400))


def sinks(heads: int) -> torch.Tensor:
    """From those that take nothing to those that take most of a row."""
    return torch.linspace(-4, 9, heads, device=DEVICE)


@pytest.mark.parametrize("rule", [{}, {"window": 70}, {"softcap": 5.0}])
@pytest.mark.parametrize("width", [1, 9, 20])
def test_sinks_against_float64(width, rule):
    rows = [0, 63, 64, 511, 520, 200, 7, 3], [width, width, 1, width, 2, 0, width + 5, -1]
    case = make(*rows, width, heads=16, dim=64, sinks=sinks(16), **rule)
    y = check(case)
    assert not torch.equal(y, replace(case, sinks=None).attend())
    nothing = replace(case, sinks=torch.full_like(case.sinks, -torch.inf))
    torch.testing.assert_close(nothing.attend(), replace(case, sinks=None).attend())
    check(make([0, 130], [200, 150], 200, heads=4, kv_heads=1, slots=400, dim=64, sinks=sinks(4), **rule))


def test_bits_do_not_depend_on_width():
    starts, counts = [0, 57, 250, 511], [9, 9, 6, 9]
    for rule in ({}, {"window": 66, "softcap": 9.0}, {"sinks": sinks(8)}):
        case = make(starts, counts, 9, heads=8, kv_heads=2, **rule)
        whole = case.attend()
        for t in range(9):
            ones = [int(t < count) for count in counts]
            one = replace(case, q=case.q[:, t : t + 1].contiguous(), starts=[s + t for s in starts], counts=ones)
            assert torch.equal(one.attend()[:, 0], whole[:, t]), t
        wide = torch.cat([case.q, torch.zeros_like(case.q).repeat(1, 6, 1, 1)], dim=1)
        assert torch.equal(replace(case, q=wide).attend()[:, :9], whole)


@pytest.mark.parametrize(
    ("dim", "rule"),
    [
        *((64, {}), (128, {"window": 90}), (256, {"softcap": 6.0})),
        *((64, {"sinks": -2.0}), (128, {"sinks": 3.0, "window": 90})),
    ],
)
def test_bits_of_a_prompt_are_those_of_its_pieces(dim, rule):
    """The tiles of a long step are blocks of their own; a cluster of blocks shares that of one token."""
    starts, width = [0, 31, 64, 200], 300
    if "sinks" in rule:
        rule = rule | {"sinks": sinks(8) + rule["sinks"]}
    case = make(starts, [300, 300, 299, 170], width, dim=dim, slots=512, **rule)
    whole = case.attend()
    for first, count in ((0, 1), (37, 1), (130, 40), (299, 1)):
        counts = [max(0, min(count, n - first)) for n in case.counts]
        taken = slice(first, first + count)
        piece = replace(case, q=case.q[:, taken].contiguous(), starts=[s + first for s in starts], counts=counts)
        assert torch.equal(piece.attend(), whole[:, taken]), first


@pytest.mark.parametrize(
    ("dim", "heads", "rule"), [(128, 8, {}), (64, 14, {"window": 2100}), (96, 6, {"softcap": 6.0}), (256, 4, {})]
)
def test_bits_of_rows_that_go_round_all_ranks_several_times(dim, heads, rule):
    """A chunk in 32 belongs to a rank. One token, 9, 13, a piece of a prompt and a batch share the ranks otherwise."""
    starts, width = [0, 2000, 4600, 4711], 330
    case = make(starts, [width, width, width, 7], width, heads=heads, dim=dim, slots=5056, **rule)
    whole = case.attend()
    for first, count in ((0, 1), (100, 9), (321, 9), (200, 13), (64, 33), (5, 200)):
        taken, counts = slice(first, first + count), [max(0, min(count, n - first)) for n in case.counts]
        piece = replace(case, q=case.q[:, taken].contiguous(), starts=[s + first for s in starts], counts=counts)
        found = check(piece) if count == 1 else piece.attend()
        assert torch.equal(found, whole[:, taken]), (first, count)
        for r in (1, 2):
            one, length = slice(r, r + 1), starts[r] + first + count
            alone = Case(piece.q[one], case.keys[one, :, :length], case.values[one, :, :length], piece.starts[one],
                         counts[one], **rule)
            assert torch.equal(alone.attend(), whole[one, taken]), (first, count, r)


@pytest.mark.parametrize(("width", "dim"), [(1, 128), (9, 64), (33, 128), (3, 256)])
def test_bits_do_not_depend_on_the_batch_or_the_slots(width, dim):
    """Alone a row's chunks are shared by a cluster of blocks; a batch of 33 fills the chip with a block a tile."""
    starts = [(37 * r * r) % 450 for r in range(33)]
    case = make(starts, [width] * 33, width, dim=dim, slots=512)
    whole = case.attend()
    roomy = [torch.full((33, 2, 4096, dim), torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    for old, new in zip((case.keys, case.values), roomy, strict=True):
        new[:, :, :512] = old
    for r in range(33):
        one = slice(r, r + 1)
        alone = Case(case.q[one], case.keys[one], case.values[one], starts[one], [width])
        assert torch.equal(alone.attend(), whole[one]), r
        assert torch.equal(replace(alone, keys=roomy[0][one], values=roomy[1][one]).attend(), whole[one]), r


def test_a_row_at_rest_or_behind_the_last_slot_is_padding():
    case = make([0, 638, 10_000, 5], [0, 5, 1, -7], 5)
    y = case.attend()
    assert y[[0, 2, 3]].eq(0).all()
    assert y[1, 2:].eq(0).all()
    assert torch.equal(y[1, :2], replace(case, counts=[0, 2, 0, 0]).attend()[1, :2])


def test_lanes_cut_out_of_a_larger_tensor():
    case = make([30, 200], [4, 4], 4)
    whole = torch.full((3, 2, 2, 2, 640, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    whole[1, 0], whole[1, 1] = case.keys, case.values
    assert torch.equal(replace(case, keys=whole[1, 0], values=whole[1, 1]).attend(), case.attend())
    swapped = case.keys.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(replace(case, keys=swapped).attend(), case.attend())
