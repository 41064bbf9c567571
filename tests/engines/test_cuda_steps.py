"""Does a captured step return what the step returns, and is it captured seldom enough? Graphs are played here."""

from __future__ import annotations

import pytest
import torch
from decoders import random_model
from torch import nn
from warned import forget_warnings

from hf_mlspec.engines.cuda import steps as cuda_steps
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.steps import CudaSteps
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.precision import OWN_BITS

SLOTS = 64


class Graph:
    """Runs again what was captured, on the same operands, into the same result."""

    def __init__(self, run):
        self.run = run

    def replay(self):
        results = self.run.__closure__[self.run.__code__.co_freevars.index("results")].cell_contents
        self.run()
        results[0].copy_(results.pop())


@pytest.fixture
def decoder():
    return CudaDecoder(random_model("llama", torch.bfloat16))


@pytest.fixture
def captured(monkeypatch):
    """How often something was captured."""
    times = []

    def recorded(run, device, sources):
        run()
        times.append(1)
        return Graph(run)

    monkeypatch.setattr(cuda_steps, "recorded", recorded)
    return times


def steps_of(decoder) -> CudaSteps:
    steps = CudaSteps(nn.Identity(), decoder)
    steps._captures = True
    return steps


def operands(batch: int, width: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 199, (batch, width), generator=generator, dtype=torch.int32)
    starts = torch.randint(0, 30, (batch,), generator=generator, dtype=torch.int32)
    counts = torch.randint(0, width + 1, (batch,), generator=generator, dtype=torch.int32)
    return ids, starts, counts


@pytest.mark.parametrize("pick", [None, torch.tensor([0, 3])], ids=["all", "some"])
def test_replays_return_what_the_decoder_returns(decoder, captured, pick):
    steps, kv = steps_of(decoder), new_kv(decoder, 2, SLOTS).normal_()
    other = kv.clone()
    for seed in range(8):
        given = operands(2, 3, seed)
        out = steps.forward(*given, kv, pick=pick, bits=OWN_BITS)
        assert torch.equal(out, decoder.forward(*given, other, pick=pick))
        assert torch.equal(kv, other)
    assert len(captured) == 1


def test_many_shapes_are_not_captured_again_and_again(decoder, captured):
    steps, kv = steps_of(decoder), new_kv(decoder, 1, SLOTS)
    for turn in range(60):
        for width in range(1, 13):
            steps.forward(*operands(1, width, turn), kv, pick=None, bits=OWN_BITS)
        assert len(steps._steps) <= cuda_steps._KEPT
    assert 12 <= len(captured) <= 12 * 4


def test_another_cache_has_graphs_of_its_own(decoder, captured):
    steps = steps_of(decoder)
    for kv in (new_kv(decoder, 1, SLOTS).normal_(), new_kv(decoder, 1, SLOTS).normal_()):
        for seed in range(12):
            given = operands(1, 2, seed)
            expected = decoder.forward(*given, kv.clone())
            assert torch.equal(steps.forward(*given, kv, pick=None, bits=OWN_BITS), expected)
    assert len(captured) == 2


def test_long_steps_and_those_of_the_cpu_are_not_captured(decoder, captured):
    kv = new_kv(decoder, 1, 256)
    steps, plain = steps_of(decoder), CudaSteps(nn.Identity(), decoder)
    for seed in range(5):
        steps.forward(*operands(1, cuda_steps._MOST_TOKENS + 1, seed), kv, pick=None, bits=OWN_BITS)
        plain.forward(*operands(1, 1, seed), kv, pick=None, bits=OWN_BITS)
    assert not captured


def test_without_memory_steps_run_uncaptured_and_it_is_said(decoder, monkeypatch, caplog):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    forget_warnings()
    monkeypatch.setattr(cuda_steps, "recorded", full)
    steps, kv = steps_of(decoder), new_kv(decoder, 2, SLOTS)
    for seed in range(9):
        given = operands(2, 1, seed)
        expected = decoder.forward(*given, kv.clone())
        assert torch.equal(steps.forward(*given, kv, pick=None, bits=OWN_BITS), expected)
    assert caplog.text.count("steps of 2 rows are launched kernel by kernel: not enough memory to capture them") == 1
