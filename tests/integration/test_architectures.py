"""Does every chain write what stock generate writes, whatever the architecture and the batch?"""

from __future__ import annotations

import pytest
import torch
from models import ARCHITECTURES, LATER, alone, near, prompts, tiny, together

import hf_mlspec
from hf_mlspec import SpeculationConfig
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

MODELS: dict = {}
NEW = 30
LENGTHS = {"one row": [9], "mixed lengths": [5, 13, 1, 8]}
CHAINS = {
    "the target alone": [],
    "a model": ["near"],
    "first layers": ["early_exit:1"],
    "prompt lookup": ["prompt_lookup"],
    "a model, a table": ["near", "ngram"],
    "first layers, a model, a table": ["early_exit:1", "near", "ngram"],
    "the target itself": ["itself"],
}
CASTS = {
    "cast": ["mxfp4"],
    "cast, a model": ["mxfp4", "near"],
    "cast, a model, a table": ["mxfp4", "near", "ngram"],
    "cast, first layers": ["mxfp4", "early_exit:1"],
}


# One row meets every architecture without a level and under the most of them here, all else among the slow tests.
DEEPEST = ("the target alone", "first layers, a model, a table", "cast, a model, a table")


def with_rows(chains: dict) -> list:
    """Every chain with both batches."""
    return [pytest.param(chain, rows, id=f"{chain}-{rows}",
                         marks=[pytest.mark.slow] if rows == "one row" and chain not in DEEPEST else [])
            for chain in chains for rows in LENGTHS]


def made(kind: str, dtype: torch.dtype):
    """A target, a model that is near it, and what stock generate writes: made once."""
    if (kind, dtype) not in MODELS:
        target = tiny(kind, dtype=dtype)
        written = {name: alone(target, prompts(lengths), max_new_tokens=NEW) for name, lengths in LENGTHS.items()}
        MODELS[kind, dtype] = target, near(target), written
    return MODELS[kind, dtype]


def levels_of(chain: list[str], target, other) -> list:
    return [{"near": other, "itself": target}.get(word, word) for word in chain]


def check(kind: str, dtype: torch.dtype, rows: str, chain: list[str], config: SpeculationConfig) -> None:
    target, other, written = made(kind, dtype)
    levels = levels_of(chain, target, other)
    assert together(target, prompts(LENGTHS[rows]), levels, max_new_tokens=NEW, speculation_config=config) == (
        written[rows]
    )


@pytest.mark.parametrize(("chain", "rows"), with_rows(CHAINS))
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_ids_are_those_of_stock_generate(kind, chain, rows):
    check(kind, torch.float64, rows, CHAINS[chain], SpeculationConfig(num_draft_tokens=5, confidence_threshold=0.2))


@pytest.mark.filterwarnings("ignore:direct_cast")  # GPT-2's Conv1D and fused experts stay as they are, and it says so
@pytest.mark.parametrize(("chain", "rows"), with_rows(CASTS))
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_ids_with_a_cast_are_those_of_stock_generate(kind, chain, rows):
    check(kind, torch.float32, rows, CASTS[chain], SpeculationConfig(confidence_threshold=0.0))


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.filterwarnings("ignore:direct_cast")
@pytest.mark.parametrize("chain", ["the target alone", "a model", "first layers, a model, a table", "cast, a model"])
@pytest.mark.parametrize("kind", LATER)
def test_ids_of_a_compiled_class_are_those_of_stock_generate(kind, chain):
    config = SpeculationConfig(num_draft_tokens=5, confidence_threshold=0.2)
    check(kind, torch.float32, "mixed lengths", {**CHAINS, **CASTS}[chain], config)
    assert isinstance(decoder_of(made(kind, torch.float32)[0], "cpu"), CpuDecoder)


@pytest.mark.parametrize("shared", [True, False])
def test_a_separate_cache_writes_the_same(shared):
    config = SpeculationConfig(shared_cache=shared)
    check("llama", torch.float32, "mixed lengths", ["mxfp4", "near"], config)
    check("gemma3", torch.float64, "mixed lengths", ["early_exit:1"], config)


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "gemma2"])
def test_a_padded_batch_is_what_stock_makes_of_it(kind):
    # Stock's own eager attention makes NaN of padding in a float64 Gemma 2.
    target, other, _ = made(kind, torch.float64)
    inputs = prompts(LENGTHS["mixed lengths"])
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    stock = target.generate(**inputs, **options)
    ours = target.generate(**inputs, **options, assistant_models=[other])
    assert torch.equal(stock.sequences, ours.sequences)
    running = torch.ones(len(LENGTHS["mixed lengths"]), dtype=torch.bool)
    for step, (theirs, own) in enumerate(zip(stock.logits, ours.logits, strict=True)):
        torch.testing.assert_close(own[running], theirs[running], rtol=0, atol=5e-5)
        running &= ours.sequences[:, inputs["input_ids"].shape[1] + step] != 1


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "phi3"])
def test_masks_with_holes(kind):
    target, other, _ = made(kind, torch.float64)
    inputs = prompts([12, 7, 12])
    inputs["attention_mask"][0, 3:5] = 0
    inputs["attention_mask"][1, 8] = 0
    stock = target.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    for chain in ([], [other], ["early_exit:1", "prompt_lookup"]):
        ours = target.generate(**inputs, do_sample=False, max_new_tokens=NEW, assistant_models=chain)
        assert torch.equal(ours, stock)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_holes_in_a_mask_of_another_dtype(dtype):
    target, other, _ = made("mistral", torch.float64)
    inputs = prompts([12, 7])
    inputs["attention_mask"][0, 3] = 0
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    with pytest.raises(ValueError, match=r"sliding window of 7 tokens"):
        target.generate(**inputs, max_new_tokens=NEW, assistant_models=[other])


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gpt_oss"])
def test_holes_under_a_sliding_window_are_refused(kind):
    target, other, _ = made(kind, torch.float64)
    inputs = prompts([12, 7])
    inputs["attention_mask"][0, 3] = 0
    with pytest.raises(ValueError, match=r"sliding window of 7 tokens.*remove them"):
        target.generate(**inputs, max_new_tokens=NEW, assistant_models=[other])
    inputs = prompts([3, 3])
    inputs["attention_mask"][0, 1] = 0
    stock = target.generate(**inputs, do_sample=False, max_new_tokens=3)
    assert torch.equal(target.generate(**inputs, do_sample=False, max_new_tokens=3, assistant_models=[other]), stock)


def test_speculation_took_place():
    target, other, _ = made("llama", torch.float64)
    together(target, prompts([9]), [other, "early_exit:1"], max_new_tokens=NEW)
    stats = hf_mlspec.last_stats(target)
    assert 0 < stats.levels[0].accepted < stats.levels[0].drafted
    assert stats.tokens_per_target_pass > 1.2


def test_a_model_with_a_hook_keeps_it():
    target = tiny()
    seen = []
    handle = target.model.register_forward_hook(lambda module, args, output: seen.append(1))
    hooked = together(target, prompts([6]), [], max_new_tokens=5)
    assert len(seen) == 5
    handle.remove()
    assert together(target, prompts([6]), [], max_new_tokens=5) == hooked
    assert len(seen) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_speculates(dtype):
    target = tiny(dtype=dtype)
    for chain in (["mxfp4"], ["early_exit:1"], [target]):
        written = together(target, prompts([9, 4]), chain, max_new_tokens=20)
        assert all(0 < len(row) <= 20 for row in written)
        assert hf_mlspec.last_stats(target).levels[0].accepted > 0
