"""Do the kernels of a GPU attend to what the codes of keys and values stand for, with the same bits in every call?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from coded_cases import FORMATS, NO_NUMBER, check, coded, in_bytes
from ragged_cases import DEVICE, Case, make

from hf_mlspec.formats.cache import INT4

WORDS = [record.word for record in FORMATS]
RULES = [{}, {"window": 5}, {"window": 70}, {"softcap": 5.0}, {"window": 300, "softcap": 20.0}, {"draft_window": 65},
         {"draft_window": 200, "window": 400}]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 9, 64])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_attention_against_float64(record, width, rule):
    counts = [width, width, 1, width, 2, width, width + 5, -1]
    check(coded(make([0, 63, 64, 511, 520, 200, 7, 3], counts, width, **rule), record))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (32, 1, 128), (6, 2, 96), (3, 1, 16),
                                                        (4, 2, 112), (8, 4, 256), (5, 1, 160), (40, 8, 80)])
@pytest.mark.parametrize("width", [1, 3, 20])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_shapes(record, heads, kv_heads, dim, width):
    check(coded(make([0, 100, 333], [width, max(1, width - 2), width], width, heads, kv_heads, dim, 400), record))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dim", [64, 112, 128])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_a_prompt(record, dim, rule):
    """Of so many tokens the codes are widened first on Hopper; the slots that are allocated are no multiple of 64."""
    check(coded(make([0, 130], [300, 250], 300, heads=8, kv_heads=1, dim=dim, slots=500, **rule), record))


@pytest.mark.parametrize(
    ("dim", "heads", "rule"),
    [(128, 8, {}), (64, 14, {"window": 2100}), (96, 6, {"softcap": 6.0}), (256, 4, {}),
     (128, 32, {"draft_window": 600})],
)  # fmt: skip
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_bits_depend_on_position_alone(record, dim, heads, rule):
    """One token, 2, 9, 64 and a piece of a prompt, in a batch and alone; behind the ends scales are NaN."""
    starts, width = [0, 2000, 4600, 4711], 330
    case = coded(make(starts, [width, width, width, 7], width, heads=heads, dim=dim, slots=5056, **rule), record)
    whole = case.attend()
    for first, count in ((0, 1), (37, 2), (100, 9), (321, 9), (200, 13), (64, 33), (66, 64), (5, 200)):
        taken, counts = slice(first, first + count), [max(0, min(count, n - first)) for n in case.counts]
        piece = replace(case, q=case.q[:, taken].contiguous(), starts=[s + first for s in starts], counts=counts)
        found = check(piece) if count == 1 else piece.attend()
        assert torch.equal(found, whole[:, taken]), (first, count)
        for r in (1, 2):
            one, length = slice(r, r + 1), starts[r] + first + count
            alone = Case(piece.q[one], case.keys[one, :, :length], case.values[one, :, :length], piece.starts[one],
                         counts[one], **rule)
            assert torch.equal(alone.attend(), whole[one, taken]), (first, count, r)


@pytest.mark.parametrize(("width", "dim"), [(1, 128), (1, 64), (9, 64), (33, 128), (3, 256)])
@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_bits_do_not_depend_on_the_batch_or_the_slots(record, width, dim):
    starts = [(37 * r * r) % 450 for r in range(33)]
    case = coded(make(starts, [width] * 33, width, dim=dim, slots=512), record)
    whole = case.attend()
    roomy = [torch.full((33, 2, 4096, record.width(dim)), 127, dtype=record.dtype, device=DEVICE) for _ in range(2)]
    for old, new in zip((case.keys, case.values), roomy, strict=True):
        new[:, :, :512] = old
    for r in range(33):
        one = slice(r, r + 1)
        alone = Case(case.q[one], case.keys[one], case.values[one], starts[one], [width])
        assert torch.equal(alone.attend(), whole[one]), r
        assert torch.equal(replace(alone, keys=roomy[0][one], values=roomy[1][one]).attend(), whole[one]), r


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_who_sees_a_scale_of_nan_gets_nan_and_no_one_else_notices(record):
    """Token 4 of nine has a key, or a value, that was not finite: those before it, and behind it, in one tile."""
    case = coded(make([130], [9], 9), record)
    clean = case.attend()
    for lane in (case.keys, case.values):
        broken = lane.clone()
        broken[0, 0, 134, -4:] = in_bytes(record, NO_NUMBER[record], DEVICE)
        y = replace(case, **{"keys" if lane is case.keys else "values": broken}).attend()
        assert torch.equal(y[:, :4], clean[:, :4])
        assert y[:, 4:, :4].isnan().all()  # the first key head's queries
        assert torch.equal(y[:, 4:, 4:], clean[:, 4:, 4:])


def test_one_end_of_nan_makes_a_row_of_nan():
    """Whichever of the two it is, and wherever the row stands: int4 codes alone say nothing."""
    case = coded(make([70], [3], 3), INT4)
    for name in ("keys", "values"):
        for byte in (-4, -2):
            broken = getattr(case, name).clone()
            broken[0, 1, 5, byte : byte + 2 or None] = in_bytes(INT4, [0xC0, 0x7F], DEVICE)
            y = replace(case, **{name: broken}).attend()
            assert y[:, :, 4:].isnan().all()
            assert torch.equal(y[:, :, :4], case.attend()[:, :, :4])


def test_ends_far_from_zero_stand_for_what_they_say():
    """Rows whose elements all lie on one side: what the zeros add is most of a result, and no weight rounds it."""
    case = make([600], [2], 2)
    keys, values = case.keys.abs() * 0.1, case.values.abs() * 0.01 + 3
    check(coded(replace(case, keys=keys, values=values), INT4))


@pytest.mark.parametrize("record", FORMATS, ids=WORDS)
def test_lanes_cut_out_of_a_larger_tensor_and_lanes_that_do_not_fit(record):
    case = coded(make([30, 200], [4, 4], 4), record)
    whole = torch.full((3, 2, 2, 2, 640, record.width(128)), 127, dtype=record.dtype, device=DEVICE)
    whole[1, 0], whole[1, 1] = case.keys, case.values
    assert torch.equal(replace(case, keys=whole[1, 0], values=whole[1, 1]).attend(), case.attend())
    odd = [lane[:, :, :321].contiguous() for lane in (case.keys, case.values)]
    with pytest.raises(ValueError, match="must be multiples of 16"):
        replace(case, keys=odd[0], values=odd[1]).attend()
    with pytest.raises((TypeError, ValueError), match="values"):
        replace(case, values=torch.zeros(2, 2, 640, 128, dtype=torch.bfloat16, device=DEVICE)).attend()
