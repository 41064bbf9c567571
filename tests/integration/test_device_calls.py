"""What do calls of generate share on a device, what runs step by step there, and what happens when something fails?

On the CPU, as test_device_chain.py.
"""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from device_path import OPTIONS, draft, rounds, stepwise, target
from models import letters, near, prompts, tiny
from transformers import DynamicCache

import hf_mlspec
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.evaluation import record_trace
from hf_mlspec.integration.levels import resolve as levels_module
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds.chain import CapturedChain, bucket_of
from hf_mlspec.speculation.rounds.graphs import RoundGraphs

__all__ = ["draft", "rounds", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]

ONE, TWO = prompts([9]), prompts([9, 4])


@pytest.fixture
def made(monkeypatch):
    """(rows, slots) of every chain that was made."""
    shapes, allocate = [], CapturedChain._allocate

    def counted(self):
        shapes.append((self.batch, self.slots))
        allocate(self)

    monkeypatch.setattr(CapturedChain, "_allocate", counted)
    return shapes


def said(caplog, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_bucket_sizes():
    assert [bucket_of(n) for n in (1, 2, 3, 5, 8, 9, 33, 64, 65, 200)] == [1, 2, 4, 8, 8, 16, 64, 64, 128, 256]


def test_a_chain_is_kept_for_the_next_call_that_it_fits(target, draft, made):
    for inputs in (TWO, ONE, TWO):
        target.generate(**inputs, **OPTIONS, assistant_models=[draft])
    assert made == [(2, 256)]
    target.generate(**prompts([9, 4, 2]), **OPTIONS, assistant_models=[draft])
    target.generate(**ONE, **{**OPTIONS, "max_new_tokens": 300}, assistant_models=[draft])
    assert made[1:] == [(4, 256), (4, 512)]
    target.generate(**ONE, **OPTIONS, assistant_models=[])
    target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    assert made[3:] == [(1, 256)]
    assert len(state_of(target).chains) == 2
    target.generate(**ONE, **OPTIONS, assistant_models=[draft], speculation_config={"num_draft_tokens": 2})
    assert len(state_of(target).chains) == 2  # the one that was used last stays
    hf_mlspec.clear(target)
    assert not state_of(target).chains


def test_changed_weights_make_a_chain_anew(target, draft, made):
    first = target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight.mul_(-1)
    again = target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    assert len(made) == 2
    assert not torch.equal(first, again)
    assert torch.equal(again, stepwise(target, ONE))
    assert len(state_of(target).chains) == 1


def test_kept_chains_go_with_their_levels(target):
    draft = near(target, 0.05)
    target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    assert state_of(target).chains
    del draft
    gc.collect()
    assert not state_of(target).chains


@pytest.mark.parametrize("chain", ["alone", "draft", "mxfp4, draft"])
def test_rows_that_outgrow_their_slots_go_on(target, draft, made, monkeypatch, chain):
    monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", 4)
    inputs, more = prompts([250, 3, 240]), {"max_new_tokens": 200}
    levels = {"alone": [], "draft": [draft], "mxfp4, draft": ["mxfp4", draft]}[chain]
    alone = stepwise(target, inputs, **more)
    assert torch.equal(target.generate(**inputs, **{**OPTIONS, **more}, assistant_models=levels), alone)
    assert made == [(4, 256), (4, 512)]


class Nested:
    """A streamer that generates with the same chain."""

    def __init__(self, call):
        self.call, self.texts = call, []

    def put(self, tokens):
        if len(self.texts) < 2:
            self.texts.append(self.call().tolist())

    def end(self): ...


def test_a_call_inside_a_call_runs_step_by_step(target, draft, caplog):
    expected = target.generate(**ONE, **OPTIONS, assistant_models=[draft])

    def call():
        return target.generate(**ONE, **OPTIONS, assistant_models=[draft])

    streamer = Nested(call)
    out = target.generate(**ONE, **OPTIONS, assistant_models=[draft], streamer=streamer)
    assert torch.equal(out, expected)
    assert streamer.texts == [expected.tolist()] * 2
    assert len(said(caplog, "inside a call of the same chain")) == 1


def test_threads_take_turns(target, draft):
    inputs = [prompts([9]), prompts([4]), prompts([17])]
    expected = [target.generate(**one, **OPTIONS, assistant_models=["mxfp4", draft]) for one in inputs]
    got = {}

    def call(number):
        for _ in range(3):
            got[number] = target.generate(**inputs[number], **OPTIONS, assistant_models=["mxfp4", draft])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[number], expected[number]) for number in range(3))


