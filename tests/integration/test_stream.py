"""Does a stream give every request what generate gives it alone, and ask for no more than it has slots for?"""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch
from models import EOS, letters, near, packed, prompts, tiny

import hf_mlspec
from hf_mlspec import Request, generate_stream
from hf_mlspec.integration.stream.stream import _Stream
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.drafters.ngram import NGram
from hf_mlspec.speculation.drafters.prompt_lookup import PromptLookup

TARGETS = {"modules": tiny(seed=2, dtype=torch.float32), "compiled": tiny(seed=2, dtype=torch.bfloat16)}
NEAR = {path: near(model, 0.05) for path, model in TARGETS.items()}
PATHS = [
    "modules",
    pytest.param(
        "compiled", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
    ),
]
CHAINS = {
    "alone": lambda path: [],
    "cast": lambda path: ["mxfp4"],
    "cast, near": lambda path: ["mxfp4", NEAR[path]],
    "lookup": lambda path: ["prompt_lookup"],
    "ngram": lambda path: ["ngram"],
}


def asked(seed: int, count: int = 12, **options) -> list[dict]:
    """Arguments of requests with prompts and limits of any length; about half of them end before their limit."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(3, 64) for _ in range(rng.randrange(1, 25))]
        ends = [EOS, *rng.sample(range(3, 64), 2)] if rng.random() < 0.5 else None
        made.append({"input_ids": prompt, "max_new_tokens": rng.randrange(1, 30), "eos_token_id": ends, "id": number,
                     **options})
    return made


def stream(path: str, requests, chain: str = "cast, near", **options) -> list[hf_mlspec.Completion]:
    config = {"prepare": path == "compiled"}
    return list(generate_stream(TARGETS[path], requests, assistant_models=CHAINS[chain](path),
                                speculation_config=config, **options))


def by_id(completions: list[hf_mlspec.Completion]) -> dict[int, list[int]]:
    return {completion.id: completion.sequence for completion in completions}


def alone(path: str, request: dict, **options) -> list[int]:
    """What generate says to one request, in transformers' own loop or, prepared, in a compiled one."""
    own = {name: value for name, value in request.items() if name not in ("input_ids", "id", "seed")}
    levels = {} if path == "modules" else {"assistant_models": []}
    ids = torch.tensor([request["input_ids"]])
    return TARGETS[path].generate(ids, **levels, do_sample=False, **own, **options)[0].tolist()


@pytest.mark.parametrize("max_batch", [1, 2, 5])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("path", PATHS)
def test_a_request_gets_what_generate_gives_it_alone(path, chain, max_batch):
    requests = asked(seed=max_batch)
    done = stream(path, requests, chain, max_batch=max_batch, do_sample=False)
    assert by_id(done) == {request["id"]: alone(path, request) for request in requests}
    assert {completion.finish_reason for completion in done} == {"stop", "length"}
    for completion in done:
        request = requests[completion.id]
        assert completion.sequence == request["input_ids"] + completion.new_tokens
        stopped = completion.new_tokens[-1] in (request["eos_token_id"] or [EOS])
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert completion.error is None
        assert completion.speculation.new_tokens == len(completion.new_tokens)
        assert 0 < completion.speculation.target_passes <= len(completion.new_tokens)


@pytest.mark.parametrize("path", PATHS)
def test_seeds_say_the_same_whatever_is_beside_or_below(path):
    settings = [
        {"do_sample": True, "temperature": 0.8},
        {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3},
        {"do_sample": False},
        {"do_sample": True, "top_p": 0.7, "no_repeat_ngram_size": 2},
    ]
    requests = [{**request, **settings[i % 4], "seed": i} for i, request in enumerate(asked(seed=7))]
    expected = {request["id"]: stream(path, [request], "alone")[0].sequence for request in requests}
    for chain in CHAINS:
        shuffled = random.Random(chain).sample(requests, len(requests))
        assert by_id(stream(path, shuffled, chain, max_batch=4)) == expected
    other = [{**request, "seed": 1000 + i} for i, request in enumerate(requests)]
    changed = by_id(stream(path, other, max_batch=4))
    assert [changed[i] != expected[i] for i in range(12)].count(True) > 5
    assert all(changed[i] == expected[i] for i in range(2, 12, 4))


def test_without_seeds_torchs_own_seed_decides():
    requests = asked(seed=3, count=4, do_sample=True)
    torch.manual_seed(0)
    first = by_id(stream("modules", requests))
    torch.manual_seed(0)
    assert by_id(stream("modules", requests)) == first
    assert by_id(stream("modules", requests)) != first


def test_processors_of_a_request_are_its_own():
    requests = asked(seed=5, count=6)
    requests[1] |= {"repetition_penalty": 1.5}
    requests[2] |= {"bad_words_ids": [[5], [6, 7]]}
    requests[4] |= {"min_new_tokens": 9, "max_new_tokens": 12}
    expected = {request["id"]: alone("modules", request) for request in requests}
    for chain in CHAINS:
        assert by_id(stream("modules", requests, chain, max_batch=3)) == expected


