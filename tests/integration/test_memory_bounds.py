"""Is a call that memory or positions cannot hold refused before anything of it is allocated, and no other?"""

from __future__ import annotations

import pytest
import torch
from models import near, prompts, tiny

import hf_mlspec
from hf_mlspec.engines import memory, rows
from hf_mlspec.engines.modules.cache import RaggedCache
from hf_mlspec.engines.rows import DecoderCache
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.rounds.chain import CapturedChain

OPTIONS = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PAIR = prompts([700, 4])
# Two rows of 700 tokens and 8 new ones, up to the next multiple of 256 slots; 2 layers, keys and values, 2 heads of 8.
ROW = 768 * 2 * 2 * 2 * 8
SIZES = {"cpu": 2 * ROW * 2, "cuda": 2 * ROW * 2, "modules": 2 * ROW * 8}
ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the kernels are not built"))
    if name != "modules"
    else name
    for name in SIZES
]
REMEDY = "shorten the prompts, pass fewer rows at a time, leave out levels .*, or free what else is there"


def model_for(engine: str):
    """A target that this engine runs: 2 bytes an element on the decoders, 8 on the modules."""
    dtype = torch.float64 if engine == "modules" else torch.bfloat16
    model = tiny(seed=2, dtype=dtype, max_position_embeddings=4096)
    return hf_mlspec.prepare(model, engine="cuda") if engine == "cuda" else model


@pytest.fixture
def free(monkeypatch):
    """A function that says how many bytes are free from now on, for calls of any size."""

    def says(count: int | None) -> None:
        monkeypatch.setattr(memory, "available", lambda device: count)

    monkeypatch.setattr(rows, "WORTH_ASKING", 1)
    return says


@pytest.fixture
def allocated(monkeypatch):
    """What caches were made, by the class."""
    made = []
    for place, name in ((DecoderCache, "new"), (CapturedChain, "__init__"), (RaggedCache, "__init__")):
        own = getattr(place, name)

        def counted(*args, own=own, place=place, **options):
            made.append(place.__name__)
            return own(*args, **options)

        monkeypatch.setattr(place, name, counted)
    return made


