"""Is a model as usable after a call that was interrupted in the middle of its prompt as before, on every engine?"""

from __future__ import annotations

import pytest
import torch
from models import near, prompts, tiny
from transformers import DynamicCache

import hf_mlspec
from hf_mlspec.engines.cpu import engine as cpu_engine
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.modules.cache import _Lane
from hf_mlspec.integration.returned_cache import ReturnedCache
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
INPUTS = prompts([1400, 900])
# Where a prompt is read, several times over: pieces of compiled calls, steps, layers.
PLACES = {"cpu": (CpuEngine, "_count"), "cuda": (CudaDecoder, "forward"), "modules": (_Lane, "update")}
LEVELS = ["alone", "draft", "middle, draft", "early_exit", "prompt_lookup"]
compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
ENGINES = [pytest.param(name, marks=compiled) if name != "modules" else name for name in PLACES]


def model_for(engine: str):
    dtype = torch.float64 if engine == "modules" else torch.bfloat16
    model = tiny(seed=2, dtype=dtype, max_position_embeddings=2048)
    return hf_mlspec.prepare(model, engine="cuda") if engine == "cuda" else model


def chain_of(name: str, model) -> list:
    draft = near(model, 0.05)
    middle = "early_exit:1" if model.dtype == torch.float64 else "mxfp4"  # which no float64 is cast to
    return {"alone": [], "draft": [draft], "middle, draft": [middle, draft], "early_exit": ["early_exit:1"],
            "prompt_lookup": ["prompt_lookup"]}[name]  # fmt: skip


@pytest.fixture
def interrupted(monkeypatch):
    """A function that interrupts what it is given when the prompt has been worked at so many times."""

    def stops(engine: str, times: int, error: BaseException, call) -> None:
        place, name = PLACES[engine]
        own, seen = getattr(place, name), []

        def counted(self, *args, **options):
            seen.append(1)
            if len(seen) == times:
                raise error
            return own(self, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(place, name, counted)
            with pytest.raises(type(error)) as caught:
                call()
        assert caught.value is error

    monkeypatch.setattr(cpu_engine, "PIECE", 512)
    return stops


@pytest.mark.parametrize("chain", LEVELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_next_call_is_exact(engine, chain, interrupted):
    model = model_for(engine)
    levels = chain_of(chain, model)

    def call(**options):
        return model.generate(**INPUTS, **OPTIONS, **options, assistant_models=levels)

    expected = call()
    for times, error in ((1, KeyboardInterrupt()), (2, RuntimeError("a kernel failed")), (3, KeyboardInterrupt())):
        interrupted(engine, times, error, call)
        assert not state_of(model).chains
        assert torch.equal(call(), expected)
    hf_mlspec.clear(model)
    interrupted(engine, 2, KeyboardInterrupt(), call)  # the first call of all
    assert torch.equal(call(), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_that_was_given_can_be_given_again(engine, interrupted):
    model = model_for(engine)
    ids, cache = prompts([1400])["input_ids"], DynamicCache()
    begun = {"input_ids": ids[:, :1300], "attention_mask": torch.ones_like(ids[:, :1300])}
    ids[:, 1300] = model.generate(**begun, **OPTIONS, assistant_models=[])[:, 1300]
    model.generate(**begun, **OPTIONS | {"max_new_tokens": 2}, assistant_models=[], past_key_values=cache)
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **OPTIONS}
    expected = model.generate(**whole, assistant_models=[])

    def call():
        return model.generate(**whole, past_key_values=cache, assistant_models=["prompt_lookup"])

    interrupted(engine, 1, KeyboardInterrupt(), call)
    assert cache.get_seq_length() == 1301
    assert torch.equal(call(), expected)


def test_a_cache_that_was_given_is_as_before_where_filling_it_fails(monkeypatch):
    model, inputs, cache = model_for("modules"), prompts([40]), DynamicCache()
    out = model.generate(**inputs, **OPTIONS, assistant_models=[], past_key_values=cache)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    whole = {"input_ids": out, "attention_mask": torch.ones_like(out), **OPTIONS, "past_key_values": cache}
    own = ReturnedCache._columns

    def full(self, layer, which, count):
        if layer:
            raise torch.OutOfMemoryError("no room")
        return own(self, layer, which, count)

    with monkeypatch.context() as patch:
        patch.setattr(ReturnedCache, "_columns", full)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            model.generate(**whole, assistant_models=[])
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    expected = model.generate(**whole | {"past_key_values": None}, assistant_models=[])
    assert torch.equal(model.generate(**whole, assistant_models=[]), expected)
    empty = DynamicCache()
    with monkeypatch.context() as patch:
        patch.setattr(ReturnedCache, "_columns", full)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            model.generate(**inputs, **OPTIONS, assistant_models=[], past_key_values=empty)
    assert empty.get_seq_length() == 0
    again = model.generate(**inputs, **OPTIONS, assistant_models=[], past_key_values=empty)
    assert torch.equal(again, out)


@pytest.mark.parametrize("engine", ENGINES)
def test_streams_and_scores_after_an_interrupt(engine, interrupted):
    model = model_for(engine)
    rows = [INPUTS["input_ids"][0].tolist(), INPUTS["input_ids"][1, 500:].tolist()]

    def streamed():
        done = hf_mlspec.generate_stream(model, rows, max_batch=2, assistant_models=["early_exit:1"], **OPTIONS)
        return sorted(one.sequence for one in done)

    def scored():
        return [one.logprobs for one in token_logprobs(model, rows)]

    tokens, scores = streamed(), scored()
    for times in (1, 2):
        interrupted(engine, times, KeyboardInterrupt(), streamed)
        assert streamed() == tokens
        interrupted(engine, times, KeyboardInterrupt(), scored)
        assert all(map(torch.equal, scored(), scores))


@compiled
@pytest.mark.parametrize(
    ("lengths", "pieces"), [([1400, 900], [512, 100]), ([40, 1, 60], [7, 1])], ids=["long", "short"]
)
@pytest.mark.parametrize("chain", LEVELS)
def test_a_prompt_in_pieces_is_the_prompt_in_one(chain, lengths, pieces, monkeypatch):
    """Bit for bit, in the cache that comes back too."""
    model, calls, count = model_for("cpu"), [], CpuEngine._count
    levels = chain_of(chain, model)
    monkeypatch.setattr(CpuEngine, "_count", lambda *args: (calls.append(1), count(*args)))

    def call(piece: int) -> tuple:
        monkeypatch.setattr(cpu_engine, "PIECE", piece)
        calls.clear()
        cache = DynamicCache()
        out = model.generate(**prompts(lengths), **OPTIONS, assistant_models=levels, past_key_values=cache)
        return out, [states for layer in cache.layers for states in (layer.keys, layer.values)], len(calls)

    tokens, states, at_least = call(10**6)
    for piece in pieces:
        out, found, seen = call(piece)
        assert torch.equal(out, tokens)
        assert all(map(torch.equal, found, states))
        assert seen >= at_least + (sum(lengths) - len(lengths)) // piece
