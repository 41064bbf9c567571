"""Are long prompts read beside running rows, and prefixes kept, without a bit of difference?"""

from __future__ import annotations

import random

import pytest
import torch
from decoders import random_model
from device_path import on_cuda
from models import near, tiny

import hf_mlspec
from hf_mlspec import Request, generate_stream
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.engines.lanes import KeptState
from hf_mlspec.engines.prefixes import BLOCK, KeptPrefixes, bytes_of
from hf_mlspec.engines.rows import DecoderRows
from hf_mlspec.integration.stream.prompts import LongPrompts
from hf_mlspec.integration.stream.stream import _Stream
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

needs_kernels = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
SETTINGS = {"do_sample": False, "eos_token_id": None}
CHAINS = {"alone": 0, "draft": 1, "mxfp4 draft": 2}


@pytest.fixture(params=["cpu", "cuda"])
def target(request):
    model = tiny(seed=2, dtype=torch.bfloat16, max_position_embeddings=2048)
    return on_cuda(model) if request.param == "cuda" else model


@pytest.fixture
def levels(target):
    draft = near(target, 0.05)
    return {"alone": [], "draft": [draft], "mxfp4 draft": ["mxfp4", draft]}


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 64) for _ in range(count)]


def alone(target, prompt: list[int], new: int) -> list[int]:
    """What a call of generate writes that reads the prompt at once."""
    out = target.generate(torch.tensor([prompt]), max_new_tokens=new, assistant_models=[], **SETTINGS)
    return out[0, len(prompt) :].tolist()


@needs_kernels
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("chunk", [16, 100, None])
def test_long_prompts_change_no_token(target, levels, chain, chunk):
    asked = [(ids(1, 5), 60), (ids(2, 700), 9), (ids(3, 333), 12), (ids(4, 17), 20), (ids(5, 900), 1)]
    expected = [alone(target, prompt, new) for prompt, new in asked]
    requests = [Request(prompt, id=n, max_new_tokens=new) for n, (prompt, new) in enumerate(asked)]
    done = list(generate_stream(target, requests, max_batch=3, assistant_models=levels[chain], prefill_chunk=chunk,
                                speculation_config={"num_draft_tokens": 3}, **SETTINGS))
    assert {one.id: one.new_tokens for one in done} == dict(enumerate(expected))


@needs_kernels
def test_rows_run_while_a_long_prompt_is_read(target):
    order = []
    requests = [Request(ids(1, 5), id="running", max_new_tokens=64), Request(ids(2, 800), id="long", max_new_tokens=2)]
    for event in generate_stream(target, requests, max_batch=2, prefill_chunk=32, events=True, **SETTINGS):
        if isinstance(event, hf_mlspec.NewTokens):
            order.append(event.id)
    assert order.index("long") > 2
    assert order[0] == "running"


@needs_kernels
@pytest.mark.parametrize("target", ["cuda"], indirect=True)
def test_running_rows_do_not_wait_for_a_chunk_and_a_row_that_joins_at_once(target, monkeypatch):
    done, read, move, run = [], LongPrompts._read_some, _Stream._move, _Stream._round
    monkeypatch.setattr(LongPrompts, "_read_some", lambda self, *words: done.append("read") or read(self, *words))
    monkeypatch.setattr(_Stream, "_round", lambda self: done.append("round") or run(self))
    monkeypatch.setattr(_Stream, "_move", lambda self, going, joining: done.extend(["joins"] * bool(joining))
                        or move(self, going, joining))
    requests = [Request(ids(1, 5), id=0, max_new_tokens=300), Request(ids(2, 200), id=1, max_new_tokens=4)]
    list(generate_stream(target, requests, max_batch=2, prefill_chunk=64, **SETTINGS))
    assert done.count("read") > 2
    last = len(done) - 1 - done[::-1].index("read")
    assert done[last : last + 3] == ["read", "round", "joins"]


@needs_kernels
def test_a_request_is_cancelled_while_its_prompt_is_read(target):
    victim = Request(ids(2, 900), id="long", max_new_tokens=2)
    events = []
    for event in generate_stream(target, [Request(ids(1, 5), id="running", max_new_tokens=30), victim], max_batch=2,
                                 prefill_chunk=16, events=True, **SETTINGS):  # fmt: skip
        events.append(event)
        victim.cancel()
    done = {one.id: one for one in events if isinstance(one, hf_mlspec.Completion)}
    assert (done["long"].finish_reason, done["long"].new_tokens) == ("cancelled", [])
    assert done["running"].new_tokens == alone(target, ids(1, 5), 30)


