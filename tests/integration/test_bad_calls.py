"""Are calls that cannot work refused with one specific error, before any model runs?"""

from __future__ import annotations

import models
import pytest
import torch
import transformers
from models import letters, near, prompts, tiny
from transformers import DynamicCache, GenerationConfig, StaticCache

from hf_mlspec import SpeculationConfig

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
INPUTS = prompts([6])
PAIR = prompts([6, 4])


def refused(error: type[Exception], words: str, inputs: dict | None = None, target=TARGET, **options) -> None:
    """`models.refused` for the target and the prompt of this file."""
    models.refused(error, words, INPUTS if inputs is None else inputs, target, **options)


def of_shape(name: str, batch: int, width: int) -> tuple[dict, str]:
    """Inputs of two prompts of six tokens with ones of this shape, and what is said of them."""
    said = rf"attention_mask (or position_ids have|has) shape \[{batch}, {width}\] and input_ids \[2, 6\]: one"
    return {**PAIR, name: torch.ones(batch, width, dtype=torch.long)}, said


CALLS = {
    "beams": ({"num_beams": 2}, r"num_beams=2 with assistant_models.*num_beams=1"),
    "beams in a config": ({"generation_config": GenerationConfig(num_beams=3)}, r"num_beams=3"),
    "both arguments": ({"assistant_model": NEAR}, r"assistant_models and assistant_model were both given"),
    "both tokenizers": ({"assistant_tokenizer": letters()}, r"assistant_models and assistant_tokenizer were both"),
    "synced": ({"synced_gpus": True}, r"synced_gpus=True .* not supported"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, r"output_attentions=True is not"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, r"output_hidden_states=True"),
    "a static cache": ({"cache_implementation": "static"}, r"cache_implementation='static'.*leave cache_imp"),
    "an offloaded cache": ({"cache_implementation": "offloaded"}, r"cache_implementation='offloaded'"),
    "a user's static cache": (
        {"past_key_values": StaticCache(config=TARGET.config, max_cache_len=64)},
        r"past_key_values is a StaticCache.*DynamicCache",
    ),
    "no cache": ({"use_cache": False}, r"use_cache=False.*leave use_cache out"),
    "stock's lookup": ({"prompt_lookup_num_tokens": 3}, r"prompt_lookup_num_tokens and assistant_models were both"),
    "equal rows": ({"num_return_sequences": 2, "do_sample": False}, r"num_return_sequences=2 without.*do_sample=True"),
    "DoLa": ({"generation_config": GenerationConfig(dola_layers="low")}, r"dola_layers with assistant_models.*way of"),
    "DoLa by keyword": ({"dola_layers": "low"}, r"dola_layers with assistant_models"),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, r"penalty_alpha with assistant_models.*leave one"),
    "no rows": ({"num_return_sequences": 0}, r"num_return_sequences=0: it must be at least 1"),
    "fewer than no rows": ({"num_return_sequences": -2}, r"num_return_sequences=-2: it must be at least 1"),
    "stock's early exit": ({"assistant_early_exit": 1}, r"assistant_early_exit and assistant_models were both"),
    "positions": ({"position_ids": torch.arange(6)[None] + 7}, r"position_ids other than.*leave position_ids out"),
    "too many new tokens": ({"max_new_tokens": 600}, r"6 prompt .*600 new ones.*512.*max_new_tokens=506 or less"),
}


@pytest.mark.parametrize("name", CALLS)
def test_options(name):
    options, words = CALLS[name]
    refused(ValueError, words, assistant_models=[NEAR], **options)


def test_a_word_where_stock_takes_a_model():
    refused(TypeError, r"assistant_model is 'mxfp4'.*assistant_models=\[\.\.\.\] with an s", assistant_model="mxfp4")


def test_beams_by_position():
    with pytest.raises(ValueError, match="num_beams=2 with assistant_models"):
        TARGET.generate(INPUTS["input_ids"], GenerationConfig(num_beams=2), assistant_models=[NEAR])


PROMPTS = {
    "an id of another vocabulary": ({"input_ids": torch.tensor([[5, 9], [5, 64]])}, r"prompt 1 .*token 64, .*0 to 63"),
    "a negative id": ({"input_ids": torch.tensor([[5, -1]])}, r"prompt 0 holds token -1"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 4, 32).double()}, r"inputs_embeds is not supported"),
    "a row that is masked": (
        {**PAIR, "attention_mask": PAIR["attention_mask"] * torch.tensor([[1], [0]])},
        r"prompt 1 of the batch has no token",
    ),
    "a mask too short": ({**PAIR, "attention_mask": PAIR["attention_mask"][:, 1:]}, r"\[2, 5\] .*\[2, 6\].*one flag"),
    "a mask of ones, too short": of_shape("attention_mask", 2, 5),
    "a mask of ones, too long": of_shape("attention_mask", 2, 7),
    "a mask of ones, of another batch": of_shape("attention_mask", 3, 6),
    "positions of another batch": of_shape("position_ids", 3, 6),
    "no tokens": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"at least one token per row"),
    "beyond the positions": (prompts([520]), r"520 prompt tokens.*512 positions.*shorten the prompt"),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_inputs(name):
    inputs, words = PROMPTS[name]
    refused(ValueError, words, inputs=inputs, assistant_models=[NEAR])


