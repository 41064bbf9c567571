"""Are lookup-table planes and orders of inputs timed beside int4, judged by its time, and is a wrong product told?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")
INT4 = "int4 g128 a16"
WIDTHS = ((4, 4), (8, 8), (5, 8), (4, 8), (3, 8))


def bench(quick: bool = True):
    Bench = program("bench_gpu.findings").Bench
    return Bench(torch.device("cpu"), Path("models"), Path("data"), quick=quick)


def test_every_width_is_right_beside_int4_and_a_wrong_one_is_told(monkeypatch):
    lut = program("bench_gpu.lut")
    real = lut.ops.lut_linear
    monkeypatch.setattr(
        lut.ops, "lut_linear",
        lambda *operands, num_planes: real(*operands, num_planes=num_planes) * (1.02 if num_planes == 5 else 1),
    )  # fmt: skip
    found = []
    with pytest.raises(lut.WrongResult, match=r"256 x 256, 5 of 8 planes with tables: 1 tokens: .* 200 x 384, 5 of 8"):
        found.extend(lut.lut(bench()))
    names = [INT4, *(lut.name_of(*width) for width in WIDTHS if width != (5, 8))]
    assert list(dict.fromkeys(line.contender for line in found)) == names
    assert len(found) == len(names) * 2 * 2
    assert all(line.target is None for line in found)
    base = {line.what: line.value for line in found if line.contender == INT4}
    assert all(line.more["over_int4"] == line.value / base[line.what] for line in found)


def test_four_planes_are_judged_by_the_time_of_int4():
    lut, Finding = program("bench_gpu.lut"), program("bench_gpu.findings").Finding
    of_int4: dict[int, float] = {}

    def judged(name: str, value: float):
        return lut._judged(Finding("linear", "", name, value, "us", None, more={"tokens": 8}), of_int4, False)

    assert judged(lut.name_of(4, 8), 9.0).target is None
    assert judged(INT4, 10.0).target is None
    assert judged(lut.name_of(4, 8), 12.0).target == pytest.approx(13.0)
    assert judged(lut.name_of(8, 8), 40.0).target is None
    assert judged(lut.name_of(8, 8), 40.0).more["over_int4"] == 4


def test_steps_with_an_order_are_timed_over_those_without(monkeypatch):
    ordered = program("bench_gpu.ordered")
    monkeypatch.setattr(ordered, "TURNS", 2)
    monkeypatch.setattr(ordered, "EACH", 1)
    gathers, real = [], ordered.CudaDecoder.__init__

    def counted(self, model):
        real(self, model)
        gathers.append(sum(layer.qkv_order is not None and layer.down_order is not None for layer in self._layers))

    monkeypatch.setattr(ordered.CudaDecoder, "__init__", counted)
    found = list(ordered.ordered(bench()))
    assert gathers[0] == 0 < gathers[1]
    assert [line.what for line in found] == ["tiny, batch 1", "tiny, batch 8"]
    assert all(line.value > 0 and line.target is None for line in found)
