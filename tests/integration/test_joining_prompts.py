"""Do rows whose prompts a stream reads by one replay have the tokens that they have alone? Here by the CPU's ops."""

from __future__ import annotations

import pytest
import torch
from device_path import draft, rounds, stepwise, target
from models import prompts

import hf_mlspec
from hf_mlspec import Request
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds import chain as chains
from hf_mlspec.speculation.rounds import prompts as reading
from hf_mlspec.speculation.rounds.first_rounds import FirstRounds
from hf_mlspec.speculation.rounds.graphs import RoundGraphs
from hf_mlspec.speculation.rounds.prompts import PromptGraphs
from hf_mlspec.speculation.rounds.reading import read

__all__ = ["draft", "rounds", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]
LENGTHS = [9, 4, 60, 30, 2, 12, 6, 33, 150, 21]
PROMPTS = [prompts([n])["input_ids"][0].tolist() for n in LENGTHS]


@pytest.fixture
def read_rows(monkeypatch):
    """How many rows each replay read, and each read kernel by kernel; graphs cost nothing, and no round reads."""
    seen, inner, alone = [], PromptGraphs.replayed, read

    def replayed(self, shape, kv, places, rows):
        done = inner(self, shape, kv, places, rows)
        if done:
            seen.append(("replay", len(rows)))
        return done

    def kernel_by_kernel(level, places, rows, *how):
        seen.append(("kernels", len(rows)))
        return alone(level, places, rows, *how)

    monkeypatch.setattr(PromptGraphs, "replayed", replayed)
    for module in (chains, reading):
        monkeypatch.setattr(module, "read", kernel_by_kernel)
    monkeypatch.setattr(RoundGraphs, "seconds_of_layers", lambda self, layers: -1e9)
    monkeypatch.setattr(FirstRounds, "program", lambda *_: None)
    return seen


@pytest.mark.parametrize("levels", ["", "draft"])
@pytest.mark.parametrize("max_batch", [1, 4])
def test_rows_that_join_by_a_replay_have_their_own_tokens(target, draft, rounds, read_rows, levels, max_batch):
    expected = [stepwise(target, {"input_ids": torch.tensor([ids])}, max_new_tokens=5 + n)[0, len(ids) :].tolist()
                for n, ids in enumerate(PROMPTS)]
    requests = [Request(ids, id=n, max_new_tokens=5 + n) for n, ids in enumerate(PROMPTS)]
    for _ in range(2):  # the second stream has the graphs of the first
        read_rows.clear()
        done = list(hf_mlspec.generate_stream(target, requests, assistant_models=[draft] if levels else [],
                                              speculation_config={"num_draft_tokens": 3}, max_batch=max_batch,
                                              do_sample=False, eos_token_id=None))
        assert {one.id: one.new_tokens for one in done} == dict(enumerate(expected))
    assert rounds
    kinds = [kind for kind, _ in read_rows]
    assert kinds.count("replay") > kinds.count("kernels") > 0  # one has 150 tokens


def test_a_call_has_no_such_graphs(target, rounds, read_rows):
    for _ in range(3):
        target.generate(**prompts([9, 4]), max_new_tokens=4, assistant_models=[])
    assert rounds
    assert {kind for kind, _ in read_rows} == {"kernels"}


@pytest.fixture
def level(target):
    requests = [Request(ids, max_new_tokens=2) for ids in PROMPTS[:2]]
    list(hf_mlspec.generate_stream(target, requests, max_batch=2, do_sample=False, eos_token_id=None))
    return state_of(target).chains[-1].levels[0]


@pytest.mark.parametrize("rows", [[PROMPTS[0]], PROMPTS[2:4], [PROMPTS[7], PROMPTS[1], PROMPTS[3]]])
def test_a_replay_writes_the_bits_of_a_read(level, rows):
    graphs, places = PromptGraphs(level), list(range(1, 2 * len(rows), 2))
    shape = graphs.shape(rows, 0)
    assert graphs.took(shape, 2.0, 1.0, 0.5) > 0
    found, expected = (new_kv(level.decoder, 8, 256) for _ in range(2))
    with torch.inference_mode():
        assert graphs.replayed(shape, found, places, rows)
        level.kv = expected
        read(level, places, rows, [0] * len(rows))
    assert expected.any()
    assert torch.equal(found, expected)


def test_a_graph_is_made_when_it_would_have_paid(level):
    graphs, rows, kv = PromptGraphs(level), PROMPTS[:1], new_kv(level.decoder, 8, 256)
    shape = graphs.shape(rows, 0)
    assert [bool(graphs.took(shape, 3.0, 1.0, 5.0)) for _ in range(3)] == [False, False, True]
    assert graphs.took(shape, 1.0, 3.0, 5.0) == 0  # where the device is busy for longer nothing is lost
    assert graphs.replayed(shape, kv, [0], rows)
    assert not graphs.replayed(graphs.shape(PROMPTS[7:8], 0), kv, [0], PROMPTS[7:8])  # more tokens: another graph
    assert not graphs.replayed(graphs.shape(rows, 64), kv, [0], rows)  # another window


def test_what_no_graph_reads(level):
    graphs = PromptGraphs(level)
    assert graphs.shape([], 0) is None
    assert graphs.shape([PROMPTS[0], []], 0) is None
    assert graphs.shape([PROMPTS[8]], 0) is None  # 150 tokens
    assert graphs.shape([PROMPTS[2]] * 5, 0) is None  # 8 rows of 64
    assert graphs.shape([PROMPTS[0]] * 9, 0) is None


def test_without_memory_prompts_are_read_kernel_by_kernel(level, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    graphs = PromptGraphs(level)
    shape = graphs.shape(PROMPTS[:1], 0)
    monkeypatch.setattr(PromptGraphs, "_capture", full)
    graphs.took(shape, 2.0, 1.0, 0.5)
    assert graphs.shape(PROMPTS[:1], 0) is None


def test_processes_that_share_a_model_have_no_such_graphs(level, monkeypatch):
    monkeypatch.setattr(level.decoder, "ranks", object())  # their clocks differ, and all have to make the same calls
    assert PromptGraphs(level).shape(PROMPTS[:1], 0) is None


def test_a_graph_of_prompts_makes_others_seem_no_dearer(level):
    class Rounds:
        capture_seconds, captured_layers = 0.0, 0

        def seconds_of_layers(self, layers):
            return -1e9

    graphs, rounds = PromptGraphs(level), Rounds()
    with torch.inference_mode():
        graphs.read(level, [0], PROMPTS[:1], [0], 0, 0.0, rounds)
        layers, seconds = rounds.captured_layers, rounds.capture_seconds
        graphs.read(level, [0], PROMPTS[:1], [0], 0, 0.0, rounds)  # by a replay
    assert layers == level.decoder.num_layers
    assert seconds > 0
    assert (rounds.captured_layers, rounds.capture_seconds) == (layers, seconds)
