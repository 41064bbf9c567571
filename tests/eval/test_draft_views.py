"""Does eval.draft_views count what a draft loses by seeing less?"""

from __future__ import annotations

import importlib
import json

import pytest
import torch

import hf_mlspec

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


def test_ranges_of_positions_and_a_draft_of_its_own_cache(tmp_path, capsys):
    program, out = importlib.import_module("eval.draft_views.__main__"), tmp_path / "out.jsonl"
    target, draft = hf_mlspec.demo_pair()
    assert program.main(["--model", str(target), "--draft", str(draft), "--text", "hf_mlspec/formats",
                         "--tokens", "160",
                         "--until", "80", "160", "--count", "1", "--window", "16", "--json", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(line["draft"], line["view"], line["to"]): line for line in lines}
    assert {(line["from"], line["to"], line["positions"]) for line in lines} == {(0, 80, 80), (80, 160, 80)}
    name = "draft"
    # Up to 80, the first 64 tokens and the last 16 are all there are. Ways change a draft's own keys and values, too.
    assert found[name, "window 16", 80]["agreement"] == found[name, "all tokens", 80]["agreement"] > 0
    assert found["the target itself", "window 16", 160]["agreement"] < 1
    assert found[name, "all, 4.25 bits", 80]["agreement"] != found[name, "all tokens", 80]["agreement"]
    assert 0 < found["the text", "all tokens", 160]["agreement"] < 1
    with pytest.raises(SystemExit):
        program.main(["--quick", "--until", "100", "50"])
    assert "--until 100 50: positions rise" in capsys.readouterr().err


def test_chunks_see_what_the_whole_sees():
    views = importlib.import_module("eval.draft_views.views").Views(window=16)
    whole = views.seen(0, 200, torch.device("cpu"))
    assert torch.equal(views.seen(120, 200, torch.device("cpu")), whole[120:])
    assert whole[150].nonzero().flatten().tolist() == [*range(64), *range(135, 151)]
