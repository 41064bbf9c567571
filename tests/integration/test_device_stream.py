"""Does a stream on the engine of GPUs run in captured rounds, and what when it cannot? Here by the CPU's ops."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
import torch
from device_path import OPTIONS, draft, rounds, stepwise, target
from models import near, prompts, tiny

import hf_mlspec
from hf_mlspec import Request
from hf_mlspec.integration import capture
from hf_mlspec.integration.stream import rounds as streamed
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds.captured import CapturedRounds
from hf_mlspec.speculation.rounds.chain import CapturedChain
from hf_mlspec.speculation.rounds.graphs import RoundGraphs
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.rounds.reading import Reading
from hf_mlspec.speculation.sampling import drawn_seed

__all__ = ["draft", "rounds", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]

PROMPTS = [prompts([n])["input_ids"][0].tolist() for n in (9, 4, 17, 30, 2, 12, 6)]
LIMITS = [40, 3, 25, 11, 1, 33, 18]


@pytest.fixture
def on_host(monkeypatch):
    """The rows of every round of the host."""
    seen, run = [], HostRounds.run

    def counted(self, rows, stats):
        seen.append(len(rows))
        return run(self, rows, stats)

    monkeypatch.setattr(HostRounds, "run", counted)
    return seen


def asked(**options) -> list[Request]:
    return [Request(ids, id=n, max_new_tokens=limit, **options)
            for n, (ids, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))]  # fmt: skip


def written(target, requests, levels=(), **options) -> dict:
    settings = {"do_sample": False, "eos_token_id": None, "max_batch": 3, **options}
    done = list(hf_mlspec.generate_stream(target, requests, assistant_models=list(levels), **settings))
    assert [one.error for one in done] == [None] * len(done)
    return {one.id: one for one in done}


def alone(target, n: int) -> list[int]:
    inputs = {"input_ids": torch.tensor([PROMPTS[n]])}
    return stepwise(target, inputs, max_new_tokens=LIMITS[n])[0, len(PROMPTS[n]) :].tolist()


@pytest.mark.parametrize("config", [None, {"num_draft_tokens": 4}], ids=["auto", "given"])
@pytest.mark.parametrize("chain", ["", "draft", "mxfp4 draft", "prompt_lookup"])
def test_requests_in_captured_rounds(target, draft, rounds, on_host, chain, config):
    levels = [draft if word == "draft" else word for word in chain.split()]
    expected = [alone(target, n) for n in range(len(PROMPTS))]
    on_host.clear()
    done = written(target, asked(), levels, speculation_config=config)
    assert [done[n].new_tokens for n in range(len(PROMPTS))] == expected
    assert rounds
    assert not on_host
    assert all(one.finish_reason == "length" for one in done.values())
    assert hf_mlspec.last_stats(target).new_tokens == sum(LIMITS)
    for one in done.values():
        counts = one.speculation
        assert counts.new_tokens == len(one.new_tokens) >= counts.target_passes > 0
        if not levels:
            assert counts.target_passes == counts.new_tokens
    assert not any(kept.lock.locked() for kept in state_of(target).chains)


def test_the_same_tokens_whoever_comes_and_goes(target, draft, rounds, on_host):
    """Requests at random, some cancelled: every one has the tokens, or the first of them, that it has alone."""
    rng = random.Random(5)
    expected = [alone(target, n) for n in range(len(PROMPTS))]
    on_host.clear()
    numbers = [rng.randrange(len(PROMPTS)) for _ in range(40)]

    def source():
        for place, n in enumerate(numbers):
            while rng.random() < 0.4:
                yield None
            one = Request(PROMPTS[n], id=(place, n), max_new_tokens=LIMITS[n])
            yield one
            if rng.random() < 0.2:
                one.cancel()

    done = list(hf_mlspec.generate_stream(target, source(), assistant_models=["mxfp4", draft], max_batch=4,
                                          do_sample=False, eos_token_id=None))  # fmt: skip
    assert sorted(one.id[0] for one in done) == list(range(40))
    for one in done:
        assert one.error is None
        whole = expected[one.id[1]]
        assert one.new_tokens == (whole if one.finish_reason == "length" else whole[: len(one.new_tokens)])
    assert rounds
    assert not on_host


def drawing(n: int, temperature: float = 1.0) -> dict:
    """Arguments of generate for a request that samples, if it is one of an odd number."""
    return {"do_sample": True, "temperature": temperature, "top_k": 0} if n % 2 else {"do_sample": False}


def seed_of(n: int) -> int:
    return drawn_seed(torch.Generator().manual_seed(n))


def drawn_alone(target, n: int, **options) -> list[int]:
    torch.manual_seed(n)
    return stepwise(target, {"input_ids": torch.tensor([PROMPTS[n % 7]])}, max_new_tokens=LIMITS[n % 7],
                    **options)[0, len(PROMPTS[n % 7]) :].tolist()  # fmt: skip


@pytest.mark.parametrize("config", [None, {"num_draft_tokens": 4}], ids=["auto", "given"])
@pytest.mark.parametrize("chain", ["", "draft", "mxfp4 draft", "prompt_lookup"])
def test_requests_that_sample_and_others_share_captured_rounds(target, draft, rounds, on_host, chain, config):
    """Each with its seed and its temperature; greedy ones come first, and rounds without noise are left once."""
    levels = [draft if word == "draft" else word for word in chain.split()]
    options = [drawing(n, (1.0, 0.6, 1.4)[n // 2 % 3]) if n > 3 else {"do_sample": False} for n in range(21)]
    expected = [drawn_alone(target, n, **options[n]) for n in range(21)]
    on_host.clear()
    rounds.clear()
    requests = [Request(PROMPTS[n % 7], id=n, seed=seed_of(n) if options[n]["do_sample"] else None,
                        max_new_tokens=LIMITS[n % 7], **options[n]) for n in range(21)]  # fmt: skip
    done = written(target, requests, levels, speculation_config=config)
    assert [done[n].new_tokens for n in range(21)] == expected
    assert any(expected[n] != expected[n % 7] for n in range(7, 21))  # noise changes something
    assert rounds
    assert not on_host


def test_a_request_with_a_top_k_and_those_beside_it_go_on_step_by_step(target, draft, rounds, on_host):
    expected = [alone(target, n) for n in range(len(PROMPTS))]
    sampled = Request(PROMPTS[0], id="sampled", do_sample=True, top_k=9, seed=7, max_new_tokens=9)
    own = written(target, [sampled], [draft])["sampled"].new_tokens
    on_host.clear()
    rounds.clear()
    requests = asked()
    requests.insert(4, Request(PROMPTS[0], id="sampled", do_sample=True, top_k=9, seed=7, max_new_tokens=9))
    done = written(target, requests, [draft])
    assert [done[n].new_tokens for n in range(len(PROMPTS))] == expected
    assert done["sampled"].new_tokens == own
    assert rounds
    assert on_host
    assert hf_mlspec.last_stats(target).new_tokens == sum(LIMITS) + 9


def test_captured_rounds_come_back_when_nobody_is_under_way(target, rounds, on_host):
    kinds = []

    def source():
        for n, options in enumerate(({}, {"do_sample": True, "seed": 1, "top_k": 9}, {})):
            yield Request(PROMPTS[n], id=n, max_new_tokens=5, **options)

    stream = hf_mlspec.generate_stream(target, source(), max_batch=1, do_sample=False, eos_token_id=None)
    for _ in stream:
        kinds.append(bool(on_host))
        on_host.clear()
    assert kinds == [False, True, False]


def test_rows_too_long_for_a_level_have_other_rounds(target, rounds, on_host):
    small = near(tiny(seed=2, dtype=torch.bfloat16, max_position_embeddings=32), 0.05)
    requests = [Request(PROMPTS[1], id=0, max_new_tokens=9), Request(PROMPTS[3], id=3, max_new_tokens=11),
                Request(PROMPTS[1], id=1, max_new_tokens=3)]  # fmt: skip
    done = written(target, requests, [small], max_batch=1, speculation_config={"num_draft_tokens": 3})
    assert done[3].new_tokens == alone(target, 3)
    assert done[1].new_tokens == alone(target, 1)
    assert rounds
    assert on_host


@pytest.mark.parametrize("where", ["first", "later"])
def test_without_memory_for_captured_rounds(target, draft, rounds, on_host, monkeypatch, where, caplog):
    expected = [alone(target, n) for n in range(len(PROMPTS))]
    on_host.clear()

    def full(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    monkeypatch.setattr(*((RoundGraphs, "capture") if where == "first" else (CapturedChain, "grow")), full)
    monkeypatch.setattr(capture, "_SHARE_OF_STREAM", 2**60)  # none of what is free
    requests = [Request([5] * 400, id="long", max_new_tokens=2), *asked()] if where == "first" else [
        *asked(), Request([5] * 400, id="long", max_new_tokens=2)]  # fmt: skip
    done = written(target, requests, [draft])
    assert [done[n].new_tokens for n in range(len(PROMPTS))] == expected
    assert len(done["long"].new_tokens) == 2
    assert on_host
    assert bool(rounds) == (where == "later")
    assert "step by step" in caplog.text
    assert not any(kept.lock.locked() for kept in state_of(target).chains)


def test_a_row_whose_logits_are_nan_ends_alone(target, rounds, on_host, monkeypatch):
    """Captured rounds can only fail as a whole: those of the host find whose logits they are."""
    expected = [alone(target, n) for n in range(len(PROMPTS))]
    on_host.clear()
    failures = iter([False] * 2 + [True])

    def refuse(self, report):
        if next(failures, False):
            raise FloatingPointError("logits are NaN")

    monkeypatch.setattr(CapturedRounds, "_refuse_nan", refuse)
    done = written(target, asked())
    assert [done[n].new_tokens for n in range(len(PROMPTS))] == expected
    assert rounds
    assert on_host


def test_a_stream_that_is_closed_leaves_its_chain_to_the_next(target, draft, rounds, on_host):
    stream = hf_mlspec.generate_stream(target, asked(), assistant_models=[draft], max_batch=2, events=True, **OPTIONS)
    next(stream)
    stream.close()
    (kept,) = state_of(target).chains
    assert not kept.lock.locked()
    done = written(target, asked(), [draft], max_batch=2)
    assert done[0].new_tokens == alone(target, 0)
    assert state_of(target).chains == [kept]


def test_an_error_that_the_target_has_too_ends_the_stream_and_drops_the_chain(target, draft, rounds, monkeypatch):
    written(target, asked(), [draft])
    monkeypatch.setattr(CapturedRounds, "_refuse_nan", lambda self, report: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(target, asked(), [draft])
    assert not state_of(target).chains


WHERE = {"launch": (RoundGraphs, "launch"), "capture": (RoundGraphs, "capture"), "reading": (Reading, "catch_up")}


@pytest.mark.parametrize("config", [None, {"num_draft_tokens": 4}], ids=["auto", "given"])
@pytest.mark.parametrize(("where", "good"), [(where, good) for where in WHERE for good in (0, 3)])
def test_a_level_that_fails_leaves_the_target_alone_in_captured_rounds(
    target, draft, rounds, on_host, monkeypatch, caplog, where, good, config
):
    """Whether it fails when a round begins, or a capture, or in the next round before anybody was told of the last."""
    expected = [alone(target, n) for n in range(len(PROMPTS))]
    on_host.clear()
    rounds.clear()
    kind, name = WHERE[where]
    own, left = getattr(kind, name), [good]

    def failing(self, program, *words):
        if program.active or (program.levels[1:] and config):
            left[0] -= 1
            if left[0] < 0:
                raise ArithmeticError("this level is broken")
        return own(self, program, *words)

    monkeypatch.setattr(kind, name, failing)
    told, done = {}, {}
    for one in hf_mlspec.generate_stream(target, asked(), assistant_models=[draft], max_batch=3, events=True,
                                         speculation_config=config, do_sample=False, eos_token_id=None):
        if isinstance(one, hf_mlspec.Completion):
            done[one.id] = one
        else:
            told.setdefault(one.id, []).extend(one.tokens)
    assert [done[n].new_tokens for n in range(len(PROMPTS))] == expected
    assert [told[n] for n in range(len(PROMPTS))] == expected
    assert rounds
    assert not on_host
    stats = hf_mlspec.last_stats(target)
    assert stats.new_tokens == sum(LIMITS)
    assert left[0] == -1, "no level was to draft"
    assert "this level is broken" in stats.levels_error
    assert caplog.text.count("goes on with the target alone") == 1
    assert not any(kept.lock.locked() for kept in state_of(target).chains)


@pytest.mark.parametrize("config", [None, {"num_draft_tokens": 4}], ids=["auto", "given"])
def test_a_capture_that_fails_behind_rounds_of_the_host_counts_nothing_twice(
    target, draft, rounds, on_host, monkeypatch, config
):
    """The loop of the host is over, and what it counted is counted, when the captured one cannot begin."""
    own, failed, done = streamed.captured, [], []

    def failing(chain, *args, **how):
        if chain.drafter is not None and on_host and not failed:
            failed.append(len(on_host))
            raise ArithmeticError("no capture")
        return own(chain, *args, **how)

    def source():
        yield Request(PROMPTS[0], id="sampled", do_sample=True, top_k=9, seed=3, max_new_tokens=20)
        while not done:
            yield None
        yield Request(PROMPTS[1], id="greedy", max_new_tokens=15)

    monkeypatch.setattr(streamed, "captured", failing)
    for one in hf_mlspec.generate_stream(target, source(), assistant_models=[draft], speculation_config=config,
                                         do_sample=False, eos_token_id=None, max_batch=3):  # fmt: skip
        done.append(one)
    stats = hf_mlspec.last_stats(target)
    assert [len(one.new_tokens) for one in done] == [20, 15]
    assert rounds
    assert failed == [len(on_host)]
    assert stats.levels_error == "no capture"
    assert (stats.new_tokens, stats.row_passes) == (35, failed[0] + 15)
    (level,), (of_first,) = stats.levels, done[0].speculation.levels
    assert (level.drafted, level.accepted) == (of_first.drafted, of_first.accepted)
    assert level.drafted > 0
    assert sum(one.speculation.target_passes for one in done) == stats.row_passes


def test_an_error_of_the_target_is_not_said_to_be_a_levels(target, draft, rounds, monkeypatch, caplog):
    """Captured rounds with levels fail, and so do those of the target alone."""
    monkeypatch.setattr(RoundGraphs, "launch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        written(target, asked(), [draft])
    assert not hf_mlspec.last_stats(target).levels_error
    assert "levels failed" not in caplog.text


def test_calls_and_other_streams_beside_a_stream(target, draft, rounds, on_host):
    """Nobody waits for a stream, whose end is the caller's business."""
    expected = alone(target, 0)
    on_host.clear()
    stream = hf_mlspec.generate_stream(target, asked(), assistant_models=[draft], max_batch=2, events=True, **OPTIONS)
    next(stream)
    call = {"input_ids": torch.tensor([PROMPTS[0]]), **OPTIONS, "assistant_models": [draft]}
    assert target.generate(**call)[0, len(PROMPTS[0]) :].tolist() == expected
    assert not on_host
    found = {}
    thread = threading.Thread(target=lambda: found.update(written(target, asked(), [draft], max_batch=2)))
    thread.start()
    thread.join(60)
    assert found[0].new_tokens == expected
    assert on_host
    rest = {one.id: one.new_tokens for one in stream if isinstance(one, hf_mlspec.Completion)}
    assert rest[0] == expected


