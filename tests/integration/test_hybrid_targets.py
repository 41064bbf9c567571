"""Do models that keep a state write with levels what they write alone, in any batch, and alone what stock writes?"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from decoders import random_model
from hybrids import HYBRIDS, PAD, VOCAB, hybrid
from models import prompts, tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, RecurrentGemmaConfig
from transformers import RecurrentGemmaForCausalLM as RecurrentGemma

import hf_mlspec
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

MODELS = Path(os.environ.get("MLSPEC_MODELS", "../shared/models"))
DATA = Path(os.environ.get("MLSPEC_DATA", "../shared/data"))
REAL = MODELS / "code-hybrid"
LENGTHS = (12, 9, 5, 1)
DRAFTS = {"num_draft_tokens": 4}


def ragged(seed=1):
    """Four prompts of mixed lengths, padded on the left."""
    torch.manual_seed(seed)
    ids, mask = torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS))), torch.zeros(len(LENGTHS), max(LENGTHS)).long()
    for r, length in enumerate(LENGTHS):
        ids[r, : max(LENGTHS) - length] = PAD
        mask[r, max(LENGTHS) - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def written(model, levels, inputs=None, **options):
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD, **options}
    given = {"speculation_config": DRAFTS} if levels else {}
    return model.generate(**(inputs or ragged()), assistant_models=levels, **given, **settings)


@pytest.mark.parametrize("name", HYBRIDS)
def test_chains_write_what_the_target_writes(name):
    model = hybrid(name)
    inputs = ragged()
    alone = written(model, [])
    for r, length in enumerate(LENGTHS):
        row = {"input_ids": inputs["input_ids"][r : r + 1, -length:]}
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
        stock = model.generate(**row, attention_mask=torch.ones(1, length).long(), **settings)
        assert torch.equal(alone[r, max(LENGTHS) :], stock[0, length:])
    drafted = 0
    for levels in (["prompt_lookup"], ["mxfp4"], ["early_exit:2"], ["mxfp4", "prompt_lookup"], [tiny()]):
        assert torch.equal(written(model, levels), alone), levels
        drafted += sum(level.drafted - level.accepted for level in hf_mlspec.last_stats(model).levels)
    assert drafted > 0  # something was rejected


def test_a_draft_that_keeps_a_state():
    target = tiny()
    alone = written(target, [])
    assert torch.equal(written(target, [hybrid("Qwen3_5ForCausalLM")]), alone)
    assert hf_mlspec.last_stats(target).levels[0].drafted > 0


@pytest.mark.parametrize("levels", [["mxfp4"], ["mxfp4", "prompt_lookup"]], ids=str)
def test_a_cast_may_have_states_of_its_own(levels):
    model = hybrid("Qwen3_5ForCausalLM")
    own = {"speculation_config": {**DRAFTS, "shared_cache": False}}
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    found = model.generate(**ragged(), assistant_models=levels, **own, **settings)
    assert torch.equal(found, written(model, []))


@pytest.mark.plans
def test_a_controller_decides_how_much_is_drafted():
    model = hybrid("Qwen3_5ForCausalLM")
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    assert torch.equal(model.generate(**ragged(), assistant_models=["mxfp4"], **settings), written(model, []))


@pytest.mark.parametrize("levels", [["prompt_lookup"], ["mxfp4"], ["mxfp4", "prompt_lookup"]], ids=str)
def test_sampled_tokens_are_those_of_the_target(levels):
    model, inputs = hybrid("Qwen3_5ForCausalLM"), ragged()  # before the seed is set
    torch.manual_seed(7)
    alone = written(model, [], inputs, do_sample=True, temperature=2.0, top_p=0.9)
    torch.manual_seed(7)
    assert torch.equal(written(model, levels, inputs, do_sample=True, temperature=2.0, top_p=0.9), alone)
    torch.manual_seed(8)
    assert not torch.equal(written(model, levels, inputs, do_sample=True, temperature=2.0, top_p=0.9), alone)


def test_scores_and_no_cache_come_back():
    model = hybrid("Qwen3_5ForCausalLM")
    options = {"return_dict_in_generate": True, "output_scores": True}
    alone, found = written(model, [], **options), written(model, ["mxfp4"], **options)
    assert found.past_key_values is None
    for one, other in zip(alone.scores, found.scores, strict=True):
        assert torch.equal(one, other)


def test_a_stream_of_hybrids():
    model = hybrid("Qwen3_5ForCausalLM")
    inputs, alone = ragged(), written(hybrid("Qwen3_5ForCausalLM"), [])
    prompts = [row[-length:].tolist() for row, length in zip(inputs["input_ids"], LENGTHS, strict=True)]
    found = {}
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    for done in hf_mlspec.generate_stream(
        model, prompts, assistant_models=["mxfp4"], speculation_config=DRAFTS, max_batch=2, **settings
    ):
        found[tuple(done.sequence[: -len(done.new_tokens)])] = list(done.new_tokens)
    for r, prompt in enumerate(prompts):
        assert found[tuple(prompt)] == alone[r, max(LENGTHS) :].tolist()


def test_states_that_are_not_finite():
    model = hybrid("Qwen3_5ForCausalLM")
    with torch.no_grad():
        model.model.layers[0].linear_attn.dt_bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the logits of the target are NaN"):
        written(model, ["prompt_lookup"])


@pytest.mark.parametrize("filled", [False, True])
def test_a_users_cache(filled):
    model, inputs = hybrid("Qwen3_5ForCausalLM"), ragged()
    cache = DynamicCache(config=model.config)
    if filled:
        model(inputs["input_ids"][:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values was given, and Qwen3_5ForCausalLM keeps a state"):
        written(model, ["prompt_lookup"], inputs={**inputs, "past_key_values": cache})


def test_a_cache_of_attention_for_a_hybrid():
    model = hybrid("Qwen3_5ForCausalLM")
    with pytest.raises(ValueError, match="past_key_values was given"):
        written(model, [], inputs={**ragged(), "past_key_values": DynamicCache()})


def test_beams_stay_refused():
    with pytest.raises(ValueError, match="beam search is not supported"):
        written(hybrid("Qwen3_5ForCausalLM"), ["prompt_lookup"], num_beams=2)


def test_stock_assisted_decoding_stays_refused():
    model = hybrid("Qwen3_5ForCausalLM")
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(**ragged(), assistant_model=tiny(), max_new_tokens=3)


@pytest.mark.parametrize("levels", [["prompt_lookup"], ["mxfp4"]], ids=str)
def test_states_in_the_modules_are_each_rows_own(levels):
    shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(vocab_size=VOCAB, lru_width=32, attention_window_size=8, **shape)
    model = RecurrentGemma(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else parameter
    inputs, found = ragged(), written(model, levels)
    assert all(block.conv1d_state is None for block in model.modules() if hasattr(block, "conv1d_state"))
    for r, length in enumerate(LENGTHS):
        row = {"input_ids": inputs["input_ids"][r : r + 1, -length:], "attention_mask": torch.ones(1, length).long()}
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
        stock = copy.deepcopy(model).generate(**row, **settings)  # it leaves its states behind
        assert torch.equal(found[r, max(LENGTHS) :], stock[0, length:])
    assert len(set(found[:, max(LENGTHS) :].flatten().tolist())) > 4


@pytest.fixture(scope="module")
def code():
    if not REAL.is_dir():
        pytest.skip(f"{REAL} is not there: MLSPEC_MODELS names its folder")
    model = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(REAL, padding_side="left")


def problems(file, field, count):
    path = DATA / file
    if not path.is_file():
        pytest.skip(f"{path} is not there: MLSPEC_DATA names its folder")
    return [json.loads(line)[field] for line in path.read_text().splitlines()[:count]]


@pytest.mark.parametrize(
    ("file", "field"), [("humaneval/HumanEval.jsonl", "prompt"), ("gsm8k/test.jsonl", "question")]
)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_trained_hybrid(code, file, field, batch):
    model, tokenizer = code
    draft = AutoModelForCausalLM.from_pretrained(MODELS / "code-4m", dtype=torch.float32).eval()
    inputs = tokenizer(problems(file, field, batch), return_tensors="pt", padding=True)
    options = {"inputs": {**inputs}, "max_new_tokens": 16, "tokenizer": tokenizer, "eos_token_id": 1}
    alone = written(model, [], **options)
    for levels in (["mxfp4", draft], ["prompt_lookup"]):
        assert torch.equal(written(model, levels, **options), alone)


def test_stop_strings(code):
    model, tokenizer = code
    inputs = {**tokenizer(["def fibonacci(n):\n    "], return_tensors="pt")}
    options = {"inputs": inputs, "tokenizer": tokenizer, "stop_strings": ["return"], "max_new_tokens": 40}
    alone = written(model, [], **options)
    assert alone.shape[1] < inputs["input_ids"].shape[1] + 40
    assert torch.equal(written(model, ["mxfp4"], **options), alone)


@pytest.mark.parametrize("levels", [["mxfp4", "early_exit:2"], ["early_exit:2", "mxfp4"]], ids=str)
def test_levels_below_levels_of_the_targets_shape_go_on_from_the_same_states(levels):
    """A level that follows another takes its state from it, which took none itself in this round so far."""
    model = hybrid("Lfm2ForCausalLM")
    options = {**ragged(), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    alone, found = (
        model.generate(**options, assistant_models=below, speculation_config={**DRAFTS, "engine": "modules"})
        for below in ([], levels)
    )
    assert torch.equal(found, alone)
    assert all(level.drafted for level in hf_mlspec.last_stats(model).levels[:2])


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
@pytest.mark.parametrize("levels", [["early_exit:2", "mxfp4"], ["early_exit:1", "early_exit:2"]], ids=str)
@pytest.mark.parametrize("kind", ["granite-hybrid", "qwen3.5", "llama"])
def test_a_level_of_more_layers_than_the_one_above_it_has_a_cache_of_its_own(kind, levels, engine):
    model = random_model(kind, torch.bfloat16, hidden_size=64)
    options = {**prompts([5, 9]), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    alone, found = (
        model.generate(**options, assistant_models=below, speculation_config={"engine": engine, "num_draft_tokens": 3})
        for below in ([], levels)
    )
    assert torch.equal(found, alone)
    assert all(level.drafted for level in hf_mlspec.last_stats(model).levels)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
@pytest.mark.parametrize("form", ["mamba2", "mamba2-whole-norm"])
def test_a_draft_model_without_attention_keeps_states_of_its_own(form, engine):
    """Neither it nor the cast above it has keys and values: that both have none does not make their rows one."""
    model = random_model(form, torch.bfloat16)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():  # it agrees in a part of the tokens
            parameter.add_(parameter.std() * torch.randn_like(parameter) * 0.2)
    options = {**prompts([1, 9, 20]), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    settings = {"engine": engine, "num_draft_tokens": 3}
    alone, found = (
        model.generate(**options, assistant_models=below, speculation_config=settings)
        for below in ([], ["mxfp4", draft])
    )
    assert torch.equal(found, alone)
    assert all(0 < level.accepted < level.drafted for level in hf_mlspec.last_stats(model).levels)


@pytest.mark.parametrize("kind", ["granite-hybrid", "qwen3.5"])
def test_an_early_exit_in_front_of_the_first_attention_drafts(kind):
    model = random_model(kind, torch.bfloat16, hidden_size=64)
    options = {**prompts([1, 9]), "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    alone, found = (
        model.generate(**options, assistant_models=below, speculation_config={**DRAFTS, "engine": "modules"})
        for below in ([], ["early_exit:1"])
    )
    assert torch.equal(found, alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted
