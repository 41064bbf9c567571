"""Does the CPU benchmark of outliers and rotations time every model in turns and hold it against int4?"""

from __future__ import annotations

import json

import pytest
from programs import program

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.usefixtures("from_the_root")


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_a_line_for_every_model_and_precision(tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    assert program("bench_transforms").main(["--quick", "--threads", "1", "--json", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    names = ["int4", "int4-int8", "int4-int8, ordered", "int4, rotated", "int4, down rotated"]
    assert [(line["model"], line["precision"]) for line in lines] == [(n, p) for n in names for p in ("w4a16", "w4a4")]
    base = {line["precision"]: line["step_seconds"] for line in lines[:2]}
    assert all(line["of_int4"] == line["step_seconds"] / base[line["precision"]] > 0 for line in lines)
    assert "x int4" in capsys.readouterr().out


def test_wrong_numbers_are_refused(capsys):
    with pytest.raises(SystemExit):
        program("bench_transforms").main(["--repeats", "0"])
    assert "--repeats and --threads are at least 1" in capsys.readouterr().err
