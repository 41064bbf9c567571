"""How does a model on the CPU run on the engine of GPUs, and what does the same model return step by step?"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from models import near, tiny
from torch import nn

import hf_mlspec
from hf_mlspec.integration import call as decoding
from hf_mlspec.speculation.rounds.captured import CapturedRounds

OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}


def on_cuda(model: nn.Module) -> nn.Module:
    """The model, whose chains run on the CUDA engine from now on, by the CPU's ops."""
    return hf_mlspec.prepare(model, engine="cuda")


@pytest.fixture
def target():
    return on_cuda(tiny(seed=2, dtype=torch.bfloat16))


@pytest.fixture
def draft(target):
    return near(target, 0.05)


@pytest.fixture
def rounds(monkeypatch):
    """The rows that every captured round was launched for, in order."""
    launched = []
    play = CapturedRounds.run

    def counted(self, *args):
        launched.append(self.bucket)
        return play(self, *args)

    monkeypatch.setattr(CapturedRounds, "run", counted)
    return launched


@contextmanager
def _nothing(*_):
    yield None


def stepwise(target, inputs, levels=(), **options) -> torch.Tensor:
    """What the same decoders return in the ordinary loop, step by step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "captured", _nothing)
        return target.generate(**inputs, **{**OPTIONS, **options}, assistant_models=list(levels))