def test_log_probabilities_are_told_step_by_step(target, draft, rounds, on_host):
    requests = asked()
    requests[2] = Request(PROMPTS[2], id=2, max_new_tokens=LIMITS[2], logprobs=2)
    stream = hf_mlspec.generate_stream(target, requests, assistant_models=[draft], max_batch=2, events=True, **OPTIONS)
    told, done = {}, {}
    for one in stream:
        if isinstance(one, hf_mlspec.Completion):
            done[one.id] = one.new_tokens
        else:
            told.setdefault(one.request.id, []).extend(zip(one.tokens, one.levels, strict=True))
            assert len(one.logprobs) == (len(one.tokens) if one.request.id == 2 else 0)
    assert done == {n: alone(target, n) for n in range(len(PROMPTS))}
    assert all([token for token, _ in told[n]] == done[n] for n in done)
    names = {name for line in told.values() for _, name in line}
    assert len(names) == 2  # the draft, and None for the target itself
    assert rounds
    assert on_host


def test_modules_have_rounds_of_the_host(on_host):
    done = written(tiny(seed=2), asked(), speculation_config={"engine": "modules"})
    assert on_host
    assert len(done) == len(PROMPTS)


@pytest.fixture
def grown(monkeypatch):
    """Rows and slots that captured chains got later."""
    seen, grow = [], CapturedChain.grow
    monkeypatch.setattr(CapturedChain, "grow", lambda self, *size: seen.append(size) or grow(self, *size))
    return seen


