"""Does a long run say how far it is where its output is no terminal, and not too often?"""

from __future__ import annotations

import io

import pytest

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
