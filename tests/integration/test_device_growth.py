"""What happens on a device when rows outgrow the slots they started with, and there is memory for more, or none?

On the CPU, as test_device_chain.py.
"""

from __future__ import annotations

import pytest
import torch
from device_path import OPTIONS, on_cuda, rounds, stepwise, target
from models import PAD, near, prompts, tiny
from transformers import DynamicCache

import hf_mlspec
from hf_mlspec.engines import memory
from hf_mlspec.engines.rows import DecoderCache
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds.chain import CapturedChain
from hf_mlspec.speculation.rounds.graphs import RoundGraphs

__all__ = ["rounds", "target"]
pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]
CHAINS = ["alone", "draft", "mxfp4, draft"]


@pytest.fixture
def levels(target):
    draft = near(target, 0.05)
    return {"alone": [], "draft": [draft], "mxfp4, draft": ["mxfp4", draft]}


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", 4)


def full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")


@pytest.mark.parametrize("chain", CHAINS)
def test_a_cache_that_grew_comes_back_whole(target, levels, monkeypatch, chain):
    asked = {**prompts([250]), **OPTIONS, "max_new_tokens": 60, "assistant_models": levels[chain]}
    once, grown = DynamicCache(), DynamicCache()
    ids = target.generate(**asked, past_key_values=once)
    hf_mlspec.clear(target)
    monkeypatch.setattr("hf_mlspec.integration.capture._FIRST_NEW_TOKENS", 4)
    assert torch.equal(target.generate(**asked, past_key_values=grown), ids)
    assert once.get_seq_length() == grown.get_seq_length() == ids.shape[1] - 1
    for expected, layer in zip(once.layers, grown.layers, strict=True):
        assert torch.equal(layer.keys, expected.keys)
        assert torch.equal(layer.values, expected.values)


@pytest.mark.parametrize("where", [(CapturedChain, "grow"), (RoundGraphs, "capture")], ids=["cache", "graph"])
@pytest.mark.parametrize("chain", CHAINS)
def test_without_memory_for_more_slots_rows_go_on_step_by_step(
    target, levels, few_slots, monkeypatch, caplog, rounds, chain, where
):
    def short_row_is_done(ids, scores, **_):
        """The first row, which is padded there, ends before the others need more slots."""
        return (ids[:, 100] == PAD) & (ids.shape[1] >= 253)

    inputs, asked = prompts([3, 250, 240]), {"max_new_tokens": 200, "stopping_criteria": [short_row_is_done]}
    end = stepwise(target, inputs, **asked)[2, 250 + 150].item()
    asked |= {"eos_token_id": end, "pad_token_id": PAD}
    alone = stepwise(target, inputs, **asked)
    assert (alone[0, 253:] == PAD).all()
    place, name = where
    original = getattr(place, name)

    def small(self, *sizes):
        return full() if place is CapturedChain or self.state.tokens.shape[1] > 256 else original(self, *sizes)

    monkeypatch.setattr(place, name, small)
    out = target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=levels[chain])
    assert torch.equal(out, alone)
    assert rounds
    message = "ForCausalLM continues step by step: no memory for 512 tokens in each of 4 rows (CUDA out of memory."
    assert caplog.text.count(message) == 1
    assert not state_of(target).chains
    stats = hf_mlspec.last_stats(target)
    assert stats.new_tokens == 3 + sum(row.tolist().index(end) + 1 if end in row else 200 for row in out[1:, 250:])
    assert stats.tokens_per_target_pass >= 1
    assert all(0 < level.accepted <= level.drafted for level in stats.levels)
    assert stats.prefill_tokens < stats.new_tokens


def test_the_cache_of_a_call_that_went_on_step_by_step_comes_back(target, levels, few_slots, monkeypatch):
    monkeypatch.setattr(CapturedChain, "grow", full)
    cache, inputs = DynamicCache(), prompts([250])
    out = target.generate(**inputs, **{**OPTIONS, "max_new_tokens": 60}, assistant_models=levels["draft"],
                          past_key_values=cache)  # fmt: skip
    assert cache.get_seq_length() == out.shape[1] - 1
    rest = {"attention_mask": torch.ones_like(out), **OPTIONS, "assistant_models": []}
    again = target.generate(out, **rest, past_key_values=cache)
    assert torch.equal(again, target.generate(out, **rest))


@pytest.mark.parametrize(
    ("rows_free", "sizes"),
    [(10**9, [512, 1024, 1280]), (600, [512, 1024, 1280]), (300, [512, 768, 1024, 1280]), (0, [512, 768, 1024, 1280]),
     (None, [512, 1024, 1280])],
)  # fmt: skip
def test_slots_double_where_memory_is_free_for_that(few_slots, monkeypatch, rows_free, sizes):
    target = on_cuda(tiny(seed=2, dtype=torch.bfloat16, max_position_embeddings=2048))
    inputs, asked, grown = prompts([250]), {"max_new_tokens": 1000}, []
    alone = stepwise(target, inputs, **asked)
    grow = CapturedChain.grow

    def counted(self, batch, slots):
        grown.append(slots)
        grow(self, batch, slots)

    monkeypatch.setattr(CapturedChain, "grow", counted)
    monkeypatch.setattr("hf_mlspec.speculation.rounds.chain.WORTH_ASKING", 1)
    slot = 2 * 2 * 2 * 8 * 2  # layers, keys and values, heads, dim, bytes
    free = None if rows_free is None else rows_free * slot
    monkeypatch.setattr("hf_mlspec.speculation.rounds.chain.available", lambda device: free)
    assert torch.equal(target.generate(**inputs, **{**OPTIONS, **asked}, assistant_models=[]), alone)
    assert grown == sizes


def test_other_errors_of_growing_are_the_callers(target, levels, few_slots, monkeypatch):
    def broken(self, *_):
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(CapturedChain, "grow", broken)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            target.generate(**prompts([250]), **OPTIONS, assistant_models=levels["draft"])
    assert not state_of(target).chains


def test_a_chain_for_many_rows_and_one_for_many_tokens_are_not_made_one():
    target = on_cuda(tiny(seed=2, dtype=torch.bfloat16, max_position_embeddings=2048))
    for lengths in ([3] * 16, [700], [3] * 2):
        target.generate(**prompts(lengths), **OPTIONS, assistant_models=[])
        (chain,) = state_of(target).chains
        assert chain.batch * chain.slots <= 2 * 16 * 256


def test_a_step_by_step_cache_grows_by_less_where_memory_is_short(monkeypatch):
    cache, sizes = DecoderCache(torch.zeros(1, 2, 2, 1, 1024, 4), 2), []
    empty = memory._empty

    def short(kv, batch, slots):
        sizes.append(slots)
        return full() if slots > 1280 else empty(kv, batch, slots)

    monkeypatch.setattr(memory, "_empty", short)
    cache.reserve(1100)
    assert cache.kv.shape[4] == 1280
    assert sizes == [1536, 1280]
    with pytest.raises(torch.OutOfMemoryError, match=r"no memory for 1536 tokens in each of 2 rows .* 1280 so far"):
        cache.reserve(1300)
