"""Does `eval.bench_calibration` time the methods it is asked for, and reckon a shape from one more block?"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from eval.bench_calibration import __main__ as program


def test_a_shape_is_reckoned_from_one_more_block(tmp_path):
    out = tmp_path / "rows.jsonl"
    shape = ["--shape", "tiny-2x512", "--samples", "2", "--tokens", "64"]
    words = [sys.executable, "-m", "eval.bench_calibration", *shape, "--methods", "rtn", "gptq", "--json", str(out),
             "--work-folder"]  # fmt: skip
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout  # memory of its own
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["method"], row["blocks"]) for row in rows] == [("rtn", 2), ("gptq", 2)]
    for row in rows:
        assert row["seconds"] > row["seconds_per_block"]
        assert 5 < row["sqnr_db"] < 60
    assert rows[0]["peak_over_model"] is None or rows[0]["peak_over_model"] > 0.5  # None where Linux does not count
    assert "gptq" in shown


def test_the_quick_run_times_the_method_that_is_named():
    assert program.parse(["--quick"]).methods == ["gptq"]
    assert program.parse(["--quick", "--methods", "rtn"]).methods == ["rtn"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--blocks", "1"], "--blocks is 1"),
        (["--model", "nowhere"], "--model nowhere is no folder of a model"),
        (["--calibration", "nowhere.txt"], "--calibration nowhere.txt does not exist"),
    ],
)
def test_bad_arguments_are_refused(options, words, capsys):
    with pytest.raises(SystemExit):
        program.main(options)
    assert words in capsys.readouterr().err
