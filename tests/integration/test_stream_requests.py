"""What may a request of a stream be, which settings win, and what does a bad one cost the others?"""

from __future__ import annotations

import re

import numpy
import pytest
import torch
from models import letters, near, tiny
from transformers import GenerationConfig, TextIteratorStreamer
from transformers.generation import LogitsProcessor, StoppingCriteria

import hf_mlspec
from hf_mlspec import Request, generate_stream

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
TOKENIZER = letters()
PROMPT = "what now, "
IDS = TOKENIZER(PROMPT)["input_ids"]
GREEDY = {"do_sample": False, "max_new_tokens": 12}
CHAIN = {"assistant_models": [NEAR, "prompt_lookup"]}


def one(request, **options) -> hf_mlspec.Completion:
    (completion,) = generate_stream(TARGET, [request], **{**CHAIN, **GREEDY, **options})
    return completion


def generated(**options) -> list[int]:
    return TARGET.generate(torch.tensor([IDS]), **{**GREEDY, **options})[0].tolist()


@pytest.mark.parametrize(
    "request_",
    [
        IDS,
        tuple(IDS),
        torch.tensor(IDS),
        torch.tensor([IDS], dtype=torch.int32),
        [IDS],
        PROMPT,
        {"input_ids": IDS},
        TOKENIZER(PROMPT),
        TOKENIZER(PROMPT, return_tensors="pt"),
        {"input_ids": [0, 0, *IDS], "attention_mask": [0, 0] + [1] * len(IDS)},
        Request(IDS),
    ],
    ids=["list", "tuple", "tensor", "row", "nested", "text", "dict", "encoding", "tensors", "padded", "Request"],
)
def test_forms_of_a_request(request_):
    done = one(request_, tokenizer=TOKENIZER)
    assert done.error is None
    assert done.new_tokens == generated()[len(IDS) :]
    assert done.text == TOKENIZER.decode(done.new_tokens, skip_special_tokens=True)
    assert isinstance(done.request, Request)


def test_settings_of_a_request_go_before_the_streams():
    assert len(one({"input_ids": IDS, "max_new_tokens": 3}).new_tokens) == 3
    assert len(one({"input_ids": IDS, "max_length": len(IDS) + 2}).new_tokens) == 2
    own = GenerationConfig(max_new_tokens=4, do_sample=False)
    assert len(one({"input_ids": IDS, "generation_config": own}).new_tokens) == 4
    assert len(one({"input_ids": IDS, "generation_config": own, "max_new_tokens": 5}).new_tokens) == 5
    assert own.max_new_tokens == 4
    streams = GenerationConfig(max_new_tokens=6, repetition_penalty=1.7, do_sample=False)
    (done,) = generate_stream(TARGET, [IDS], generation_config=streams)
    assert done.sequence == generated(max_new_tokens=6, repetition_penalty=1.7)
    (done,) = generate_stream(TARGET, [Request(IDS, max_new_tokens=7)], generation_config=streams)
    assert done.sequence == generated(max_new_tokens=7, repetition_penalty=1.7)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_default_length_is_transformers():
    (done,) = generate_stream(TARGET, [IDS], do_sample=False)
    assert done.sequence == TARGET.generate(torch.tensor([IDS]), do_sample=False)[0].tolist()


