"""Does the report hold every line it is given, keep machines apart, and say what it left out?"""

from __future__ import annotations

import json

import pytest
from programs import program
from result_lines import CARD, acceptance, decode, line, of_every_kind


@pytest.fixture
def report(tmp_path, from_the_root, capsys):
    """Reports on files of lines (dicts, or text as it stands): -> status, Markdown, what stderr says."""
    main = program("report").main

    def run(*files: list[dict] | str, plots: bool = False):
        names = []
        for at, found in enumerate(files):
            names.append(tmp_path / f"run{at}.jsonl")
            text = found if isinstance(found, str) else "".join(json.dumps(one) + "\n" for one in found)
            names[-1].write_text(text)
        status = main([*map(str, names), "--out", str(tmp_path / "out"), *([] if plots else ["--no-plots"])])
        file = tmp_path / "out" / "report.md"
        return status, file.read_text() if file.exists() else "", capsys.readouterr().err

    run.folder = tmp_path / "out"
    return run


def test_every_kind_of_line_is_in_the_report(report):
    status, text, said = report(of_every_kind())
    assert (status, said) == (0, "")
    assert "Not in this report" not in text
    for number in ("0.432 ± 0.012", "77 items", "25.0 % (10 of 40; 31.5)", "12.345", "54.321", "1.2345", "0.9876",
                   "311.0", "333.0", "| 0.900 | 6.50 |", "batch | 1st | 2nd |", "| 1 | 0.900 | 0.800 |",
                   "208.5", "11.25", "512.5",
                   "0.125 (0.75)", "missing: no folder", "421.5", "0.876", "77.2", "1.50", "1.38", "615.5", "1.88",
                   "2.62", "51.0", "1,016", "3.5", "nested4a8 fitted", "0.0011", "21,102,592", "1.0159", "0.0994"):
        assert number in text, number
    assert "| chain, K 8, 4 | 2.00 | 8.00 | 4.00 |" in text  # the geometric mean of 2 and 8
    assert "2 rows held against the target alone: 1 differ." in text
    assert "| 50.0 % | 30.0 % | 10.0 % | 10.0 % |" in text


def test_acceptance_names_the_target_that_is_drafted_for(report):
    """One draft for two formats of one model, as eval.acceptance and as eval.bench_decode write them."""
    lines = [acceptance(target="big"), acceptance(target="big int4"), acceptance(model="/models/huge"),
             acceptance(model="/models/huge", format="mxfp4", precision="w4a8"), acceptance()]
    status, text, _ = report(lines)
    assert status == 0
    assert "superseded" not in text
    for target in ("big <- ", "big int4 <- ", "huge <- ", "huge mxfp4 w4a8 <- ", ""):
        assert text.count(f"| {target}mxfp4 <- tiny | mxfp4 | HumanEval |") == 2, target  # by position, too


def test_an_unknown_correlation_is_no_broken_line(report):
    flat = line("probabilities", system="W4A4", reference="W4A16", data="short", tokens=1, pearson_r=None,
                points=[[0.5, 0.5]])
    status, text, said = report([flat], plots=True)
    assert (status, said) == (0, "")
    assert "| W4A4 | W4A16 | short | 1 |  |" in text
    assert "![" in text


def test_machines_are_never_in_one_table(report):
    other = {**CARD, "threads": 8}
    there = {**decode("chain", 999.0, 3.0), "machine": other}
    _, text, _ = report([decode("chain", 311.0, 2.0), there])
    parts = text.split("\n## ")[1:]
    assert len(parts) == 2
    assert "2 threads" in parts[0].splitlines()[0]
    assert "8 threads" in parts[1].splitlines()[0]
    for part, mine, its in ((parts[0], "311.0", "999.0"), (parts[1], "999.0", "311.0")):
        assert mine in part
        assert its not in part


def test_commits_of_one_machine_are_told_apart(report):
    later = {**decode("chain", 400.0, 3.0), "machine": {**CARD, "commit": "def5678"}}
    _, text, _ = report([decode("chain", 311.0, 2.0), later])
    assert "Commits `abc1234`, `def5678`" in text
    assert "| chain @abc1234, K 8, 4 | 2.00 | 2.00 |" in text
    assert "| chain @def5678, K 8, 4 | 3.00 | 3.00 |" in text


@pytest.mark.parametrize("newer_first", [True, False])
def test_of_two_measurements_the_newer_counts_and_it_is_said(report, newer_first):
    newer = {**decode("chain", 400.0, 3.0), "machine": {**CARD, "time": "2026-11-21T10:00:00Z"}}
    both = [decode("chain", 311.0, 2.0), newer]
    _, text, _ = report(both[::-1] if newer_first else both)
    assert "400.0" in text
    assert "311.0" not in text
    assert "1 decode result measured again later; the newer one counts." in text


def test_runs_of_different_names_have_different_tables(report):
    _, text, _ = report([decode("chain", 311.0, 2.0), {**decode("chain", 999.0, 3.0), "name": "large"}])
    toy, large = text.split("\n### ")[1:]
    assert "311.0" in toy
    assert "999.0" not in toy
    assert "999.0" in large


