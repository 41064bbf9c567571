"""Do the large files of `eval.bench_load` hold what their kinds say, and does it time both sides of the same codes?"""

from __future__ import annotations

import io
from argparse import Namespace

import pytest
import torch
from rich.console import Console

import hf_mlspec
from eval.bench_load import __main__ as program
from eval.bench_load.written import GPT_OSS, KINDS, write, write_ours


@pytest.mark.parametrize("kind", KINDS)
def test_ours_has_the_weights_of_theirs(kind, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    nbytes = write(theirs, kind, 1, True)
    assert write_ours(theirs, ours) == pytest.approx(nbytes, rel=0.2)
    layers = [hf_mlspec.load(folder, dtype=torch.bfloat16).model.layers[0].mlp for folder in (theirs, ours)]
    if kind == GPT_OSS:
        assert layers[0].experts.format == layers[1].experts.format == "mxfp4"
        values = [layer.experts.dequantized("down_proj") for layer in layers]
    else:
        assert layers[0].down_proj.format == layers[1].down_proj.format == "int4"
        values = [layer.down_proj.dequantized() for layer in layers]
    assert torch.equal(*values)
    assert values[0].std() > 0.001
    found = program.measure(theirs)
    assert 0 < found["seconds"] < found["first"]
    assert found["held"] > nbytes / 2
    copy = program.measure_copy(theirs)
    assert copy["seconds"] > 0
    assert copy["copied"] == pytest.approx(nbytes, rel=0.1)


def test_memory_that_is_not_counted_is_not_told(tmp_path, monkeypatch):
    write(tmp_path, "awq", 1, True)
    monkeypatch.setattr(program.machine, "memory_of_process", lambda name: None)
    found = program.measure(tmp_path, forward=False)
    assert found["over"] is found["first"] is None


@pytest.mark.slow
def test_a_row_is_what_processes_of_its_own_measured():
    """The program, whole, on one small layer."""
    row = program.bench("gptq", Namespace(quick=True, gigabytes=2.0, repeats=2, threads=1, forward=True))
    assert row["kind"] == "gptq"
    assert row["bytes"] > 60_000
    assert 0 < row["rate"] < 1e11
    assert row["first_over_ours"] > 0
    assert row["over_copy"] > 1  # a load does more than a copy
    printed = Console(record=True, width=200, file=io.StringIO())
    printed.print(program.table([row, {**row, "kind": "awq", "peak": None, "first_over_ours": None}]))
    text = printed.export_text()
    assert f"{row['over_ours']:.2f}" in text
    assert "not counted here" in text


def test_ratios_are_of_loads_of_one_turn():
    """Medians of the ratios, not ratios of the medians."""
    found = {"theirs": [turn(2, 3, 7), turn(4, 5, 9), turn(9, 12, 8)], "ours": [turn(1, 1), turn(1, 2), turn(3, 3)],
             "copies": [turn(1), turn(4), turn(2)]}  # fmt: skip
    told = program.rates({"theirs": 8, "ours": 6}, found)
    assert told == {"rate": 2, "our_rate": 6, "over_ours": 3, "first_over_ours": 3, "over_copy": 2, "peak": 9}
    found["theirs"][1]["over"] = None
    assert program.rates({"theirs": 8, "ours": 6}, found)["peak"] is None


def turn(seconds: float, first: float = 0, over: int = 0) -> dict:
    return {"seconds": seconds, "first": first, "over": over}


@pytest.mark.parametrize("wrong", [["--gigabytes", "0"], ["--repeats", "0"], ["--threads", "0"]])
def test_numbers_that_measure_nothing_are_refused(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        program.main(wrong)
    assert "must be above 0" in capsys.readouterr().err
