"""How do tests on the CPU take the way of models on a GPU, and what does the same model return step by step?"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from hf_mlspec.integration import decoding, wiring
from hf_mlspec.speculation.rounds.captured import CapturedRounds

OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def on_device(monkeypatch):
    """Models take the way of those on a GPU; the rows that every round was launched for, in order."""
    rounds = []
    play = CapturedRounds.run

    def counted(self, *args):
        rounds.append(self.bucket)
        return play(self, *args)

    monkeypatch.setattr(CapturedRounds, "run", counted)
    monkeypatch.setattr(wiring, "_as_on_device", True)
    return rounds


@contextmanager
def _nothing(*_):
    yield None


def stepwise(target, inputs, levels=(), **options) -> torch.Tensor:
    """What the same decoders return in the ordinary loop, step by step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "captured", _nothing)
        return target.generate(**inputs, **{**OPTIONS, **options}, assistant_models=list(levels))