def test_positions_that_are_the_masks_own_are_fine():
    positions = (PAIR["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    options = {"max_new_tokens": 5, "do_sample": False}
    stock = TARGET.generate(**PAIR, **options)
    assert torch.equal(TARGET.generate(**PAIR, **options, position_ids=positions, assistant_models=[NEAR]), stock)


@pytest.mark.skipif(transformers.__version__ < "5.18", reason="this transformers hands the mask on")
def test_one_row_of_ones_is_a_mask_for_all():
    ids, options = prompts([6, 6])["input_ids"], {"max_new_tokens": 5, "do_sample": False, "assistant_models": [NEAR]}
    ones = torch.ones(1, 6, dtype=torch.long)
    assert torch.equal(TARGET.generate(ids, attention_mask=ones, **options), TARGET.generate(ids, **options))


def test_unknown_model_inputs():
    options = {"cache_params": None, "token_type_ids": torch.zeros(1, 6)}
    with pytest.raises(ValueError, match="token_type_ids"):
        TARGET.generate(**INPUTS, **options, assistant_models=[NEAR])


NUMBERS = {
    "num_draft_tokens": [0, -1, True, "3", 2.0, [4, -1]],
    "confidence_threshold": [1, 1.5, -0.1, True, "x", float("nan"), [0.2, 2]],
    "max_ngram": [0, -2, "3", True, None],
    "ngram_order": [1, 0, 2.5],
    "cast_rule": ["nearest", None],
    "cast_activation_bits": [4, 0, True, 8.0, "8", [8]],
}
SWITCHES = {"shared_cache": ["yes", None, 1], "cast_head": [3], "materialize": [None], "common_vocabulary": ["x", 0]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in NUMBERS[name]])
def test_config_values(name, value):
    kind = {"confidence_threshold": r"a probability in \[0, 1\)", "cast_rule": "choose one of ocp_floor",
            "cast_activation_bits": r"cast_activation_bits is .*8 \(int8\), 16 \(bfloat16\) or None"}
    with pytest.raises(ValueError, match=kind.get(name, rf"{name} is .*integer")):
        SpeculationConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in SWITCHES for value in SWITCHES[name]])
def test_config_switches(name, value):
    with pytest.raises(TypeError, match=f"{name} is .*must be True or False"):
        SpeculationConfig(**{name: value})


def test_config_itself():
    one = {"assistant_models": [NEAR]}
    refused(ValueError, r"no option drafts; it has num_draft_tokens, confid", speculation_config={"drafts": 1}, **one)
    refused(TypeError, r'SpeculationConfig, a dict or "auto", got int', speculation_config=3, **one)
    for name in ("num_draft_tokens", "confidence_threshold"):
        lists = SpeculationConfig(**{name: [0.5, 0.5] if name == "confidence_threshold" else [4, 4]})
        refused(ValueError, rf"{name} has 2 entries for 1 levels", assistant_models=[NEAR], speculation_config=lists)


def test_a_sliding_cache_cannot_be_continued():
    target = tiny("mistral")
    cache = DynamicCache(config=target.config)
    target.generate(**INPUTS, max_new_tokens=3, past_key_values=cache)
    refused(
        ValueError, r"cannot be continued.*without sliding layers", target=target, past_key_values=cache,
        assistant_models=[NEAR],
    )  # fmt: skip


OTHER_STATES = {
    "more heads": (lambda states: states.repeat(1, 2, 1, 1), r"have shape \[1, 4, 3, 8\], and \[1, 2, 3, 8\]"),
    "rows": (lambda states: states.expand(2, -1, -1, -1), r"have shape \[2, 2, 3, 8\], and \[1, 2, 3, 8\] is what"),
    "a shorter head": (lambda states: states[..., :4], r"have shape \[1, 2, 3, 4\], and \[1, 2, 3, 8\] is what"),
    "another dtype": (lambda states: states.half(), r"are torch\.float16 on cpu, and LlamaForCausalLM computes in"),
}


@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("name", OTHER_STATES)
def test_another_models_cache_is_refused_by_its_keys_and_its_values(name, which):
    change, words = OTHER_STATES[name]
    cache = TARGET(INPUTS["input_ids"][:, :3], use_cache=True).past_key_values
    setattr(cache.layers[1], which, change(getattr(cache.layers[1], which)))
    words = rf"the {which} of layer 1 of past_key_values {words}"
    refused(ValueError, words, past_key_values=cache, assistant_models=[NEAR])


def test_rotary_embeddings_that_change_with_length():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny(rope_parameters=scaling, max_position_embeddings=64)
    options = {"max_new_tokens": 20, "do_sample": False}
    inputs = prompts([30])
    stock = target.generate(**inputs, **options)
    assert torch.equal(target.generate(**inputs, **options, assistant_models=["early_exit:1"]), stock)


def test_rotary_embeddings_that_would_change_within_a_row():
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = tiny("phi3", rope_parameters=scaling, original_max_position_embeddings=40)
    refused(ValueError, r"'longrope' changes .* past 40 tokens.*within 40", inputs=prompts([38]), target=target,
            assistant_models=["early_exit:1"])  # fmt: skip


def test_tokens_that_are_no_integers():
    inputs = {"input_ids": INPUTS["input_ids"].float()}
    refused(TypeError, r"input_ids are torch.float32: pass token ids as integers", inputs, assistant_models=[NEAR])


def test_a_config_without_levels():
    refused(ValueError, r"speculation_config was given without assistant_models", speculation_config={})
