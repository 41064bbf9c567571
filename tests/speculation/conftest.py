"""How long does a choice take in a test of what is chosen? As long every time, whatever else the machine does."""

from __future__ import annotations

from itertools import count

import pytest

_TICK = 2e-4  # seconds between two looks at the clock: what choosing takes where nothing else runs


@pytest.fixture
def steady_clock(monkeypatch):
    """By the machine's clock a choice in whose middle another program ran would be thought dear, and the next ones
    would come too late."""
    ticks = count()
    monkeypatch.setattr("hf_mlspec.speculation.controller.perf_counter", lambda: _TICK * next(ticks))
