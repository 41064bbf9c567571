"""Are lookup-table planes what their tables say, at every width, and are damaged ones refused by name?"""

import pytest
import torch

from hf_mlspec.formats import FORMATS, LutWeight
from hf_mlspec.formats.lut import least_planes_of, table_columns, table_start, zeros
from hf_mlspec.formats.planes import pack_planes


def weight_of(stored: int, least: int, out: int = 5, size: int = 64, seed: int = 0) -> tuple[LutWeight, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**stored, (out, size), dtype=torch.uint8, generator=draw)
    tables = torch.randn(out, table_columns(stored, least), generator=draw).half()
    return LutWeight(pack_planes(codes, stored), tables, "q_proj"), codes


def test_the_example_of_the_page():
    planes = torch.tensor([[[1, 0, 0, 0]], [[0, 0, 0, 0]]], dtype=torch.uint8)  # element 0 has bits 1, 0
    weight = LutWeight(planes, torch.tensor([[-1.0, 2.0, -3.0, -1.0, 1.0, 4.0]]).half()).validate()
    assert (weight.num_planes, weight.least_planes) == (2, 1)
    assert weight.dequantize(num_planes=1)[0, :2].tolist() == [2.0, -1.0]
    assert weight.dequantize(num_planes=2)[0, :2].tolist() == [1.0, -3.0]


@pytest.mark.parametrize(("stored", "least"), [(1, 1), (3, 2), (4, 4), (5, 3), (8, 1)])
def test_every_width_reads_its_own_table(stored, least):
    weight, codes = weight_of(stored, least)
    weight.validate(5, 64)
    assert weight.least_planes == least
    for read in range(least, stored + 1):
        start = sum(2**width for width in range(least, read))
        assert table_start(stored, weight.weight_tables.shape[1], read) == start
        table = weight.weight_tables[:, start : start + 2**read]
        expected = table.gather(1, (codes >> stored - read).long())
        for dtype in (torch.float16, torch.float32, torch.bfloat16):
            assert torch.equal(weight.dequantize(dtype, read), expected.to(dtype))
    assert torch.equal(weight.dequantize(), weight.dequantize(num_planes=stored))


def test_widths_without_a_table_are_refused_by_name():
    weight, _ = weight_of(5, 3)
    for read in (2, 6):
        with pytest.raises(ValueError, match=f"q_proj: {read} planes asked for, .*take one of 3, 4, 5"):
            weight.dequantize(num_planes=read)


@pytest.mark.parametrize(("tables", "planes", "error", "message"), [
    (lambda t: t.float(), None, TypeError, "weight_tables is torch.float32"),
    (lambda t: t[:, :-1], None, ValueError, r"\[out, 2\^\(B\+1\) - 2\^S\] with S from 1"),
    (lambda t: t[:, :12].contiguous(), None, ValueError, "a table of every width from S to B"),
    (lambda t: t.index_fill(1, torch.tensor([3]), torch.nan), None, ValueError, "weight_tables holds 5 values that"),
    (lambda t: t[:4], None, ValueError, "weight_tables"),
    (None, lambda p: p[..., :2], ValueError, "in_features is 16, lookup-table planes need a multiple of 32"),
    (None, lambda p: p.int(), TypeError, "weight_planes is torch.int32"),
])  # fmt: skip
def test_damage_is_named(tables, planes, error, message):
    weight, _ = weight_of(4, 2)
    own = [weight.weight_planes, weight.weight_tables]
    own = [planes(own[0]) if planes else own[0], tables(own[1]) if tables else own[1]]
    with pytest.raises(error, match=f"q_proj.*{message}|{message}"):
        LutWeight(*own, "q_proj").validate()


def test_zeros_have_the_shapes_of_their_options():
    parts = zeros((6, 64), torch.device("meta"), num_planes=4, least_planes=3)
    assert [tuple(part.shape) for part in parts] == [(4, 6, 8), (6, 24)]
    assert LutWeight(*zeros((6, 64), torch.device("cpu"), num_planes=4, least_planes=3)).dequantize().eq(0).all()
    with pytest.raises(ValueError, match="tables of 5 to 4 bits, expected 1 <= least_planes <= num_planes <= 8"):
        zeros((6, 64), torch.device("meta"), num_planes=4, least_planes=5)
    assert [least_planes_of(4, columns) for columns in (0, 15, 16, 24, 28, 30, 31, 32)] == [0, 0, 4, 3, 2, 1, 0, 0]


def test_nothing_is_quantized_to_it():
    with pytest.raises(ValueError, match="o_proj: lookup-table planes are not made here: tables are fitted to calib"):
        LutWeight.from_dense(torch.zeros(4, 32), name="o_proj", num_planes=4)
    assert FORMATS["lut"].casts == ()