def test_a_stream_with_room_for_its_rows_makes_its_graphs_once(target, grown):
    def source():
        for n in range(6):
            yield Request(PROMPTS[n], max_new_tokens=12)
            yield None

    done = list(hf_mlspec.generate_stream(target, source(), max_batch=6, do_sample=False, eos_token_id=None))
    assert len(done) == 6
    assert not grown


@pytest.mark.parametrize("share", [8, 2**60], ids=["memory is free", "none is"])
@pytest.mark.parametrize("levels", [0, 1])
def test_a_long_row_that_comes_later_finds_room(target, draft, grown, monkeypatch, share, levels):
    """Where memory is free, as much as a row can have, rows that run do not wait for graphs that are made anew."""
    monkeypatch.setattr(capture, "_SHARE_OF_STREAM", share)
    requests = [*asked()[:3], Request([5] * 400, id="long", max_new_tokens=2)]
    done = written(target, requests, [draft][:levels], max_batch=2)
    assert len(done["long"].new_tokens) == 2
    assert [done[n].new_tokens for n in range(3)] == [alone(target, n) for n in range(3)]
    assert [size for _, size in grown] == ([] if share == 8 else [512])


@pytest.mark.parametrize(("processes", "slots"), [(1, 64), (2, 20)])
def test_processes_that_share_a_target_have_slots_by_no_memory_of_their_own(target, monkeypatch, processes, slots):
    monkeypatch.setattr(capture, "available", lambda device: 64 * 8)
    monkeypatch.setattr(capture, "_SHARE_OF_STREAM", 1)
    monkeypatch.setattr(target, "_tp_size", processes, raising=False)
    runner = SimpleNamespace(follow=None, bytes_per_token=8, model=target, device=torch.device("cpu"))
    assert capture._first_slots([runner], 20, 1) == slots
