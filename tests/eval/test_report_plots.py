"""Do the pictures of the report show what its lines say?"""

from __future__ import annotations

import pytest
from programs import program
from result_lines import CHAIN, acceptance, decode, line

pytestmark = pytest.mark.usefixtures("from_the_root")
pytest.importorskip("matplotlib")


def test_curves_show_what_the_lines_say(monkeypatch):
    curves, report = program("report.plots.curves"), program("report")
    records_of = program("report.kinds").records_of

    def rows(*lines, **more):
        return report.labelled([{**record, "replayed": False, "commit": "x", **more}
                                for one in lines for record in records_of(one["kind"], one)])

    found = rows(decode("chain", 300.0, 2.0), decode("chain", 600.0, 3.0, batch=4), decode("target alone", 150.0, 1.0),
                 replayed=True)
    drawn = {one.get_label(): list(zip(*one.get_data(), strict=True))
             for one in curves.speed_by_batch(found).axes[0].get_lines()}
    assert drawn == {"chain (replayed), K 8, 4": [(1, 300.0), (4, 600.0)], "target alone (replayed)": [(1, 150.0)]}
    levels = [acceptance(), {**acceptance(), "level": "tiny", "level_index": 1}]
    panel = curves.acceptance_by_position(rows(*levels)).axes[0]
    assert [one.get_label() for one in panel.get_lines()] == ["level 1", "level 2"]
    places, shares = panel.get_lines()[0].get_data()
    assert list(places) == [1, 2]  # people count from 1, files from 0
    assert list(shares) == pytest.approx([0.9, 0.8])
    assert curves.acceptance_by_position(rows({**acceptance(), "by_position": []})) is None


def test_each_level_whose_length_varies_has_its_curve():
    curves = program("report.plots.curves")
    read = program("report.kinds").records_of

    def row(first: int, second: int) -> dict:
        made = line("ablation", levels=CHAIN, data="D", num_draft_tokens=[first, second], acceptance=[0.9, 0.8],
                    tokens_per_second=100.0 * first + second, tokens_per_pass=2.0)
        return read("ablation", made)[0]

    speed, passes = curves.ablation([row(4, 5), row(8, 5), row(8, 2)]).axes
    drawn = {one.get_label(): list(zip(*one.get_data(), strict=True)) for one in speed.get_lines()}
    assert drawn == {"mxfp4 <- tiny, D, K x, 5": [(4, 405.0), (8, 805.0)],
                     "mxfp4 <- tiny, D, K 8, x": [(2, 802.0), (5, 805.0)]}
    assert len(passes.get_lines()) == 2
    assert curves.ablation([row(4, 5), row(8, 2)]) is None


def test_a_kernel_lies_where_its_bytes_and_seconds_put_it(monkeypatch):
    points = program("report.plots.points")
    row = {"label": "ours", "op": "o", "m": 100, "k": 200, "n": 2, "ours": True, "missing": None, "ms": 0.5,
           "weight_bytes": 10_000, "probe": 2e10}
    lines = points.roofline([row, {**row, "n": 4, "missing": "x"}]).axes[0].get_lines()
    (x,), (y,) = lines[0].get_data()
    assert x == pytest.approx(80_000 / (10_000 + 4 * 2 * 300))  # FLOP over bytes of weight and of float32 rows
    assert y == pytest.approx(80_000 / 0.5e-3 / 1e9)
    roof = lines[1].get_data()
    assert list(roof[1]) == pytest.approx([20 * at for at in roof[0]])  # 20 GB/s