def before_reading(monkeypatch, what) -> None:
    """Have engines call this first when they read a part of a prompt: with themselves, and the row so far."""
    for kind in (CpuEngine, CudaEngine):
        def read(self, kv, row, start, _read=kind.read):
            what(self, row)
            return _read(self, kv, row, start)

        monkeypatch.setattr(kind, "read", read)


@needs_kernels
@pytest.mark.usefixtures("nothing_said_yet")
@pytest.mark.parametrize("chunks", [0, 2])
def test_a_level_that_fails_while_it_reads_is_left_out(target, monkeypatch, caplog, chunks):
    """The request that was read, one that waits to be read, and those that run go on with the target alone."""
    draft = near(target, 0.05)
    asked = [(ids(1, 5), 60), (ids(2, 700), 9), (ids(3, 600), 12), (ids(4, 17), 20)]
    expected = [alone(target, prompt, new) for prompt, new in asked]
    left = [chunks]

    def failing(engine, row):
        if engine.model is draft:
            left[0] -= 1
            if left[0] < 0:
                raise ArithmeticError("cannot read")

    before_reading(monkeypatch, failing)
    requests = [Request(prompt, id=n, max_new_tokens=new) for n, (prompt, new) in enumerate(asked)]
    done = list(generate_stream(target, requests, max_batch=3, assistant_models=[draft], prefill_chunk=64,
                                speculation_config={"num_draft_tokens": 3}, **SETTINGS))
    assert {one.id: one.new_tokens for one in done} == dict(enumerate(expected))
    assert left[0] == -1
    assert "cannot read" in hf_mlspec.last_stats(target).levels_error
    assert caplog.text.count("goes on with the target alone") == 1


@needs_kernels
def test_a_target_that_fails_while_it_reads_fails_that_request_alone(target, monkeypatch):
    draft = near(target, 0.05)

    def failing(engine, row):
        if engine.model is target and len(row) > 100:
            raise ArithmeticError("cannot read")

    expected = alone(target, ids(1, 5), 60)
    before_reading(monkeypatch, failing)
    requests = [Request(ids(1, 5), id=0, max_new_tokens=60), Request(ids(2, 700), id=1, max_new_tokens=9)]
    done = {one.id: one for one in generate_stream(target, requests, max_batch=3, assistant_models=[draft],
                                                   prefill_chunk=64, **SETTINGS)}
    assert (done[0].new_tokens, done[1].finish_reason, str(done[1].error)) == (expected, "error", "cannot read")
    assert not hf_mlspec.last_stats(target).levels_error


class Ended:
    """A streamer that counts its ends."""

    ends = 0

    def put(self, value): ...

    def end(self):
        self.ends += 1


@needs_kernels
def test_no_memory_to_read_a_prompt_into_fails_that_request_alone(target, monkeypatch):
    expected = alone(target, ids(1, 5), 20)

    def full(self, tokens):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(DecoderRows, "lane", full)
    streamer = Ended()
    requests = [Request(ids(1, 5), id=0, max_new_tokens=20),
                Request(ids(2, 700), id=1, max_new_tokens=9, streamer=streamer),
                Request(ids(1, 5), id=2, max_new_tokens=20)]
    done = {one.id: one for one in generate_stream(target, requests, max_batch=2, prefill_chunk=64, **SETTINGS)}
    assert (str(done[1].error), done[1].finish_reason, streamer.ends) == ("no room", "error", 1)
    assert done[0].new_tokens == done[2].new_tokens == expected