def test_stop_strings_and_criteria():
    whole = generated(max_new_tokens=40)[len(IDS) :]
    stop = TOKENIZER.decode(whole, skip_special_tokens=True)[2:4]
    assert len(stop) == 2
    done = one({"input_ids": IDS, "stop_strings": stop, "max_new_tokens": 40}, tokenizer=TOKENIZER)
    assert done.finish_reason == "stop"
    assert done.text.endswith(stop)
    assert done.new_tokens == whole[: len(done.new_tokens)]

    class After(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.tensor([ids.shape[1] >= len(IDS) + 6])

    done = one({"input_ids": IDS, "stopping_criteria": [After()], "max_new_tokens": 40})
    assert (done.finish_reason, done.new_tokens) == ("stop", whole[:6])


def test_a_streamer_per_request():
    streamers = [TextIteratorStreamer(TOKENIZER, True, timeout=0, skip_special_tokens=True) for _ in range(3)]
    requests = [Request([*IDS, 5 + i], streamer=streamer, id=i) for i, streamer in enumerate(streamers)]
    texts = {done.id: done.text for done in generate_stream(TARGET, requests, tokenizer=TOKENIZER, **GREEDY, **CHAIN)}
    assert {i: "".join(streamer) for i, streamer in enumerate(streamers)} == texts


class Fails(LogitsProcessor):
    def __init__(self, after: int):
        self.after = after

    def __call__(self, ids, scores):
        if ids.shape[1] >= self.after:
            raise KeyError("my own mistake")
        return scores


class FailingStreamer:
    ended = 0

    def put(self, value):
        if value.ndim == 1:
            raise OSError("the socket is gone")

    def end(self):
        self.ended += 1
        raise ValueError("and cannot be closed")  # not what went wrong first


class FailingCriterion(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        raise ZeroDivisionError("never")


BAD = {
    "no tokens": ({"input_ids": []}, ValueError, "no tokens"),
    "beyond the vocabulary": ({"input_ids": [5, 64]}, ValueError, "token 64.*embeds 0 to 63"),
    "negative": ({"input_ids": [-1]}, ValueError, "token -1"),
    "too long": ({"input_ids": IDS, "max_new_tokens": 600}, ValueError, "the 512 positions.*max_new_tokens=502"),
    "two rows": ({"input_ids": [[5, 6], [7, 8]]}, ValueError, r"shape \[2, 2\].*request of every row"),
    "floats": ({"input_ids": [0.5]}, ValueError, "float32"),
    "nothing at all": (object(), TypeError, "object.*not token ids"),
    "text without a tokenizer": (PROMPT, TypeError, "tokenizer"),
    "stop strings without one": ({"input_ids": IDS, "stop_strings": "x"}, ValueError, "tokenizer"),
    "unknown option": ({"input_ids": IDS, "max_tokens": 3}, ValueError, "max_tokens"),
    "beams": ({"input_ids": IDS, "num_beams": 2}, ValueError, "num_beams=2"),
    "several answers": ({"input_ids": IDS, "num_return_sequences": 3}, ValueError, "num_return_sequences"),
    "scores": ({"input_ids": IDS, "output_scores": True}, ValueError, "output_scores.*tokens only"),
    "paged": ({"input_ids": IDS, "cache_implementation": "paged"}, ValueError, "cache_implementation"),
    "another loop": ({"input_ids": IDS, "custom_generate": "someone/loop"}, ValueError, "custom_generate"),
    "no length": ({"input_ids": IDS, "max_new_tokens": 0}, ValueError, "max_new_tokens"),
    "seed": ({"input_ids": IDS, "seed": "x"}, TypeError, "seed is 'x'"),
    "large seed": ({"input_ids": IDS, "seed": 2**64}, ValueError, "seed is 18446744073709551616.*2\\*\\*64 - 1"),
    "short mask": ({"input_ids": IDS, "attention_mask": [1, 1]}, ValueError, r"attention_mask has shape \[1, 2\]"),
    "long mask": ({"input_ids": IDS, "attention_mask": [1] * 99}, ValueError, r"attention_mask has shape \[1, 99\]"),
    "temperature": ({"input_ids": IDS, "do_sample": True, "temperature": -1.0}, ValueError, "temperature"),
    "cold": ({"input_ids": IDS, "do_sample": True, "temperature": 1e-300}, ValueError, "temperature is 1e-300.*1e-30"),
    "assistants": ({"input_ids": IDS, "assistant_models": ["ngram"]}, ValueError, "assistant_models"),
    "guidance": ({"input_ids": IDS, "guidance_scale": 2.0}, ValueError, "keeps state"),
    "config": ({"input_ids": IDS, "generation_config": 3}, TypeError, "int, not a GenerationConfig"),
    "processor": ({"input_ids": IDS, "logits_processor": [Fails(0)]}, KeyError, "my own mistake"),
    "late processor": ({"input_ids": IDS, "logits_processor": [Fails(len(IDS) + 5)]}, KeyError, "my own mistake"),
    "criterion": ({"input_ids": IDS, "stopping_criteria": [FailingCriterion()]}, ZeroDivisionError, "never"),
    "streamer": ({"input_ids": IDS, "streamer": FailingStreamer()}, OSError, "socket"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("levels", [[], [NEAR, "prompt_lookup"]], ids=["alone", "chain"])
def test_a_bad_request_fails_alone(what, levels):
    bad, error, words = BAD[what]
    good = [Request([*IDS, 5 + i], id=i) for i in range(3)]
    done = list(generate_stream(TARGET, [good[0], bad, *good[1:]], max_batch=2, assistant_models=levels, **GREEDY))
    failed = [completion for completion in done if completion.error is not None]
    assert [completion.finish_reason for completion in failed] == ["error"]
    with pytest.raises(error, match=words):
        raise failed[0].error
    if what == "late processor":
        assert failed[0].sequence == generated()[: len(IDS) + 5]  # what was settled before it failed
    if what == "streamer":
        assert bad["streamer"].ended > 0
    sequences = {completion.id: completion.sequence for completion in done if completion.error is None}
    for request in good:
        expected = TARGET.generate(torch.tensor([request.input_ids]), **GREEDY)
        assert sequences[request.id] == expected[0].tolist()


def test_the_least_temperature_takes_the_likeliest_tokens():
    coldest = Request(IDS, do_sample=True, temperature=1e-30, seed=1)
    assert one(coldest).sequence == generated()


def test_a_streamer_ends_with_its_request_also_where_that_never_began(monkeypatch):
    """Else whoever reads from it in another thread waits forever."""
    invalid, cancelled, large = (Request([5, 6], streamer=FailingStreamer(), id=i) for i in range(3))
    invalid.options["max_new_tokens"] = 600
    cancelled.cancel()
    assert [one(request).finish_reason for request in (invalid, cancelled)] == ["error", "cancelled"]

    def full(*_, **options):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("hf_mlspec.integration.stream.stream.require_memory", full)
    assert str(one(large).error) == "no room"
    assert [request.streamer.ended for request in (invalid, cancelled, large)] == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["modules", "compiled where built"])
@pytest.mark.parametrize("levels", [[], ["prompt_lookup"]], ids=["alone", "chain"])
@pytest.mark.parametrize("sampled", [False, True])
def test_logits_that_are_nan_end_one_request(dtype, levels, sampled):
    target = tiny(seed=2, dtype=dtype)
    with torch.no_grad():
        target.get_input_embeddings().weight[62] = float("nan")
    good = [Request([*IDS, 5 + i], id=i, eos_token_id=[], do_sample=sampled, seed=i) for i in range(6)]
    bad = Request([*IDS * 3, 62], id="bad")
    # Greedy rows without processors take the compiled argmax; they happen not to say 62.
    options = {"assistant_models": levels, "bad_words_ids": [[62]] if sampled else None, **GREEDY}
    expected = [next(generate_stream(target, [request], **options)).sequence for request in good]
    done = {one.id: one for one in generate_stream(target, [good[0], bad, *good[1:]], max_batch=2, **options)}
    assert done["bad"].finish_reason == "error"
    assert done["bad"].new_tokens == []
    with pytest.raises(FloatingPointError, match="the logits of the target are NaN"):
        raise done["bad"].error
    assert [done[i].sequence for i in range(6)] == expected


def test_a_processor_that_fails_at_a_refused_guess_costs_nothing():
    length = {"max_new_tokens": 30, "eos_token_id": []}
    whole = generated(**length)

    class KnowsOnlyTheTruth(LogitsProcessor):
        asked = 0

        def __call__(self, ids, scores):
            self.asked += 1
            if ids[0].tolist() != whole[: ids.shape[1]]:
                raise AssertionError("not a prefix I know")
            return scores

    processor = KnowsOnlyTheTruth()
    sometimes_wrong = near(TARGET, 0.1)
    request = {"input_ids": IDS, "logits_processor": [processor], **length}
    done = one(request, assistant_models=[sometimes_wrong, "prompt_lookup"])
    assert done.error is None
    assert done.sequence == whole
    assert 0 < done.speculation.levels[0].accepted < done.speculation.levels[0].drafted
    assert processor.asked > len(done.new_tokens)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_batch": 0}, ValueError, "max_batch is 0"),
        ({"max_batch": 2.0}, ValueError, "max_batch is 2.0"),
        ({"requests": PROMPT}, TypeError, r"requests is a str.*\[request\]"),
        ({"requests": Request(IDS)}, TypeError, "requests is a Request"),
        ({"requests": 5}, TypeError, "requests is a int"),
        ({"assistant_models": ["mxfp5"]}, ValueError, "level 'mxfp5'"),
        ({"assistant_models": "mxfp4"}, TypeError, "list of levels"),
        ({"speculation_config": {"num_tokens": 3}}, ValueError, "num_tokens"),
        ({"max_tokens": 5}, ValueError, "max_tokens"),
        ({"num_beams": 3}, ValueError, "num_beams=3"),
        ({"stop_strings": "x"}, ValueError, "tokenizer"),
        ({"seed": 5}, TypeError, "seed.*each Request"),
        ({"streamer": object()}, TypeError, "streamer.*each Request"),
        ({"max_new_tokens": 5000}, ValueError, "512 positions"),
        ({"generation_config": {"max_new_tokens": 3}}, TypeError, "dict, not a GenerationConfig"),
        ({"output_logits": True}, ValueError, "output_logits"),
    ],
)
def test_bad_arguments_of_the_call_raise_at_once(options, error, words):
    options = {"requests": [IDS], **options}
    with pytest.raises(error, match=words):
        generate_stream(TARGET, options.pop("requests"), **options)


def test_models_that_cannot_be_targets_raise_at_once():
    with pytest.raises(TypeError, match="not a transformers model"):
        generate_stream(torch.nn.Linear(2, 2), [IDS])


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length", "min_new_tokens", "min_length"])
@pytest.mark.parametrize("value", ["12", True, 12.0, [12]])
def test_a_number_of_tokens_that_is_none_is_named(name, value):
    words = rf"{name} is {re.escape(repr(value))}, it must be an integer"
    done = {one.id: one for one in generate_stream(TARGET, [Request(IDS, id="a", **{name: value}), IDS], **GREEDY)}
    assert done[None].error is None
    with pytest.raises(TypeError, match=rf"^Request\(id='a', {name}\): {words}"):
        raise done["a"].error
    settings = GenerationConfig(do_sample=False)
    setattr(settings, name, value)
    with pytest.raises(TypeError, match=rf"generation_config\.{words}"):
        raise one({"input_ids": IDS, "generation_config": settings}).error
    for options in ({name: value}, {"generation_config": settings}):
        with pytest.raises(TypeError, match=rf"^generate_stream: .*{words}"):
            generate_stream(TARGET, [IDS], **options)


def test_integers_of_other_libraries_are_numbers_of_tokens():
    assert len(one({"input_ids": IDS, "max_new_tokens": numpy.int64(3)}).new_tokens) == 3


@pytest.mark.parametrize("levels", [[], [NEAR, "prompt_lookup"]], ids=["alone", "chain"])
@pytest.mark.parametrize("served", [0, 1, 3])
def test_a_source_that_fails_costs_no_request(levels, served):
    """What is in flight completes; then the source's own exception comes, and the stream is over."""

    def source():
        yield from requests
        raise failure

    streamers = [FailingStreamer() for _ in range(served)]
    for streamer in streamers:
        streamer.put = lambda value: None
    requests = [Request([*IDS, 5 + i], id=i, streamer=streamer) for i, streamer in enumerate(streamers)]
    failure, done = ConnectionError("no more"), []
    iterator = generate_stream(TARGET, source(), max_batch=2, assistant_models=levels, **GREEDY)
    with pytest.raises(ConnectionError, match="no more") as raised:
        list(map(done.append, iterator))
    assert raised.value is failure
    assert "source" in [entry.name for entry in raised.traceback]
    expected = [TARGET.generate(torch.tensor([request.input_ids]), **GREEDY)[0].tolist() for request in requests]
    assert {one.id: one.sequence for one in done} == dict(enumerate(expected))
    assert [streamer.ended for streamer in streamers] == [1] * served
    assert list(iterator) == []


def test_an_interrupt_of_the_source_does_not_wait():
    def source():
        yield IDS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(generate_stream(TARGET, source(), max_batch=2, **GREEDY))


def test_a_disabled_hook_is_said():
    hf_mlspec.disable()
    try:
        with pytest.raises(RuntimeError, match=r"hf_mlspec\.enable"):
            generate_stream(TARGET, [IDS])
    finally:
        hf_mlspec.enable()


def test_counts_of_the_whole_stream():
    done = list(generate_stream(TARGET, [[*IDS, i] for i in range(5, 9)], max_batch=2, **GREEDY, **CHAIN))
    stats = hf_mlspec.last_stats(TARGET)
    assert stats.new_tokens == sum(len(completion.new_tokens) for completion in done)
    assert stats.row_passes == sum(completion.speculation.target_passes for completion in done)
    assert len(stats.levels) == 2
    for name in ("drafted", "accepted", "tested"):
        own = sum(getattr(completion.speculation.levels[0], name) for completion in done)
        assert own == getattr(stats.levels[0], name) > 0
    assert stats.target_cache_bytes > 0


def breaking_off():
    yield Request(IDS)
    raise OSError("the source broke off")


@pytest.mark.parametrize("what", ["late processor", "criterion", "streamer", "source"])
def test_where_processes_share_the_model_the_callers_errors_end_the_stream(monkeypatch, what):
    """Another process may know nothing of them: it would go on with a row that ended here, and wait for its part."""
    for name in ("request", "arrivals"):
        monkeypatch.setattr(f"hf_mlspec.integration.stream.{name}.is_shared", lambda model: True)
    bad, error, words = BAD.get(what, (None, OSError, "broke off"))
    requests = breaking_off() if bad is None else [Request(IDS), bad]
    with pytest.raises(error, match=words):
        list(generate_stream(TARGET, requests, max_batch=2, assistant_models=[NEAR], **GREEDY))


def test_where_processes_share_the_model_a_wrong_request_fails_alone(monkeypatch):
    for name in ("request", "arrivals"):
        monkeypatch.setattr(f"hf_mlspec.integration.stream.{name}.is_shared", lambda model: True)
    requests = [Request(IDS), BAD["beyond the vocabulary"][0]]  # as it does on all processes
    done = list(generate_stream(TARGET, requests, max_batch=2, assistant_models=[NEAR], **GREEDY))
    (failed,) = [completion for completion in done if completion.error is not None]
    assert "token 64" in str(failed.error)
    assert [one.sequence for one in done if one is not failed] == [generated()]
