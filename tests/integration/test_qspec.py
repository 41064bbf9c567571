"""Does a packed model that drafts for itself with coarser activations write what it writes alone, over one cache?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import VOCAB, near, packed, prompts, refused, tiny, together

import hf_mlspec
from hf_mlspec.integration.candidates import ChainCandidateGenerator
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.ops import why_not_compiled
from hf_mlspec.speculation.checker import Checker

LENGTHS = [9, 4, 17]
OPTIONS = {"max_new_tokens": 24}
compiled = pytest.mark.skipif(why_not_compiled() is not None, reason=f"no kernels: {why_not_compiled()}")


def target(kind: str = "llama", weights: str = "int4", dtype: torch.dtype = torch.float32, **format_settings):
    """A packed model; 64 features, so that rows hold several groups."""
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    return packed(tiny(kind, dtype=dtype, **shape), weights, **format_settings)


def counts(model) -> list[tuple[str, int, int]]:
    return [(level.name, level.drafted, level.accepted) for level in hf_mlspec.last_stats(model).levels]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"])
@pytest.mark.parametrize("word", ["w4a8", "w4a4"])
def test_architectures(kind, word):
    model, inputs = target(kind), prompts(LENGTHS)
    assert together(model, inputs, [word], **OPTIONS) == together(model, inputs, [], **OPTIONS)
    ((name, drafted, accepted),) = counts_after(model, inputs, [word])
    assert name == word
    assert 0 < accepted <= drafted


def counts_after(model, inputs, levels, **options):
    together(model, inputs, levels, **{**OPTIONS, **options})
    return counts(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4"], ["qspec"], ["w4a8", "w4a4"], ["w4a4", "prompt_lookup"],
                                    ["w4a8", "ngram"], ["w4a8", "early_exit:1"]], ids=str)
@compiled
def test_chains_on_the_compiled_path(dtype, symmetric, levels):
    model, inputs = target(dtype=dtype, symmetric=symmetric), prompts(LENGTHS)
    assert together(model, inputs, levels, **OPTIONS) == together(model, inputs, [], **OPTIONS)
    assert counts(model) == []
    names = [name for name, _, _ in counts_after(model, inputs, levels)]
    assert names == levels


@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4", "prompt_lookup"], ["w4a8", "w4a4"]], ids=str)
def test_module_by_module(levels):
    model, inputs = target(), prompts(LENGTHS)
    options = {**OPTIONS, "speculation_config": {"prepare": False}}
    assert together(model, inputs, levels, **options) == together(model, inputs, [], **options)
    assert precision_switch(model).activation_bits == 16


def test_a_tiny_model_drafts_below():
    dense = tiny(dtype=torch.float32)
    tiny_draft = near(dense)
    model, inputs = packed(dense), prompts(LENGTHS)
    assert together(model, inputs, ["w4a8", tiny_draft], **OPTIONS) == together(model, inputs, [], **OPTIONS)


def test_three_tokens_and_no_threshold_by_default():
    model, inputs = target(), prompts([9])
    seen = []
    check = Checker.check

    def watched(self, rows, draft, **options):
        seen.append(draft.lengths)
        return check(self, rows, draft, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "check", watched)
        together(model, inputs, ["w4a8"], max_new_tokens=20, eos_token_id=None)
    assert seen[0] == [0]
    assert {n for (n,) in seen[1:-1]} == {3}


def test_settings_of_the_call_go_first():
    model, inputs = target(), prompts([9])
    config = {"num_draft_tokens": 5, "confidence_threshold": 0.99}
    ((_, drafted, _),) = counts_after(model, inputs, ["w4a8"], speculation_config=config)
    assert drafted > 0
    model.generation_config.num_assistant_tokens = 17  # says how this model's assistants draft, not how it does itself
    ((_, four, _),) = counts_after(model, inputs, ["w4a8"], eos_token_id=None, max_new_tokens=9)
    assert four <= 3 * 8


@compiled
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    bits=st.sampled_from([8, 4]),
    gamma=st.integers(1, 6),
    bfloat16=st.booleans(),
)
def test_every_round_leaves_the_cache_of_16_bit_decoding(seed, lengths, bits, gamma, bfloat16):
    """Bit for bit, the keys and values of what was settled are those that w4a16 alone writes."""
    model = target(dtype=torch.bfloat16 if bfloat16 else torch.float32, symmetric=seed % 2 == 0)
    inputs = prompts(lengths, seed)
    options = {"max_new_tokens": 16, "eos_token_id": None}
    pure = caches(model, inputs, [], options)
    drafted = caches(model, inputs, [f"w4a{bits}"], {**options, "speculation_config": {"num_draft_tokens": gamma}})
    whole = {number: cache for rows in pure for number, cache in rows.items()}  # the last one is the longest
    assert len(drafted) <= len(pure)
    for rows in drafted:
        for number, cache in rows.items():
            assert cache.shape[3] <= whole[number].shape[3]
            assert torch.equal(cache, whole[number][:, :, :, : cache.shape[3]])
    assert drafted[-1].keys() <= whole.keys() == set(range(len(lengths)))


def caches(model, inputs, levels, options) -> list[dict[int, torch.Tensor]]:
    """After every check of the target, per row the true part of its cache `[layers, 2, kv_heads, length, dim]`."""
    found, check = [], Checker.check

    def watched(self, rows, draft, **more):
        verdict = check(self, rows, draft, **more)
        if self.name == "the target":
            kv, lengths = self.runner.cache.kv, self.runner.lengths
            places = enumerate(zip(self.sampler.row_ids, lengths, strict=True))
            found.append({number: kv[:, :, r, :, :n].clone() for r, (number, n) in places})
        return verdict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checker, "check", watched)
        together(model, inputs, levels, **options)
    return found


@compiled
@pytest.mark.parametrize("shared", [True, False])
def test_one_cache_or_two(shared):
    model, inputs = target(), prompts(LENGTHS)
    options = {**OPTIONS, "speculation_config": {"shared_cache": shared}}
    assert together(model, inputs, ["w4a8"], **options) == together(model, inputs, [], **OPTIONS)
    together(model, inputs, ["w4a8"], **options)
    stats = hf_mlspec.last_stats(model)
    assert stats.levels[0].cache_bytes == (0 if shared else stats.target_cache_bytes)


@compiled
def test_mxfp4_models_draft_with_8_bit_activations():
    model, inputs = target(weights="mxfp4"), prompts(LENGTHS)
    assert together(model, inputs, ["mxfp4a8"], **OPTIONS) == together(model, inputs, [], **OPTIONS)
    assert together(model, inputs, ["qspec"], **OPTIONS) == together(model, inputs, [], **OPTIONS)


def test_sampling_gives_tokens_of_the_model_and_repeats_with_the_seed():
    model, inputs = target(), prompts(LENGTHS)
    options = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 12, "assistant_models": ["w4a8"]}
    torch.manual_seed(5)
    first = model.generate(**inputs, **options)
    torch.manual_seed(5)
    assert torch.equal(first, model.generate(**inputs, **options))
    assert int(first.max()) < VOCAB
    assert counts(model)[0][2] > 0


def test_another_default_precision_is_what_checks():
    model, inputs = target(), prompts(LENGTHS)
    switch = precision_switch(model)
    alone = together(model, inputs, [], **OPTIONS)
    switch.activation_bits = 8
    at_eight = together(model, inputs, [], **OPTIONS)
    assert together(model, inputs, ["w4a4"], **OPTIONS) == at_eight
    switch.activation_bits = 16
    with switch.at("w4a8"):
        assert together(model, inputs, [], **OPTIONS) == at_eight
    assert together(model, inputs, [], **OPTIONS) == alone


def test_as_candidates_of_stock_decoding():
    model, inputs = target(), prompts([9])
    generator = ChainCandidateGenerator(model, ["w4a8"], speculation_config={"prepare": False})
    ids, _ = generator.get_candidates(inputs["input_ids"])
    assert ids.shape == (1, 12)
    assert precision_switch(model).activation_bits == 16


@pytest.mark.parametrize(
    ("weights", "levels", "words"),
    [
        (None, ["w4a4"], "this LlamaForCausalLM has none: load it with .*MLSpecConfig"),
        (None, ["qspec"], "this LlamaForCausalLM has none"),
        ("mxfp4", ["w4a4"], "are MXFP4: its levels are called 'mxfp4a8'"),
        ("int4", ["mxfp4a8"], "are int4: its levels are called 'w4a8', 'w4a4'"),
        ("int4", ["w8a8"], "are int4: its levels are called"),
        ("mxfp4", ["mxfp4a4"], "MXFP4 weights take activations of 16 or 8 bits, not 4"),
        ("int4", ["w4a16"], "level 0 .w4a16. drafts with 16-bit activations for the target, which has 16"),
        ("int4", ["w4a4", "w4a8"], "level 1 .w4a8. drafts with 8-bit activations for level 0 .w4a4., which has 4"),
        ("int4", ["w4a5"], "5 activation bits, must be 4, 8 or 16"),
    ],
)
def test_refused(weights, levels, words):
    model = tiny(dtype=torch.float32) if weights is None else target(weights=weights)
    refused(ValueError, words, prompts([5]), model, assistant_models=levels)


def test_refused_below_its_own_default():
    model, words = target(), "8-bit activations for the target, which has 8"
    precision_switch(model).activation_bits = 8
    refused(ValueError, words, prompts([5]), model, assistant_models=["w4a8"])