@pytest.mark.parametrize("engine", ENGINES)
def test_prompts_for_which_there_is_no_memory(engine, free, allocated):
    model, size = model_for(engine), SIZES[engine]
    expected = model.generate(**PAIR, **OPTIONS, assistant_models=[])
    hf_mlspec.clear(model)
    allocated.clear()
    free(size - 1)
    words = rf"a cache of 708 tokens for each of 2 rows needs 0.00 GiB .* and 0.00 GiB are free on cpu: {REMEDY}"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        model.generate(**PAIR, **OPTIONS, assistant_models=[])
    assert allocated == []
    free(size)
    assert torch.equal(model.generate(**PAIR, **OPTIONS, assistant_models=[]), expected)
    assert allocated
    free(None)
    assert torch.equal(model.generate(**PAIR, **OPTIONS, assistant_models=[]), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_levels_with_caches_of_their_own_count_and_others_do_not(engine, free):
    model, size = model_for(engine), SIZES[engine]
    for chain, caches in (([near(model)], 2), (["early_exit:1"], 1), (["prompt_lookup"], 1), (["ngram"], 1)):
        hf_mlspec.clear(model)
        free(caches * size - 1)
        with pytest.raises(torch.OutOfMemoryError, match="708 tokens for each of 2 rows"):
            model.generate(**PAIR, **OPTIONS, assistant_models=chain)
        free(caches * size)
        model.generate(**PAIR, **OPTIONS, assistant_models=chain)
    short = tiny(seed=3, dtype=model.dtype, max_position_embeddings=64)  # it drafts from the last tokens of a row
    hf_mlspec.clear(model)
    free(size + size // 3 - 1)
    with pytest.raises(torch.OutOfMemoryError, match="708 tokens for each of 2 rows"):
        model.generate(**PAIR, **OPTIONS, assistant_models=[short])
    free(size + size // 3)
    model.generate(**PAIR, **OPTIONS, assistant_models=[short])


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_memory_that_a_kept_chain_holds_is_free_for_the_next_call(free):
    model = model_for("cuda")
    model.generate(**PAIR, **OPTIONS, assistant_models=[])
    (chain,) = state_of(model).chains
    assert chain.cache_bytes == SIZES["cuda"]
    free(0)
    model.generate(**PAIR, **OPTIONS, assistant_models=[])
    assert state_of(model).chains == [chain]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("nothing_said_yet")
def test_rows_that_may_outgrow_memory_begin_with_one_warning(engine, free, caplog):
    model, size = model_for(engine), SIZES[engine]
    call = {**OPTIONS, **prompts([700]), "max_new_tokens": 3000, "eos_token_id": list(range(64))}
    first, most = size // 2 * 1280 // 768, size // 2 * 3840 // 768  # 512 new tokens are expected at first

    def said() -> list[str]:
        model.generate(**call, assistant_models=[])
        state_of(model).chains.clear()  # what they hold is free, too
        return [one.getMessage() for one in caplog.records if "GiB" in one.getMessage()]

    free(most)
    assert said() == []
    free(most - 1)
    (message,) = said()
    assert message.startswith("LlamaForCausalLM: rows of up to 3700 tokens, 1 at a time, may need 0.00 GiB more for")
    free(first)
    assert said() == [message]
    free(first - 1)
    with pytest.raises(torch.OutOfMemoryError, match="a cache of 1212 tokens for each of 1 rows"):
        said()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_for_which_there_is_no_memory_ends_alone(engine, free):
    model = model_for(engine)
    short, long = [5, 6, 7], prompts([3000])["input_ids"][0].tolist()
    expected = next(hf_mlspec.generate_stream(model, [short], **OPTIONS)).new_tokens
    free(2 * SIZES[engine])
    done = list(hf_mlspec.generate_stream(model, [short, long, short], max_batch=2, **OPTIONS))
    assert sorted(one.finish_reason for one in done) == ["error", "length", "length"]
    failed = next(one for one in done if one.finish_reason == "error")
    assert isinstance(failed.error, torch.OutOfMemoryError)
    assert "a cache of 3001 tokens for each of 2 rows needs" in str(failed.error)
    assert "GiB more for keys and values" in str(failed.error)  # what the stream's caches hold is not counted
    assert [one.new_tokens for one in done if one is not failed] == [expected, expected]


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_to_be_scored_for_which_there_is_no_memory(engine, free, allocated):
    model, size = model_for(engine), SIZES[engine]
    texts = prompts([700, 700])["input_ids"].tolist()
    free(size - 1)
    with pytest.raises(torch.OutOfMemoryError, match="700 tokens for each of 2 rows"):
        token_logprobs(model, texts)
    assert allocated == []
    free(size)
    assert len(token_logprobs(model, texts)) == 2


MASKED = {"input_ids": PAIR["input_ids"], "attention_mask": PAIR["attention_mask"] * torch.tensor([[1], [0]])}
NOTHING = {"input_ids": PAIR["input_ids"], "attention_mask": torch.zeros_like(PAIR["input_ids"])}
LONG = {"input_ids": torch.full((1, 4097), 5), "attention_mask": torch.ones(1, 4097, dtype=torch.long)}
BAD = {
    "a masked row": (MASKED, "prompt 1 of the batch has no token: its attention_mask is all 0"),
    "masked rows": (NOTHING, "prompt 0 of the batch has no token: its attention_mask is all 0"),
    "positions": (LONG, "4097 prompt tokens and up to 8 new ones exceed the 4096 positions .*: shorten the prompt"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_no_model_reads(engine, name, allocated):
    model, (inputs, words) = model_for(engine), BAD[name]
    for levels in ([], [near(model)]):
        with pytest.raises(ValueError, match=words):
            model.generate(**inputs, **OPTIONS, assistant_models=levels, speculation_config={"engine": engine})
    rows = [
        hf_mlspec.Request(ids.tolist(), attention_mask=mask.tolist())
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    done = list(hf_mlspec.generate_stream(model, rows[-1:], **OPTIONS))
    assert [one.finish_reason for one in done] == ["error"]
    assert isinstance(done[0].error, ValueError)
    assert "its attention_mask is all 0" in str(done[0].error) or "4096 positions" in str(done[0].error)
    assert [one for one in allocated if one != "RaggedCache"] == ["DecoderCache"] * (engine == "cpu")


def test_small_calls_do_not_ask(monkeypatch):
    def fails(device):
        raise AssertionError(f"asked for {device}")

    monkeypatch.setattr(memory, "available", fails)
    tiny(seed=2).generate(**prompts([8, 5]), **OPTIONS, assistant_models=["early_exit:1"])


def test_under_autocast_nobody_knows_what_is_needed(free):
    model = model_for("modules").float()
    free(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(**prompts([8]), **OPTIONS, assistant_models=[], speculation_config={"engine": "modules"})
