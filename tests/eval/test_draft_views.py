"""Does eval.draft_views count what a draft loses by seeing less?"""

from __future__ import annotations

import importlib
import json

import pytest

pytestmark = pytest.mark.usefixtures("from_the_root")


def test_views_of_the_demo_pair(tmp_path, capsys):
    program, out = importlib.import_module("eval.draft_views.__main__"), tmp_path / "out.jsonl"
    assert program.main(["--quick", "--json", str(out)]) == 0
    found = {(line["draft"], line["view"]): line for line in map(json.loads, out.read_text().splitlines())}
    own = {view: line["agreement"] for (draft, view), line in found.items() if draft == "the target itself"}
    assert own["all tokens"] == own["window 200"] == 1.0
    assert own["window 16"] < 1.0
    assert own["all, 4.25 bits"] < own["all, int8"] <= 1.0
    assert found["mxfp4", "all tokens"]["agreement"] < 1.0
    assert found["mxfp4", "window 16"]["positions"] == 100
    assert "likeliest token" in capsys.readouterr().out


def test_a_text_that_is_too_short(tmp_path, capsys):
    program, text = importlib.import_module("eval.draft_views.__main__"), tmp_path / "text.txt"
    text.write_text("def mean(values):\n")
    assert program.main(["--quick", "--text", str(text)]) == 2
    assert "tokens, 1 texts of 200 are asked for" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main(["--model", str(tmp_path)])
