"""Do all engines write what stock generate writes where a prompt is longer than the window?"""

from __future__ import annotations

import pytest
import torch
import transformers
from models import MODELS_WITH_WINDOWS, alone, near, prompts, tiny, together
from transformers import AutoModelForCausalLM, PreTrainedConfig

import hf_mlspec
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.modules.stateful import StatefulEngine
from hf_mlspec.engines.modules.states import only_the_cache_has_windows

LENGTHS = [40, 33, 8, 1]
NEW = 24
ONLY_IN_THE_CACHE = ["llama, a window in its config alone", "granite, a window in its config alone"]


SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    "initializer_range": 0.3,
}  # fmt: skip


def check_chains(config: PreTrainedConfig, *chains: list) -> None:
    """Chains over a random model of this config write what it writes alone."""
    torch.manual_seed(0)
    target, inputs = AutoModelForCausalLM.from_config(config).eval(), prompts(LENGTHS)
    written = alone(target, inputs, max_new_tokens=NEW)
    for levels in chains:
        assert together(target, inputs, levels, max_new_tokens=NEW) == written


@pytest.mark.parametrize("engine", [None, "modules"])
@pytest.mark.parametrize("name", MODELS_WITH_WINDOWS)
def test_prompts_past_a_window(name, engine):
    kind, options = MODELS_WITH_WINDOWS[name]
    target, inputs = tiny(kind, dtype=torch.float32, **options), prompts(LENGTHS)
    written = alone(target, inputs, max_new_tokens=NEW)
    other = near(target)
    hf_mlspec.prepare(target, engine=engine)
    assert alone(target, inputs, max_new_tokens=NEW) == written
    for levels in ([], ["mxfp4"], [other, "prompt_lookup"]):
        assert together(target, inputs, levels, max_new_tokens=NEW) == written


@pytest.mark.parametrize("name", MODELS_WITH_WINDOWS)
def test_the_window_is_of_the_cache_alone_where_no_mask_of_the_class_has_one(name):
    kind, options = MODELS_WITH_WINDOWS[name]
    target = tiny(kind, dtype=torch.float32, **options)
    assert only_the_cache_has_windows(target) == (name in ONLY_IN_THE_CACHE)
    assert isinstance(engine_of(target), StatefulEngine) == (name in ONLY_IN_THE_CACHE)


@pytest.mark.parametrize("name", ONLY_IN_THE_CACHE)
def test_a_window_of_the_cache_alone_matters(name):
    """The prompts are long enough that a window over all, or none at all, writes other ids."""
    kind, options = MODELS_WITH_WINDOWS[name]
    target = tiny(kind, dtype=torch.float32, **options)
    inputs = prompts(LENGTHS)
    written = alone(target, inputs, max_new_tokens=NEW)
    target.config.sliding_window = None
    assert alone(target, inputs, max_new_tokens=NEW) != written


@pytest.mark.skipif(not hasattr(transformers, "Llama4TextConfig"), reason="this transformers has no Llama 4")
def test_chunks():
    """Llama 4: its layers see the tokens of their own chunk, whatever they are fed beside."""
    chunks = {"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64}
    config = transformers.Llama4TextConfig(**SMALL, **experts, **chunks, no_rope_layers=[1, 0])
    check_chains(config, [], ["prompt_lookup"], ["early_exit:1"])


@pytest.mark.skipif(not hasattr(transformers, "AfmoeConfig"), reason="this transformers has no AFMoE")
def test_a_class_that_takes_views_of_what_its_attention_returns():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    check_chains(transformers.AfmoeConfig(**SMALL, **experts, **windows), [], ["prompt_lookup"])


@pytest.mark.skipif(not hasattr(transformers, "MiniMaxConfig"), reason="this transformers has no MiniMax")
def test_layers_that_attend_in_blocks_with_a_state():
    """MiniMax: lightning attention in blocks shorter than the prompts, beside full attention and experts."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4}
    config = transformers.MiniMaxConfig(**SMALL, **experts, layer_types=["linear_attention", "full_attention"])
    check_chains(config, [], ["prompt_lookup"], ["early_exit:1"])
