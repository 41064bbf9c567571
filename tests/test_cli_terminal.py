"""Does a terminal come back as it was, however the demo ends?"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hf_mlspec.cli import demo, main

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (ValueError("no"), 2), (None, 0)])
def test_the_cursor_comes_back(monkeypatch, capsys, error, status):
    monkeypatch.setenv("TERM", "xterm")
    written = io.StringIO()
    console = Console(force_terminal=True, width=100, height=30, file=written)
    monkeypatch.setattr(demo, "Console", lambda **_: console)
    if error is not None:
        monkeypatch.setattr(demo.LiveTable, "finish", raising(error))  # the table is on the screen
    assert main(["demo", "--max-new-tokens", "2", "--level", "prompt_lookup"]) == status
    assert written.getvalue().count(HIDDEN) == written.getvalue().count(SHOWN) > 0
    assert error is None or "mlspec demo: " in capsys.readouterr().err


def raising(error):
    def stop(*_):
        raise error

    return stop