def test_requests_are_pulled_when_a_slot_is_free():
    pulled, live, most = [], 0, 0

    def source():
        for request in asked(seed=1):
            pulled.append(request["id"])
            yield request

    iterator = generate_stream(TARGETS["modules"], source(), max_batch=3)
    assert pulled == []  # nothing happens before somebody asks
    for ended, _ in enumerate(iterator, 1):
        live = len(pulled) - ended
        most = max(most, live)
        assert live <= 3
    assert pulled == list(range(12))
    assert most >= 2


def test_a_slot_is_refilled_in_the_next_round_whoever_goes_on():
    endless = {"input_ids": [5, 6], "max_new_tokens": 200, "eos_token_id": [], "id": "endless"}
    short = [{"input_ids": [7, i], "max_new_tokens": 3, "eos_token_id": [], "id": i} for i in range(3, 23)]
    done = stream("modules", [endless, *short], "alone", max_batch=2)
    assert [completion.id for completion in done] == [*range(3, 23), "endless"]
    # Without levels a round is a token: 20 requests of 3 tokens went through one slot while the other was taken.
    assert hf_mlspec.last_stats(TARGETS["modules"]).target_passes == 200
    assert hf_mlspec.last_stats(TARGETS["modules"]).row_passes == 260


def test_nothing_yet_does_not_stop_the_rows_that_run():
    seen = []

    def source():
        yield {"input_ids": [5], "max_new_tokens": 8, "id": 0}
        for _ in range(4):
            seen.append(hf_mlspec.last_stats(TARGETS["modules"]))
            yield None
        yield {"input_ids": [6], "max_new_tokens": 2, "id": 1}
        yield None
        yield {"input_ids": [7], "max_new_tokens": 2, "id": 2}

    done = stream("modules", source(), "alone", max_batch=2)
    assert len(seen) == 4
    assert sorted(completion.id for completion in done) == [0, 1, 2]
    assert all(completion.finish_reason in ("length", "stop") for completion in done)


@pytest.mark.parametrize("chain", ["alone", "cast, near"])
def test_cancelled_between_rounds(chain):
    victim, other = (Request([5, i], max_new_tokens=60, eos_token_id=[], id=i) for i in (6, 7))
    never = Request([8], id=8)

    class Canceller:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()
            if len(self.tokens) > 20:
                victim.cancel()

        def end(self):
            never.cancel()

    other.streamer = Canceller()
    done = {completion.id: completion for completion in stream("modules", [victim, other, never], chain, max_batch=2)}
    assert done[6].finish_reason == "cancelled"
    assert 0 < len(done[6].new_tokens) < 60
    whole = alone("modules", {"input_ids": [5, 6], "max_new_tokens": 60, "eos_token_id": []})
    assert done[6].sequence == whole[: len(done[6].sequence)]
    assert done[7].finish_reason == "length"
    assert done[7].sequence == other.streamer.tokens
    assert done[8].finish_reason in ("length", "stop", "cancelled")


def test_cancelled_from_another_thread():
    endless = Request([5], max_new_tokens=100_000, eos_token_id=[], id=0)
    endless.options["max_new_tokens"] = 480
    started = threading.Event()

    class Watch:
        def put(self, value):
            started.set()

        def end(self): ...

    endless.streamer = Watch()

    def cancel():
        started.wait(30)
        endless.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    done = stream("modules", [endless, {"input_ids": [6], "max_new_tokens": 2, "id": 1}], "alone")
    thread.join()
    assert {completion.id: completion.finish_reason for completion in done}[0] == "cancelled"


def test_a_request_cancelled_before_its_turn_takes_no_slot():
    request = Request([5])
    request.cancel()
    (done,) = stream("modules", [request])
    assert (done.finish_reason, done.sequence, done.request) == ("cancelled", [], request)


def test_closing_early_frees_everything():
    ended, made = [], []

    class Streamer:
        def put(self, value): ...

        def end(self):
            ended.append(1)

    model = TARGETS["modules"]
    requests = (made.append(1) or Request([5], max_new_tokens=400, eos_token_id=[], streamer=Streamer())
                for _ in range(9))
    short = Request([7], max_new_tokens=1)
    iterator = generate_stream(model, (one for source in ([short], requests) for one in source), max_batch=4,
                               assistant_models=["prompt_lookup"])
    assert next(iterator).request is short
    stream_object = weakref.ref(iterator.gi_frame.f_locals["self"])
    assert isinstance(stream_object(), _Stream)
    gc.disable()
    try:
        iterator.close()
        assert stream_object() is None  # without a collection of cycles: caches go at once
    finally:
        gc.enable()
    assert len(made) == len(ended) == 3
    assert model.generate(torch.tensor([[5]]), max_new_tokens=2).shape == (1, 3)
    assert list(iterator) == []


@pytest.mark.parametrize("level", [PromptLookup(), NGram()], ids=lambda level: level.name)
def test_two_streams_take_turns_with_one_level(level):
    requests = [{**request, "eos_token_id": []} for request in asked(seed=8)]
    streams = [
        generate_stream(TARGETS["modules"], order, max_batch=size, assistant_models=[level], do_sample=False)
        for size, order in ((2, requests), (3, requests[::-1]))
    ]
    done = [completion for both in zip(*streams, strict=True) for completion in both]
    assert by_id(done[::2]) == by_id(done[1::2]) == {r["id"]: alone("modules", r) for r in requests}


