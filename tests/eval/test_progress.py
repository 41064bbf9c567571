"""Does a long run say how far it is where its output is no terminal, and not too often?"""

from __future__ import annotations

import io

import pytest
from programs import needs_plans, run_plan, system, words, write_words

from eval.records import progress
from eval.records.progress import Bars, tell


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_BEGAN", 0.0)
    monkeypatch.setattr(progress, "_said", 0.0)
    return now


def test_a_line_comes_at_most_every_ten_seconds(clock, capsys):
    with Bars() as bars:
        task = bars.add_task("decoding", total=4)
        for second in (3, 11, 15, 61):
            clock[0] = second
            bars.advance(task)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "decoding: 2 of 4 after 0:00:11\ndecoding: 4 of 4 after 0:01:01\n"


def test_a_short_run_says_nothing(clock, capsys):
    with Bars() as bars:
        bars.advance(bars.add_task("decoding", total=1))
    tell("done")
    assert capsys.readouterr().err == ""


def test_a_terminal_has_bars_and_no_lines(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", screen)
    with Bars() as bars:
        task = bars.add_task("decoding", total=2)
        clock[0] = 20
        bars.advance(task)
    assert "decoding" in screen.getvalue()
    assert " after 0:00:20" not in screen.getvalue()


@needs_plans
@pytest.mark.parametrize(("name", "plan", "told"), [
    ("bench_decode", "batches = 1\nrepeats = 1\nmemory = false\n", "decoding: 1 of 1 after "),
    ("acceptance", "", "cast-words: 2 of 2 after ")])
def test_a_plan_tells_how_far_it_is(monkeypatch, capsys, tmp_path, from_the_root, saved_model, name, plan, told):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    write_words(tmp_path, [{"prompt": "def f("}, {"prompt": "x = "}])
    levels = system("cast", dtype="float32", levels=["mxfp4"]) + words(2)
    (tmp_path / "plan.toml").write_text('name = "toy"\nmax_new_tokens = 4\n' + plan + levels, encoding="utf-8")
    assert run_plan(name, tmp_path, saved_model, "--threads", "1")[0] == 0
    captured = capsys.readouterr()
    assert told in captured.err
    assert " after 0:" not in captured.out