@needs_kernels
@pytest.mark.parametrize("levels", [0, 1])
def test_the_memory_that_a_prompt_is_read_into_is_asked_for(target, monkeypatch, levels):
    beside = []

    def asked(engines, rows, device, **options):
        beside.append(options["beside"])

    monkeypatch.setattr("hf_mlspec.integration.stream.stream.require_memory", asked)
    lanes, lane = [], DecoderRows.lane
    monkeypatch.setattr(DecoderRows, "lane", lambda self, tokens: lanes.append(lane(self, tokens)) or lanes[-1])
    chain = [near(target, 0.05)] * levels
    list(generate_stream(target, [ids(1, 5), ids(2, 700)], max_batch=1, prefill_chunk=64, max_new_tokens=2,
                         assistant_models=chain, speculation_config={"num_draft_tokens": 3}, **SETTINGS))
    assert len(lanes) == 1 + levels
    assert beside == [0, sum(one.nbytes for one in lanes)]


@needs_kernels
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("chunk", [64, None])
def test_kept_prefixes_change_no_token(target, levels, chain, chunk):
    shared = ids(9, 300)
    prompts = [[*shared[: 300 - 40 * (n % 3)], *ids(n, 3 + n)] for n in range(8)]
    expected = [alone(target, prompt, 7) for prompt in prompts]
    requests = [Request(prompt, id=n, max_new_tokens=7) for n, prompt in enumerate(prompts)]
    done = list(generate_stream(target, requests, max_batch=2, assistant_models=levels[chain], prefill_chunk=chunk,
                                prefix_cache="64MiB", speculation_config={"num_draft_tokens": 3}, **SETTINGS))
    assert {one.id: one.new_tokens for one in done} == dict(enumerate(expected))
    stats = hf_mlspec.last_stats(target)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.prefix_tokens == sum(one.speculation.prefix_tokens for one in done) >= 4 * 3 * BLOCK
    assert stats.prefix_bytes > 0


@needs_kernels
@pytest.mark.parametrize("chunk", [64, 100])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["qwen3.5", "mamba2"])
def test_prefixes_with_states_change_no_token(name, device, chunk):
    """Of prompts with 150 or 130 tokens in common. States are kept behind whole chunks and the last block."""
    model = random_model(name, torch.bfloat16, max_position_embeddings=2048)
    model.generation_config.pad_token_id = 0
    model = on_cuda(model) if device == "cuda" else model
    shared = ids(9, 150)
    prompts = [[*shared[: 150 - 20 * (n % 2)], *ids(n, 3 + n)] for n in range(4)]
    expected = [alone(model, prompt, 5) for prompt in prompts]
    requests = [Request(prompt, id=n, max_new_tokens=5) for n, prompt in enumerate(prompts)]
    done = list(generate_stream(model, requests, max_batch=2, assistant_models=["mxfp4"], prefill_chunk=chunk,
                                prefix_cache="64MiB", speculation_config={"num_draft_tokens": 3}, **SETTINGS))
    assert {one.id: one.new_tokens for one in done} == dict(enumerate(expected))
    stats = hf_mlspec.last_stats(model)
    assert stats.prefix_tokens == sum(one.speculation.prefix_tokens for one in done) >= 2 * 2 * BLOCK
    assert stats.prefix_bytes > 0


def test_states_without_chunks_keep_no_prefix(caplog):
    model = random_model("qwen3.5", torch.bfloat16)
    done = list(generate_stream(model, [[5, 6, 7]], max_new_tokens=3, prefix_cache="1MiB", prefill_chunk=None,
                                **SETTINGS))  # fmt: skip
    assert done[0].error is None
    assert not has_compiled_decoder() or "borders of chunks, and prefill_chunk is None" in caplog.text


@needs_kernels
def test_kept_keys_and_values_are_those_computed_anew(target):
    prompt, seen = [*ids(9, 300)], []
    for _ in range(2):
        stream = generate_stream(target, [Request(prompt, max_new_tokens=4)] * 2, max_batch=1, prefix_cache="64MiB",
                                 events=True, **SETTINGS)  # fmt: skip
        for event in stream:
            if isinstance(event, hf_mlspec.NewTokens):
                own = stream.gi_frame.f_locals["self"]
                seen.append(own.chain.target.runner.cache.kv[:, :, 0, :, :299].clone())
    assert all(torch.equal(seen[0], one) for one in seen)


def test_sampled_requests_with_kept_prefixes():
    target = tiny(seed=2, dtype=torch.bfloat16, max_position_embeddings=2048)
    asked = [Request([*ids(9, 200), n], id=n, max_new_tokens=9, do_sample=True, seed=n) for n in range(5)]
    found = [{one.id: one.new_tokens for one in generate_stream(target, asked, max_batch=2, **options)}
             for options in ({"prefix_cache": None, "prefill_chunk": None}, {"prefix_cache": 2**26})]
    assert found[0] == found[1]