def test_without_memory_rounds_run_step_by_step(target, draft, caplog, monkeypatch, rounds):
    def full(self, program, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")

    monkeypatch.setattr(RoundGraphs, "capture", full)
    for _ in range(2):
        out = target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    assert torch.equal(out, stepwise(target, ONE))
    assert len(said(caplog, "not enough memory to capture them for 1 rows of 256 tokens")) == 1
    assert not state_of(target).chains
    assert not rounds


def test_without_memory_for_fewer_rows_the_larger_rounds_go_on(target, draft, caplog, monkeypatch, rounds):
    inputs = prompts([3, 17, 1, 9])
    rows = stepwise(target, inputs)[:, 17:].tolist()
    asked = {"eos_token_id": sorted({rows[0][1], rows[1][3], rows[2][5]}), "pad_token_id": 0}
    alone = stepwise(target, inputs, **asked)

    def full(self, program, batch):
        if batch < 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(RoundGraphs, "capture", full)
    config = {"num_draft_tokens": 4}
    out = target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=[draft], speculation_config=config)
    assert torch.equal(out, alone)
    assert set(rounds) == {4}
    assert said(caplog, "graphs of more rows are used")


def test_a_call_that_fails_leaves_nothing_behind(target, draft, monkeypatch):
    expected = target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    wait = RoundGraphs.wait

    def fails(self):
        wait(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RoundGraphs, "wait", fails)
        with pytest.raises(KeyboardInterrupt):
            target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    assert torch.equal(target.generate(**ONE, **OPTIONS, assistant_models=[draft]), expected)


@pytest.mark.parametrize("fails", [False, True])
def test_a_chain_is_handed_on_with_nothing_under_way(target, draft, monkeypatch, fails):
    """Another call may come on another stream, and memory that is freed may be taken on one."""
    finished, finish = [], CapturedChain.finish

    def counted(self):
        finish(self)
        finished.append((self.lock.locked(), self.graphs.batch))

    class Streamer:
        def put(self, tokens):
            assert not fails or tokens.numel() > 4, "stop"

        def end(self): ...

    monkeypatch.setattr(CapturedChain, "finish", counted)
    for _ in range(2):
        finished.clear()
        if fails:
            with pytest.raises(AssertionError, match="stop"):
                target.generate(**ONE, **OPTIONS, assistant_models=[draft], streamer=Streamer())
        else:
            target.generate(**ONE, **OPTIONS, assistant_models=[draft], streamer=Streamer())
        assert finished[-1] == (True, 0)
    assert len(state_of(target).chains) == (not fails)


@pytest.mark.parametrize("levels", [["mxfp4"], ["early_exit:1"], ["mxfp4", "early_exit:1"]], ids=str)
def test_views_of_the_target_are_built_once(made, monkeypatch, levels):
    """Although the target's decoder moves the weights that they are views of."""
    target = tiny(seed=2, dtype=torch.bfloat16)
    built, keep = [], levels_module._keep_view

    def counted(state, key, target, config, build):
        return keep(state, key, target, config, lambda: built.append(key) or build())

    monkeypatch.setattr(levels_module, "_keep_view", counted)
    for _ in range(3):
        target.generate(**ONE, **OPTIONS, assistant_models=levels, speculation_config={"engine": "cuda"})
    assert len(built) == len(levels)
    assert len(made) == 1


def test_what_a_call_captures_is_counted_once(target, draft, monkeypatch):
    def capture(self, program, batch):
        self.capture_seconds += 0.0 if (program, batch) in self._graphs else 0.25
        self._graphs[program, batch] = None

    monkeypatch.setattr(RoundGraphs, "capture", capture)
    for inputs, seconds in ((TWO, 0.5), (TWO, 0), (ONE, 0)):  # of two rows, then of the one that ends last
        target.generate(**inputs, **OPTIONS, assistant_models=[draft], speculation_config={"num_draft_tokens": 4})
        assert hf_mlspec.last_stats(target).capture_seconds == seconds


def test_clear_frees_the_weights_that_a_model_left(target, draft):
    target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    weights = weakref.ref(decoder_of(target, "cuda")._layers[0].qkv.weight)
    hf_mlspec.clear(target)
    assert weights() is not None  # they are the model's
    target.float()
    hf_mlspec.clear(target)
    assert weights() is None


REFUSED = {
    "processors": ({"repetition_penalty": 1.3}, "logits processors read the tokens before a position"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "scores or logits are returned"),
    "eta": ({"do_sample": True, "eta_cutoff": 0.01}, "eta_cutoff looks at its probabilities on the host"),
    "long drafts": ({"speculation_config": {"num_draft_tokens": 256}}, "a round has 257 passes, at most 256 are"),
    "n-grams": ({"assistant_models": ["ngram"]}, "level ngram is neither a prompt lookup nor a model"),
    "draft, n-grams": ({"assistant_models": ["mxfp4", "ngram"]}, "level ngram is neither a prompt lookup nor a model"),
}


