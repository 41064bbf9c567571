"""Do rows that join have their own tokens where their first round reads what the target's cache lacks of them?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from decoders import PACKED_SHAPE, random_model
from device_path import draft, rounds, stepwise, target
from models import prompts
from serving import Serving, captured_loop

import hf_mlspec
from hf_mlspec import Request
from hf_mlspec.integration.stream.prompts import LongPrompts
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds import chain as chains
from hf_mlspec.speculation.rounds.first_rounds import FirstRounds
from hf_mlspec.speculation.rounds.graphs import RoundGraphs
from hf_mlspec.speculation.rounds.reading import Reading, read

__all__ = ["draft", "rounds", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]
SHARED = prompts([130])["input_ids"][0].tolist()
PROMPTS = [[*SHARED[:begin], *prompts([n])["input_ids"][0].tolist()]
           for begin, n in ((0, 9), (0, 1), (128, 30), (0, 60), (128, 30), (0, 400), (130, 3), (64, 12))]


@pytest.fixture
def launched(monkeypatch):
    """Tokens that each round fed the target, and rows that were read before one."""
    seen, launch, alone = [], RoundGraphs.launch, read

    def counted(self, program, batch):
        seen.append(program.lead)
        launch(self, program, batch)

    def kernel_by_kernel(level, places, rows, *how):
        seen.append("read")
        return alone(level, places, rows, *how)

    monkeypatch.setattr(RoundGraphs, "launch", counted)
    monkeypatch.setattr(chains, "read", kernel_by_kernel)
    monkeypatch.setattr(chains, "PromptGraphs", lambda level: SimpleNamespace(
        read=lambda level, places, rows, cached, window, *_: kernel_by_kernel(level, places, rows, cached, window)))
    return seen


def written(target, max_batch, levels=(), kept=None, **options):
    requests = [Request(ids, id=n, max_new_tokens=5 + n, **options) for n, ids in enumerate(PROMPTS)]
    done = list(hf_mlspec.generate_stream(target, requests, assistant_models=list(levels), prefix_cache=kept,
                                          speculation_config={"num_draft_tokens": 3}, max_batch=max_batch,
                                          eos_token_id=None))
    assert [one.error for one in done] == [None] * len(done)
    return {one.id: one for one in done}


@pytest.mark.parametrize("kept", [None, "1GiB"])
@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_rows_have_their_own_tokens(target, rounds, launched, max_batch, kept):
    expected = {n: stepwise(target, {"input_ids": torch.tensor([ids])}, max_new_tokens=5 + n)[0, len(ids) :].tolist()
                for n, ids in enumerate(PROMPTS)}
    launched.clear()
    done = written(target, max_batch, kept=kept, do_sample=False)
    assert {n: one.new_tokens for n, one in done.items()} == expected
    if max_batch == 8:
        assert set(launched) == {"read", 1}  # all of them at once, one of 400 tokens
    else:
        assert set(launched) > {1, 32}  # some rounds read
    if kept is None or max_batch == 8:
        assert not any(one.speculation.prefix_tokens for one in done.values())
    else:
        assert done[4].speculation.prefix_tokens == done[6].speculation.prefix_tokens == 128


def test_sampled_rows_too(target, rounds, launched):
    how = {"do_sample": True, "top_k": 0, "temperature": 0.7}
    found = [written(target, batch, seed=3, **how) for batch in (1, 3)]
    assert set(launched) > {1, 32}
    assert [one.new_tokens for one in found[0].values()] == [found[1][n].new_tokens for n in found[0]]
    launched.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FirstRounds, "program", lambda *_: None)
        read_before = written(target, 1, seed=3, **how)
    assert set(launched) == {1, "read"}
    assert [one.new_tokens for one in read_before.values()] == [found[0][n].new_tokens for n in read_before]


def test_levels_that_draft_for_each_row_are_read_before(target, draft, rounds, launched):
    expected = written(target, 3, do_sample=False)
    launched.clear()
    done = written(target, 3, [draft], do_sample=False)
    assert {n: one.new_tokens for n, one in done.items()} == {n: one.new_tokens for n, one in expected.items()}
    assert set(launched) == {1, "read"}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_come_and_go_at_random(launched, sampled, seed):
    from serving import Levels

    with torch.inference_mode():
        Serving("nothing", Levels(sampled=sampled), seed, streams=True).play(12)
    assert set(launched) >= {1, 32}


def test_a_row_that_left_before_its_first_round_leaves_nothing_in_its_place():
    """The next one has more in common with it than the cache holds."""
    loop = captured_loop("nothing", streams=True)
    row = PROMPTS[3][:40]
    with torch.inference_mode():
        loop.admit([list(row)], [3], [0])
        loop.replace([0], [[*row, 7]], [3], [1])
        while loop.round():
            pass
    expected = captured_loop("nothing")
    with torch.inference_mode():
        expected.admit([[*row, 7]], [3], [1])
        while expected.round():
            pass
    assert loop.rows == expected.rows


def test_what_stays_of_a_row_is_what_was_read_of_it(target):
    reading = Reading(SimpleNamespace(levels=[SimpleNamespace(states=None)]), [])
    reading.start(2)
    reading.give({}, 0, 0, 0, 5)
    assert reading.kept([0, 1], [9, 9], [[1] * 20, [1] * 20]) == [5, 8]
    assert reading.kept([0, 1], [3, 9], [[1] * 20, [1] * 4]) == [2, 3]
    reading.select([1, 0])
    assert reading.kept([0, 1], [9, 9], [[1] * 20, [1] * 20]) == [8, 5]
    reading.chain.levels[0].states = object()
    assert reading.kept([0, 1], [9, 9], [[1] * 20, [1] * 20]) == [0, 0]


@pytest.fixture
def chain(target):
    list(hf_mlspec.generate_stream(target, [Request(PROMPTS[0], max_new_tokens=2)], max_batch=2, do_sample=False,
                                   eos_token_id=None))
    return state_of(target).chains[-1]


@pytest.mark.parametrize(("lacking", "rows", "lead"), [(2, 1, 32), (32, 8, 32), (33, 4, 64), (200, 1, 256),
                                                       (257, 1, None), (33, 8, None), (5, 16, None)])
def test_how_many_tokens_of_how_many_rows(chain, lacking, rows, lead):
    found = chain.first_rounds.program(chain.single, lacking, rows)
    assert (found and found.lead) == lead
    assert chain.first_rounds.program(chain.program, lacking, rows) is None  # eight steps


def test_a_round_that_reads_is_captured_once_it_would_have_paid(chain):
    graphs, made = SimpleNamespace(seconds_to_capture=lambda program: 5.0), []
    program = chain.first_rounds.program(chain.single, 20, 1)

    def capture(*given):
        made.append(given)
        return len(made) == 1

    for _ in range(3):
        chain.first_rounds.missed(program, 1, 2.0, graphs, capture)
    assert made == [(program, 1)]
    assert chain.first_rounds.works
    for _ in range(3):
        chain.first_rounds.missed(program, 1, 2.0, graphs, capture)
    assert len(made) == 2
    assert not chain.first_rounds.works  # no memory: it is not tried again
    assert chain.first_rounds.program(chain.single, 20, 1) is None


def test_who_has_no_such_rounds(chain, monkeypatch):
    level = chain.levels[0]
    assert FirstRounds(level, (False, None, False)).works
    monkeypatch.setattr(level.decoder, "ranks", object())
    assert not FirstRounds(level, (False, None, False)).works  # clocks of processes differ
    monkeypatch.undo()
    monkeypatch.setattr(level, "bits", object())
    assert not FirstRounds(level, (False, None, False)).works  # a router would choose for more tokens
    hybrid = hf_mlspec.prepare(random_model("qwen3.5", torch.bfloat16, **PACKED_SHAPE), engine="cuda")
    list(hf_mlspec.generate_stream(hybrid, [Request([5, 6], max_new_tokens=2)], max_batch=1, do_sample=False,
                                   eos_token_id=None))
    assert not state_of(hybrid).chains[-1].first_rounds.works  # its layers' states cannot read a token twice


def test_a_prompt_is_kept_when_its_row_had_a_round():
    kept = []
    prompts_ = LongPrompts.__new__(LongPrompts)
    prompts_.target = SimpleNamespace(cache=SimpleNamespace(kv=None))
    prompts_._unkept, prompts_._keep = {4: 70, 5: 70, 6: 9}, lambda row, kv, place: kept.append((len(row), place))
    prompts_.keep([4, 5, 6], [[1] * 71, [1] * 72, [1] * 11], [0, 1, 2])
    assert (kept, prompts_._unkept) == ([(70, 1)], {4: 70})
    prompts_.keep([4, 6], [[1] * 79, [1] * 12], [0, 2])
    assert (kept, prompts_._unkept) == ([(70, 1), (70, 0)], {})