def test_prefixes_module_by_module_are_refused_with_a_word(caplog):
    target = tiny(seed=3, dtype=torch.float32)
    done = list(generate_stream(target, [[5, 6, 7]], max_new_tokens=3, prefix_cache="1MiB",
                                speculation_config={"prepare": False}))
    assert done[0].error is None
    assert "keeps no prefixes" in caplog.text


@pytest.mark.parametrize(("argument", "value"), [("prefill_chunk", 0), ("prefill_chunk", True), ("prefix_cache", -1),
                                                 ("prefix_cache", "much"), ("prefix_cache", 1.5)])
def test_arguments_that_cannot_be(argument, value):
    with pytest.raises((TypeError, ValueError), match=argument):
        generate_stream(tiny(seed=2), [[5]], **{argument: value})


def test_bytes_in_words():
    assert [bytes_of(one, "x") for one in (None, 7, "7", "1GiB", "1.5 MiB", "2kb")] == [
        0, 7, 7, 2**30, 3 * 2**19, 2000]  # fmt: skip


class TestKeptPrefixes:
    def test_a_state_is_found_behind_the_last_block_that_has_one(self):
        state = KeptState(torch.zeros(4), torch.zeros(2))
        store, row = KeptPrefixes(10**6), list(range(4 * BLOCK))
        store.keep(row[: 2 * BLOCK], lambda start, end: torch.tensor([start]), lambda: state)
        store.keep(row, lambda start, end: torch.tensor([start]))
        assert store.find_with_state(row) == ([torch.tensor([0]), torch.tensor([BLOCK])], state)
        assert len(store.find(row)) == 4
        assert store.nbytes == 4 * 8 + state.nbytes
        assert store.find_with_state(row[:BLOCK]) == ([], None)

    def test_a_state_without_room_is_not_kept(self):
        state, row = KeptState(torch.zeros(100), torch.zeros(2)), list(range(BLOCK))
        store = KeptPrefixes(200)
        store.keep(row, lambda start, end: torch.tensor([start]), lambda: state)
        assert (store.nbytes, store.find_with_state(row)) == (8, ([], None))

    """Blocks of one number each: of 8 bytes."""

    @staticmethod
    def row(*blocks: int) -> list[int]:
        return [block for block in blocks for _ in range(BLOCK)]

    @staticmethod
    def kept(store: KeptPrefixes, row: list[int]) -> None:
        store.keep(row, lambda start, end: torch.tensor([start]))

    def test_a_row_finds_the_blocks_that_it_begins_with(self):
        store = KeptPrefixes(80)
        self.kept(store, [*self.row(1, 2, 3), 4])
        assert store.nbytes == 24
        assert [one.item() for one in store.find([*self.row(1, 2), 3, 3])] == [0, BLOCK]
        assert store.find(self.row(2, 1)) == []
        assert store.find(self.row(1)[:-1]) == []

    def test_what_was_not_used_for_longest_goes_first_and_leaves_before_what_they_hang_on(self):
        store = KeptPrefixes(32)
        self.kept(store, self.row(1, 2))
        self.kept(store, self.row(1, 3))
        store.find(self.row(1, 2))
        self.kept(store, self.row(5, 6))
        assert (store.nbytes, store.evicted) == (32, 1)
        assert [len(store.find(self.row(*row))) for row in ((1, 2), (1, 3), (5, 6))] == [2, 1, 2]
        self.kept(store, self.row(7, 8, 9, 10, 11))  # more than there is room for: its first blocks
        assert len(store.find(self.row(7, 8, 9, 10, 11))) == 4
        assert store.nbytes == 32

    def test_a_block_beyond_the_budget_is_not_kept(self):
        store = KeptPrefixes(7)
        self.kept(store, self.row(1))
        assert (store.nbytes, store.find(self.row(1))) == (0, [])

    def test_nothing_is_left_of_it(self):
        store = KeptPrefixes(80)
        self.kept(store, self.row(1, 2))
        store.clear()
        assert (store.nbytes, store.find(self.row(1, 2))) == (0, [])