def test_unknown_kinds_are_counted_and_named(report):
    status, text, said = report([decode("chain", 311.0, 2.0), line("mystery"), line("mystery"), {"x": 1, "a": 2}])
    assert status == 0
    assert "2 lines of unknown kind `mystery`" in text
    assert "1 line of unknown kind `without a kind: a, x`" in text
    assert "mystery, 2 lines" in said


def test_a_line_that_is_not_what_its_kind_promises_is_named(report):
    wrong = {**decode("chain", 1.0, 1.0), "tokens_per_second": "fast"}
    short = {key: value for key, value in acceptance().items() if key != "tested"}
    uneven = {**decode("chain", 1.0, 1.0), "seconds": {"target": 1, "levels": [1], "other": 1}}
    status, text, said = report([wrong, short, uneven, decode("chain", 311.0, 2.0)])
    assert status == 0
    assert "line 1: a line of kind 'decode' that cannot be read (ValueError: tokens_per_second is 'fast'" in text
    assert "line 2: a line of kind 'acceptance' that cannot be read (KeyError: 'tested')" in text
    assert "line 3: a line of kind 'decode' that cannot be read (ValueError: seconds of 1 levels for 2 levels" in said


@pytest.mark.parametrize("value", [None, "x", -1, 0, 1e400, [], [[]], {}, True])
def test_no_value_of_any_field_breaks_the_report(report, value):
    """Every field of every kind in turn: the line is read, or it is named; nothing else is lost."""
    for number, one in enumerate(of_every_kind()):
        changed = [{**one, name: value} for name in one]
        status, text, said = report([decode("chain", 311.0, 2.0, data="witness")], changed)
        assert status == 0, (number, said)
        assert "witness" in text


def test_half_a_last_line_is_skipped_and_said(report):
    whole = json.dumps(decode("chain", 311.0, 2.0))
    status, text, said = report(f"{whole}\n{whole[:40]}")
    assert status == 0
    assert "line 2: half a line, as an interrupted write leaves it; skipped" in text
    assert "half a line" in said
    assert report(f"{whole[:40]}\n{whole}\n")[0] == 2  # in the middle it is damage


@pytest.mark.parametrize(("files", "named"), [
    ([], "no files: name the JSON lines"),
    ([""], "run0.jsonl is empty"),
    (["\n\n"], "run0.jsonl is empty"),
    (["not json\n"], "line 1: no JSON"),
    (["[1, 2]\n"], "line 1: a list, and a result is a JSON object"),
    (["{\"kind\": \"mystery\"}\n"], "none of the 1 lines is a result this report knows (mystery)"),
])  # fmt: skip
def test_what_is_no_result_is_refused_and_nothing_is_overwritten(report, files, named):
    report([decode("chain", 311.0, 2.0)])
    status, text, said = report(*files)
    assert status == 2
    assert named in said
    assert said.count("\n") == 1
    assert "311.0" in text


def test_a_missing_file_is_named(report, tmp_path, capsys):
    assert program("report").main([str(tmp_path / "no.jsonl"), "--out", str(tmp_path / "out"), "--no-plots"]) == 2
    assert "no.jsonl cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_replay_says_so_everywhere(report):
    lines = [{**decode("chain", 311.0, 2.0), "replayed": True}, {**acceptance(), "replayed": True},
             {**decode("target alone (replayed)", 99.0, 1.0), "replayed": True, "recorded_on": ["big", "mxfp4"]}]
    _, text, _ = report(lines)
    rows = [row for row in text.splitlines() if row.startswith("| ") and ("chain" in row or "mxfp4" in row)
            and not row.startswith(("| contender", "| chain |"))]
    assert len(rows) >= 5
    assert all(row.count("(replayed)") == 1 for row in rows)
    assert "trace of big <- mxfp4" in text


def test_the_same_lines_give_the_same_bytes(report):
    pytest.importorskip("matplotlib")

    def written():
        report(of_every_kind(), plots=True)
        return {file.name: file.read_bytes() for file in sorted(report.folder.iterdir())}

    first = written()
    assert written() == first
    shown = first["report.md"].decode()
    pictures = [name for name in first if name.endswith(".png")]
    assert len(pictures) >= 9
    for name in pictures:
        assert first[name][:8] == b"\x89PNG\r\n\x1a\n"
        assert f"]({name})" in shown
    assert set(first) == {"report.md", *pictures}  # nothing written aside stays


def test_text_cannot_break_a_table(report):
    _, text, _ = report([decode("a|b\nc", 311.0, 2.0)])
    row = next(row for row in text.splitlines() if "311.0" in row)
    assert row.startswith("| a\\|b c |")


def test_without_matplotlib_it_says_how_to_go_on(report, monkeypatch):
    monkeypatch.setattr(program("report").importlib.util, "find_spec", lambda name: None)
    status, text, said = report([decode("chain", 311.0, 2.0)], plots=True)
    assert (status, text) == (2, "")
    assert "hf-mlspec[eval]" in said
    assert "--no-plots" in said
    assert report([decode("chain", 311.0, 2.0)])[0] == 0
