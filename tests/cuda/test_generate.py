"""Does generate on a GPU return, in captured rounds, what the target alone returns, and what if it cannot?"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from models import near, packed, prompts, tiny
from transformers import DynamicCache
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines.cuda.steps import CudaSteps
from hf_mlspec.integration import call as decoding
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.delta import KEEP
from hf_mlspec.precision import OWN_BITS
from hf_mlspec.speculation.rounds.chain import CapturedChain
from hf_mlspec.speculation.rounds.graphs import RoundGraphs

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2}
OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
BATCHES = {"one row": [9], "three": [3, 17, 1], "eight": [3, 17, 1, 9, 9, 2, 30, 5], "long": [700, 3]}


def asked(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in prompts(lengths).items()}


@pytest.fixture(scope="module")
def target():
    return tiny(**SHAPE, max_position_embeddings=2048).cuda()


@pytest.fixture(scope="module")
def draft(target):
    return near(tiny(**SHAPE, max_position_embeddings=2048), 0.02).cuda()


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


@pytest.fixture
def launched(monkeypatch):
    """The rows of every replayed graph, in order."""
    rounds, launch = [], RoundGraphs.launch

    def counted(self, program, batch):
        launch(self, program, batch)
        rounds.append(batch)

    monkeypatch.setattr(RoundGraphs, "launch", counted)
    return rounds


def stepwise(monkeypatch, model, inputs, **options):
    with monkeypatch.context() as patch:
        patch.setattr(decoding, "captured", _nothing)
        return model.generate(**inputs, **{**OPTIONS, **options}, assistant_models=[])


class _nothing:
    def __init__(self, *_): ...

    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


def chains(draft) -> dict[str, list]:
    return {"alone": [], "draft": [draft], "mxfp4": ["mxfp4"], "mxfp4, draft": ["mxfp4", draft],
            "mxfp4, early exit": ["mxfp4", "early_exit:1"]}  # fmt: skip


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("chain", chains(None))
def test_greedy_ids_are_those_of_the_target_alone(monkeypatch, launched, target, draft, chain, lengths):
    inputs = asked(lengths)
    alone = stepwise(monkeypatch, target, inputs)
    assert not launched
    out = target.generate(**inputs, **OPTIONS, assistant_models=chains(draft)[chain])
    assert torch.equal(out, alone)
    assert launched
    assert all(level.accepted > 0 for level in hf_mlspec.last_stats(target).levels)


@pytest.mark.parametrize("levels", [["w4a8"], ["w4a8", "w4a4"]], ids=str)
def test_a_packed_target_drafts_for_itself(monkeypatch, launched, levels):
    model, inputs = packed(tiny(**SHAPE), "int4").cuda(), asked([9, 4])
    alone = stepwise(monkeypatch, model, inputs)
    assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_models=levels), alone)
    assert launched


@pytest.mark.parametrize("sampler", [{}, {"top_k": 12, "temperature": 1.5}, {"top_p": 0.7, "top_k": 0},
                                     {"min_p": 0.05, "top_k": 0}, {"typical_p": 0.6, "top_k": 0},
                                     {"epsilon_cutoff": 0.01, "top_k": 0}], ids=str)  # fmt: skip
def test_sampled_ids_are_those_of_the_target_alone_with_the_same_seed(launched, target, draft, sampler):
    inputs, texts = asked([3, 17, 1]), []
    for levels, seed in (([], 5), (["mxfp4", draft], 5), (["mxfp4", draft], 6)):
        torch.manual_seed(seed)
        settings = {**OPTIONS, "do_sample": True, **sampler}
        texts.append(target.generate(**inputs, **settings, assistant_models=levels).tolist())
    assert texts[0] == texts[1] != texts[2]
    assert launched


def test_ends_inside_blocks_and_smaller_buckets(monkeypatch, launched, target, draft):
    inputs = asked([3, 17, 1, 9, 9, 2, 30, 5])
    rows = stepwise(monkeypatch, target, inputs)[:, 30:].tolist()
    ends = sorted({row[place] for row, place in zip(rows, (1, 5, 9, 11, 17, 22), strict=False)})
    settings = {"eos_token_id": ends, "pad_token_id": 0}
    alone = stepwise(monkeypatch, target, inputs, **settings)
    out = target.generate(**inputs, **{**OPTIONS, **settings}, assistant_models=["mxfp4", draft])
    assert torch.equal(out, alone)
    assert launched[0] == 8 > launched[-1]


def test_a_second_call_with_a_cast_builds_nothing(launched):
    model, inputs = tiny(**SHAPE).cuda(), asked([9])
    for number in range(3):
        model.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"])
        assert (hf_mlspec.last_stats(model).capture_seconds > 0) == (number == 0)
    assert launched


def test_a_second_call_captures_nothing_and_clear_frees_all(launched, target, draft):
    inputs = asked([9, 4])
    hf_mlspec.clear(target)
    first = target.generate(**inputs, **OPTIONS, assistant_models=[draft])
    assert 0 < hf_mlspec.last_stats(target).capture_seconds < 5
    again = target.generate(**inputs, **OPTIONS, assistant_models=[draft])
    assert torch.equal(first, again)
    assert hf_mlspec.last_stats(target).capture_seconds == 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    hf_mlspec.clear(target)
    assert torch.cuda.memory_allocated() < before


def test_rows_that_outgrow_their_slots_go_on(monkeypatch, target, draft):
    monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", 16)
    inputs = asked([250, 3])
    alone = stepwise(monkeypatch, target, inputs, max_new_tokens=600)
    hf_mlspec.clear(target)
    settings = {**OPTIONS, "max_new_tokens": 600}
    assert torch.equal(target.generate(**inputs, **settings, assistant_models=["mxfp4", draft]), alone)


def test_a_cache_that_grew_comes_back_whole(monkeypatch, target, draft):
    inputs, settings = asked([250]), {**OPTIONS, "max_new_tokens": 60}
    caches = []
    for first in (4096, 4):
        monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", first)
        hf_mlspec.clear(target)
        caches.append(DynamicCache())
        out = target.generate(**inputs, **settings, assistant_models=["mxfp4", draft], past_key_values=caches[-1])
        assert caches[-1].get_seq_length() == out.shape[1] - 1
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("chain", ["alone", "draft", "mxfp4, draft"])
def test_without_memory_for_more_slots_rows_go_on_step_by_step(monkeypatch, launched, target, draft, chain, caplog):
    monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", 4)
    inputs = asked([250, 3])
    alone = stepwise(monkeypatch, target, inputs, max_new_tokens=120)
    hf_mlspec.clear(target)

    def full(self, batch, slots):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    monkeypatch.setattr(CapturedChain, "grow", full)
    out = target.generate(**inputs, **{**OPTIONS, "max_new_tokens": 120}, assistant_models=chains(draft)[chain])
    assert torch.equal(out, alone)
    assert launched
    assert caplog.text.count("continues step by step: no memory for 512 tokens in each of 2 rows (CUDA out of") == 1
    assert not state_of(target).chains


def test_a_device_that_is_really_full(caplog):
    """Slots for 4096 tokens do not fit beside the model, those that steps take at first do."""
    model = tiny(**SHAPE, max_position_embeddings=8192).cuda()
    inputs = asked([9] * 64)
    settings = {**OPTIONS, "max_new_tokens": 4000, "stopping_criteria": [lambda ids, scores, **_: ids.shape[1] >= 30]}
    expected = model.generate(**inputs, **settings, assistant_models=[])
    hf_mlspec.clear(model)
    gc.collect()
    torch.cuda.empty_cache()
    kv = model.config.num_hidden_layers * 2 * 64 * model.config.num_key_value_heads * 32 * 2 * 4096
    total = torch.cuda.get_device_properties(0).total_memory
    # what is reserved and free would hold slots, too: earlier tests leave some
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 0.9 * kv) / total)
    try:
        out = model.generate(**inputs, **settings, assistant_models=[])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(out, expected)
    assert "rounds run step by step: not enough memory to capture them for 64 rows of 4096 tokens" in caplog.text


def test_calls_on_one_stream_after_the_other(target, draft):
    """A chain is handed from stream to stream with its cache still being copied for the user."""
    prompt = [asked([n]) for n in (9, 30)]
    alone = [target.generate(**one, **OPTIONS, assistant_models=[draft]) for one in prompt]
    torch.cuda.synchronize()
    caches = []
    for turn in range(6):
        with torch.cuda.stream(torch.cuda.Stream()):
            caches.append(DynamicCache())
            out = target.generate(**prompt[turn % 2], **OPTIONS, assistant_models=[draft], past_key_values=caches[-1])
            assert torch.equal(out, alone[turn % 2])
    torch.cuda.synchronize()
    for turn in (2, 3, 4, 5):
        for one, other in zip(caches[turn].layers, caches[turn % 2].layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def test_weights_that_left_the_device_are_freed(target):
    target.generate(**asked([9]), **OPTIONS, assistant_models=["mxfp4"])  # what libraries keep is there
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = tiny(**SHAPE).cuda()
    model.generate(**asked([9]), **OPTIONS, assistant_models=["mxfp4"])
    hf_mlspec.clear(model.cpu())
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 16


def test_side_streams_and_two_threads(target, draft):
    inputs = asked([9])
    expected, got = target.generate(**inputs, **OPTIONS, assistant_models=[draft]), {}

    def call(name):
        with torch.cuda.stream(torch.cuda.Stream()):
            got[name] = target.generate(**inputs, **OPTIONS, assistant_models=[draft]).cpu()

    threads = [threading.Thread(target=call, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[name], expected.cpu()) for name in range(3))


def test_without_memory_rounds_run_step_by_step_and_what_was_taken_is_free(monkeypatch, target, draft, caplog):
    inputs = asked([9])
    expected = target.generate(**inputs, **OPTIONS, assistant_models=[draft])
    hf_mlspec.clear(target)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    def full(self, program, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    monkeypatch.setattr(RoundGraphs, "capture", full)
    assert torch.equal(target.generate(**inputs, **OPTIONS, assistant_models=[draft]), expected)
    said = [record.getMessage() for record in caplog.records if "not enough memory to capture" in record.getMessage()]
    assert len(said) == 1
    assert "Tried to allocate 99 GiB" in said[0]
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert not state_of(target).chains


@pytest.mark.parametrize(("settings", "words"), [
    ({"repetition_penalty": 1.3}, "read the tokens before a position"),
    ({"output_scores": True, "return_dict_in_generate": True}, "scores or logits are returned"),
    ({"do_sample": True, "eta_cutoff": 0.01}, "on the host"),
    ({"assistant_models": ["ngram"]}, "level ngram is neither a prompt lookup nor a model"),
])  # fmt: skip
def test_what_is_not_captured_runs_step_by_step_and_says_why_once(launched, target, draft, settings, words, caplog):
    inputs = asked([9, 4])
    for _ in range(2):
        target.generate(**{**inputs, **OPTIONS, "assistant_models": [draft], **settings})
    said = [record.getMessage() for record in caplog.records if "step by step" in record.getMessage()]
    assert len(said) == 1
    assert words in said[0]
    assert not launched


def test_steps_that_come_again_are_captured(monkeypatch, target, draft):
    captures, capture = [], CudaSteps._capture

    def counted(self, shape, *operands):
        capture(self, shape, *operands)
        captures.append(shape)

    monkeypatch.setattr(CudaSteps, "_capture", counted)
    inputs, slow = asked([9, 4]), {**OPTIONS, "repetition_penalty": 1.3, "max_new_tokens": 300}
    alone = target.generate(**inputs, **slow, assistant_models=[])
    assert captures == [(2, 1, None, OWN_BITS, 0, KEEP)]
    assert torch.equal(target.generate(**inputs, **slow, assistant_models=["mxfp4", draft]), alone)
    assert len(captures) > 2
    monkeypatch.setattr("hf_mlspec.engines.cuda.steps._AFTER", 10**6)
    captures.clear()
    assert torch.equal(target.generate(**inputs, **slow, assistant_models=[]), alone)
    assert torch.equal(target.generate(**inputs, **slow, assistant_models=["mxfp4", draft]), alone)
    assert not captures


def test_nan_weights_are_named(target):
    inputs, broken = asked([9]), near(tiny(**SHAPE), 0.02).cuda()
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"the logits of level \w+ are NaN"):
        target.generate(**inputs, **OPTIONS, assistant_models=[broken])
    with pytest.raises(FloatingPointError, match="the logits of the target are NaN"):
        broken.generate(**inputs, **OPTIONS, assistant_models=[target])
    assert target.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"]).shape[1] == 49


def test_a_cache_comes_back_and_is_continued(target, draft):
    inputs = asked([9])
    whole = target.generate(**inputs, **OPTIONS, assistant_models=[draft])
    cache = DynamicCache()
    half = target.generate(**inputs, **{**OPTIONS, "max_new_tokens": 20}, assistant_models=[draft],
                           past_key_values=cache)  # fmt: skip
    assert cache.get_seq_length() == half.shape[1] - 1
    rest = target.generate(half, attention_mask=torch.ones_like(half), **{**OPTIONS, "max_new_tokens": 20},
                           assistant_models=["mxfp4"], past_key_values=cache)  # fmt: skip
    assert torch.equal(rest, whole)


def test_a_stream_of_requests_runs_on_the_device(monkeypatch, target, draft):
    inputs = asked([9])
    alone = stepwise(monkeypatch, target, inputs)[0, 9:].tolist()
    prompt = inputs["input_ids"][0].tolist()
    done = list(hf_mlspec.generate_stream(target, [prompt] * 3, assistant_models=[draft], max_batch=2, **OPTIONS))
    assert [one.new_tokens for one in done] == [alone] * 3
