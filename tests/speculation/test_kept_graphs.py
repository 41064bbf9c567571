"""Which captured rounds go where there are too many of them?"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from hf_mlspec.speculation.rounds import graphs as module
from hf_mlspec.speculation.rounds.graphs import RoundGraphs
from hf_mlspec.speculation.rounds.state import RoundState


@dataclass(eq=False)
class Program:
    """As much of a `RoundProgram` as graphs ask for."""

    active: tuple[int, ...] = ()
    lead: int = 1
    layers: int = 1
    plane_sources: list = field(default_factory=list)


@pytest.fixture
def graphs(monkeypatch):
    """As on a GPU; what is recorded is nothing."""
    monkeypatch.setattr(module, "recorded", lambda *_: object())
    monkeypatch.setattr(RoundGraphs, "_rehearse", lambda *_: None)
    made = RoundGraphs(RoundState.new(8, 4, 1, torch.device("cpu")))
    made.on_gpu, made._pool, made._stream = True, None, None
    return made


def test_rounds_of_levels_go_before_those_of_the_target_alone(graphs):
    alone, drafts = Program(), [Program((0,)) for _ in range(module._KEPT)]
    for one in (alone, *drafts):
        graphs.capture(one, 1)
    assert graphs.has(alone, 1)
    assert [graphs.has(one, 1) for one in drafts] == [False, *[True] * (module._KEPT - 1)]


def test_rounds_that_read_what_rows_lack_do_not_drive_out_those_of_levels(graphs):
    """Streams capture one for each number of rows and width; without one, tokens are read before the round."""
    alone, draft = Program(), Program((0,))
    graphs.capture(alone, 1)
    readers = [(Program(lead=width), rows) for width in (32, 64, 128, 256) for rows in (1, 2, 4, 8)]
    for one, rows in readers:
        graphs.capture(one, rows)
        graphs.capture(draft, 1)  # as a plan that runs again and again
    assert graphs.has(alone, 1)
    assert graphs.has(draft, 1)
    for _ in range(module._KEPT):
        graphs.capture(Program(), 1)
    assert graphs.has(alone, 1) is False
    assert not any(graphs.has(one, rows) for one, rows in readers)
