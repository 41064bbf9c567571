"""Does a soak ask by calls and streams, count what is wrong, and tell what grew?"""

from __future__ import annotations

import json

import pytest
from programs import program

from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")


@pytest.fixture
def soak(from_the_root):
    return program("soak")


def test_a_short_one(soak, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    assert soak.main(["--minutes", "0.001", "--threads", "3", "--calls", "4", "--log", str(log)]) == 0
    (line,) = [json.loads(text) for text in log.read_text().splitlines()]
    assert (line["calls"], line["wrong"], line["nested"]) == (12, [], 0)
    assert line["requests"] >= 12 < line["tokens"]
    assert line["changes"] > 0
    assert all(line["sizes"][name] > 0 for name in ("memory", "anonymous", "threads", "files", "objects", "modules"))
    assert capsys.readouterr().out.startswith("0.")
    assert soak.main(["--table", str(log)]) == 0
    assert "12 calls" in capsys.readouterr().out


def test_a_wrong_answer_is_told(soak, monkeypatch, capsys):
    from eval.soak import asked

    right = asked.alone
    monkeypatch.setattr(asked, "alone", lambda *given: [*right(*given)[:-1], 5])
    assert soak.main(["--minutes", "0.001", "--threads", "2", "--calls", "3"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: " in out
    assert "instead of" in out


def test_models_are_nested_and_plain_again(soak):
    import threading

    from eval.soak import traffic

    over, forms = threading.Event(), []
    for line in traffic.traffic(1e9, 2, 1, 0, "cpu", over):
        assert line["wrong"] == []
        forms.append(line["nested"])
        if len(forms) == 9:
            over.set()
    assert forms == [0, 0, 0, 0, 1, 1, 1, 1, 0]


def test_growth_is_that_of_phases_with_plain_models_behind_the_warm_ones(soak):
    sizes = [100, 300, 305, 900, 310]
    lines = [{"seconds": 100.0 * number + 1, "calls": 1, "requests": 2, "tokens": 3, "cancelled": 0, "changes": 1,
              "wrong": ["one"] * (number == 1), "nested": int(size == 900), "sizes": {"memory": size, "files": 7}}
             for number, size in enumerate(sizes)]  # fmt: skip
    said = soak.told(lines).splitlines()
    assert said[0] == "6.7 minutes, 5 phases, 5 calls, 10 requests, 15 tokens, 0 cancelled, 5 changes; 1 wrong"
    assert said[1].split()[1:] == ["100", "first,", "300", "warm,", "310", "last;", "300", "to", "310:", "1.64", "%",
                                   "off", "the", "median"]  # fmt: skip
    assert said[2].endswith("7 to 7: 0.00 % off the median")
    assert soak.told([]) == "no phase has ended yet"


@pytest.mark.parametrize("word", ["--threads", "--calls", "--torch-threads"])
def test_counts_of_none(soak, word, capsys):
    with pytest.raises(SystemExit):
        soak.parse([word, "0"])
    assert "at least 1" in capsys.readouterr().err