def test_between_completions_the_model_is_its_own():
    model = TARGETS["modules"]
    iterator = generate_stream(model, asked(seed=4), max_batch=3, do_sample=False)
    next(iterator)
    assert not torch.is_inference_mode_enabled()
    inputs = prompts([5])
    again = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    other = list(generate_stream(model, [inputs["input_ids"]], max_new_tokens=5, do_sample=False))
    assert other[0].sequence == again[0].tolist()
    assert len(list(iterator)) == 11


def test_rows_outgrow_the_first_cache():
    model = tiny(seed=2, dtype=torch.float32, max_position_embeddings=2048)
    requests = [{"input_ids": [5] * 3, "max_new_tokens": 700, "eos_token_id": [], "id": 0},
                {"input_ids": list(range(3, 60)) * 12, "max_new_tokens": 5, "id": 1}]
    config = {"prepare": False}
    done = by_id(list(generate_stream(model, requests, max_batch=2, assistant_models=["prompt_lookup"],
                                      speculation_config=config, do_sample=False)))
    for request in requests:
        own = {name: value for name, value in request.items() if name not in ("input_ids", "id")}
        expected = model.generate(torch.tensor([request["input_ids"]]), do_sample=False, **own)
        assert done[request["id"]] == expected[0].tolist()


@pytest.mark.parametrize("path", PATHS)
def test_thirty_two_slots(path):
    requests = asked(seed=11, count=40)
    done = by_id(stream(path, requests, max_batch=32, do_sample=False))
    assert done == {request["id"]: alone(path, request) for request in requests}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chain", ["alone", "cast, near"])
def test_memory_goes_with_the_longest_row(path, chain):
    target = tiny(seed=2, dtype=TARGETS[path].dtype, max_position_embeddings=4096)
    levels = ["mxfp4", near(target, 0.05)] if chain != "alone" else []
    long = {"input_ids": [5] * 1900, "max_new_tokens": 1, "id": "long"}
    rest = [{"input_ids": [7, i], "max_new_tokens": 12, "eos_token_id": [], "id": i} for i in range(3, 9)]
    iterator = generate_stream(target, [rest[0], long, *rest[1:]], max_batch=3, assistant_models=levels,
                               speculation_config={"prepare": path == "compiled"}, do_sample=False,
                               prefill_chunk=None)  # the long row joins at once, and ends first
    held, done = [], {}
    for completion in iterator:
        done[completion.id] = completion.sequence
        stream = iterator.gi_frame.f_locals["self"]
        held.append(sum(runner.cache_bytes for runner in (stream.chain.target.runner, *stream.chain.runners)))
    assert next(iter(done)) == "long"
    assert held[1] <= held[0] / 2
    prepared = {"assistant_models": []} if path == "compiled" else {}
    for request in rest:
        expected = target.generate(torch.tensor([request["input_ids"]]), max_new_tokens=12, eos_token_id=[],
                                   do_sample=False, **prepared)
        assert done[request["id"]] == expected[0].tolist()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4", "prompt_lookup"], ["w4a8", "w4a4"]], ids=" > ".join)
def test_qspec(path, levels):
    target = packed(tiny(seed=2, dtype=TARGETS[path].dtype))
    config, settings = {"prepare": path == "compiled"}, {"do_sample": False}
    alone = {} if path == "modules" else {"assistant_models": []}
    requests = asked(seed=13)
    done = by_id(list(generate_stream(target, requests, max_batch=4, assistant_models=levels,
                                      speculation_config=config, **settings)))
    stats = hf_mlspec.last_stats(target)
    assert stats.levels[0].accepted > 0
    assert stats.levels[0].cache_bytes == 0  # in the target's cache
    for request in requests:
        own = {name: value for name, value in request.items() if name not in ("input_ids", "id")}
        expected = target.generate(torch.tensor([request["input_ids"]]), **alone, **settings, **own)
        assert done[request["id"]] == expected[0].tolist()


@pytest.mark.parametrize("by_vocabulary", [True, False])
def test_a_level_with_another_tokenizer(by_vocabulary):
    target, other = TARGETS["modules"], tiny(seed=5, dtype=torch.float32, vocab_size=68)
    tokenizer, another = letters(), letters(extra=4)
    requests = [{**request, "do_sample": i % 3 == 0, "seed": i} for i, request in enumerate(asked(seed=17))]
    expected = by_id(stream("modules", requests, "alone", max_batch=4))
    done = list(generate_stream(
        target, requests, max_batch=4, assistant_models=[other, "ngram"] if not by_vocabulary else [other],
        assistant_tokenizers=[another] if by_vocabulary else [another, None], tokenizer=tokenizer,
        speculation_config={"prepare": False, "common_vocabulary": by_vocabulary, "confidence_threshold": 0.0},
    ))
    assert by_id(done) == expected
    assert hf_mlspec.last_stats(target).levels[0].drafted > 0
