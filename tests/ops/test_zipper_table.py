"""Does every path to rows of codes give the values that the codes stand for?"""

from __future__ import annotations

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.ops.operator import REFERENCES
from hf_mlspec.ops.zipper import split_of
from hf_mlspec.ops.zipper_table import prepack_table, table_of, unprepack_table


def _table(weight):
    parts = prepack_table(*weight.parts)
    return parts, table_of(parts, split_of(parts.split))


def _weight(rows=37, width=160, **options):
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    drawn[min(3, rows - 1)] = 1.0
    return ZipperWeight.from_dense(drawn, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("bits", "low_bits"), [(6, 4), (8, 5), (4, 2)])
@pytest.mark.parametrize("scale", [1.0, 11.3125])
def test_rows_are_those_of_the_weight(mode, bits, low_bits, scale):
    weight = _weight(mode=mode, bits=bits, low_bits=low_bits)
    parts, table = _table(weight)
    assert all(torch.equal(one, other) for one, other in zip(unprepack_table(parts), weight.parts, strict=True))
    ids = torch.tensor([0, 36, 3, 3, 17, -5, 99], dtype=torch.int32)
    wanted = weight.dequantize(torch.bfloat16)[ids.clamp(0, 36).long()]
    wanted = wanted if scale == 1 else (wanted.float() * scale).to(torch.bfloat16)
    for rows in (ops.zipper_rows(ids, *table, scale), REFERENCES["zipper_rows"](ids, *table, scale)):
        assert torch.equal(rows.view(torch.int16), wanted.view(torch.int16))
    assert ops.zipper_rows(ids[:0], *table).shape == (0, 160)


def test_a_table_that_keeps_all_planes_and_threads():
    weight = ZipperWeight.from_dense(torch.ones(2048, 64))
    _, table = _table(weight)
    assert len(table.places) == 0
    ids = torch.arange(2048, dtype=torch.int32)
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(ops.zipper_rows(ids, *table), weight.dequantize(torch.bfloat16))
    torch.set_num_threads(before)


def test_one_row():
    weight = _weight(1, 32)
    assert torch.equal(ops.zipper_rows(torch.zeros(2, dtype=torch.int32), *_table(weight)[1]),
                       weight.dequantize(torch.bfloat16).expand(2, -1))  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"ids": torch.zeros(1)}, TypeError, "ids is"),
    ({"ids": torch.zeros(1, 1, dtype=torch.int32)}, ValueError, "ids has shape"),
    ({"planes": torch.zeros(2, 5, 6, dtype=torch.uint8)}, ValueError, r"planes has shape \[2, 5, 6\]"),
    ({"planes": torch.zeros(2, 5, dtype=torch.uint8)}, ValueError, "planes has shape"),
    ({"step": torch.zeros(37, 1)}, TypeError, "step is"),
    ({"step": torch.zeros(36, 1, dtype=torch.float16)}, ValueError, "step has shape"),
    ({"places": torch.zeros(37, dtype=torch.int32)}, ValueError, r"places has shape \[37\]"),
    ({"places": torch.zeros(64)}, TypeError, "places is"),
    ({"lowest": -1}, ValueError, "lowest is -1"),
    ({"lowest": 4}, ValueError, "codes have 2 to 8 bits"),
    ({"scale": float("inf")}, ValueError, "scale is inf"),
])
@pytest.mark.parametrize("compiled", [True, False])
def test_operands_that_do_not_fit(changes, error, words, compiled):
    _, table = _table(_weight())
    given = {"ids": torch.zeros(1, dtype=torch.int32), **table._asdict(), "scale": 1.0} | changes
    with pytest.raises(error, match=words):
        (ops.zipper_rows if compiled else REFERENCES["zipper_rows"])(*given.values())