@pytest.mark.parametrize(("asked", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_captured_runs_step_by_step_and_says_why_once(target, draft, asked, words, caplog, rounds):
    for _ in range(2):
        target.generate(**{**TWO, **OPTIONS, "assistant_models": [draft], **asked})
    (message,) = said(caplog, "step by step")
    assert words in message
    assert "LlamaForCausalLM" in message
    assert not rounds


def test_a_draft_that_sees_fewer_tokens_than_rows_may_have(target, caplog, rounds):
    short = tiny(seed=2, dtype=torch.bfloat16, max_position_embeddings=32)
    out = target.generate(**ONE, **OPTIONS, assistant_models=[short])
    assert torch.equal(out, stepwise(target, ONE))
    assert said(caplog, "sees 32 tokens, rows may have 49")
    assert not rounds


LOOKUPS = {"alone": [hf_mlspec.PromptLookup(5, 1)], "below another": ["mxfp4", hf_mlspec.PromptLookup(3, 2)]}


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("levels", LOOKUPS.values(), ids=LOOKUPS)
def test_lookups_are_captured_and_find_what_they_find_on_the_host(target, rounds, levels, sampling):
    asked = {**OPTIONS, **sampling, "max_new_tokens": 120, "speculation_config": {"num_draft_tokens": 4}}
    for inputs in (ONE, TWO):
        torch.manual_seed(3)
        expected = stepwise(target, inputs, levels, **asked)
        on_host = hf_mlspec.last_stats(target).levels[-1]
        assert not rounds
        torch.manual_seed(3)
        assert torch.equal(target.generate(**inputs, **asked, assistant_models=levels), expected)
        found = hf_mlspec.last_stats(target).levels[-1]
        assert rounds
        rounds.clear()
        assert found.drafted > 0
        assert found.accepted > 0 or sampling
        if levels is LOOKUPS["alone"]:  # in the middle of a chain rounds of the host are shorter near a row's end
            assert (found.drafted, found.accepted) == (on_host.drafted, on_host.accepted)


@pytest.mark.parametrize("levels", [["prompt_lookup"], ["mxfp4", "prompt_lookup"], ["mxfp4", "early_exit:1"]], ids=str)
def test_step_by_step_chains_return_what_the_target_returns(target, levels):
    assert torch.equal(stepwise(target, TWO, levels), stepwise(target, TWO))
    own = {"speculation_config": {"shared_cache": False}}
    assert torch.equal(stepwise(target, TWO, levels, **own), stepwise(target, TWO))


def test_nan_weights_are_named(target, draft):
    with torch.no_grad():
        draft.lm_head.weight.fill_(float("nan"))
    for levels, name in (([draft], "level LlamaForCausalLM"), (["mxfp4", draft], "level LlamaForCausalLM")):
        with pytest.raises(FloatingPointError, match=f"the logits of {name} are NaN"):
            target.generate(**TWO, **OPTIONS, assistant_models=levels)
    with pytest.raises(FloatingPointError, match="the logits of the target are NaN"):
        draft.generate(**TWO, **OPTIONS, assistant_models=[target])
    assert torch.equal(target.generate(**TWO, **OPTIONS, assistant_models=["mxfp4"]), stepwise(target, TWO))


def test_a_cache_comes_back_and_is_continued(target, draft):
    whole = target.generate(**ONE, **OPTIONS, assistant_models=[draft])
    cache, short = DynamicCache(), {**OPTIONS, "max_new_tokens": 20}
    half = target.generate(**ONE, **short, assistant_models=[draft], past_key_values=cache)
    assert cache.get_seq_length() == half.shape[1] - 1
    assert not any(layer.keys.is_inference() for layer in cache.layers)
    rest = target.generate(
        half, attention_mask=torch.ones_like(half), **short, assistant_models=["mxfp4"], past_key_values=cache
    )
    assert torch.equal(rest, whole)


def test_a_stream_of_requests(target, draft):
    alone = stepwise(target, ONE)[0, 9:].tolist()
    prompt = ONE["input_ids"][0].tolist()
    done = list(hf_mlspec.generate_stream(target, [prompt] * 3, assistant_models=[draft], max_batch=2, **OPTIONS))
    assert [one.new_tokens for one in done] == [alone] * 3


def test_a_prepared_model_without_levels_decodes_in_rounds(target, rounds):
    out = target.generate(**TWO, **OPTIONS)
    assert rounds == [2] * 5
    assert torch.equal(out, stepwise(target, TWO))


@pytest.mark.parametrize("levels", [[], ["draft"], ["mxfp4", "draft"]], ids=str)
def test_a_trace_of_captured_rounds_tells_what_they_settled(target, draft, levels, rounds):
    levels = [draft if level == "draft" else level for level in levels]
    ids = [ONE["input_ids"][0].tolist(), prompts([4])["input_ids"][0].tolist()]
    trace = record_trace(target, letters(), ids, levels, max_new_tokens=24, batch_size=2)
    assert rounds
    for row in trace.rows:
        assert sum(round.settled for round in row.rounds) >= row.new_tokens == 24
        if len(levels) == 2:
            assert all(round.drafted == sum(one.settled for one in round.inner) for round in row.rounds)
