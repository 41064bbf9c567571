"""Do chains over Gemma 4, whose layers differ in head size and have own inputs, write what it writes alone?"""

from __future__ import annotations

import pytest
import torch
import transformers
from models import EOS, PAD, VOCAB, alone, prompts, together

import hf_mlspec
from hf_mlspec.integration.request import head_size

if not hasattr(transformers, "Gemma4ForCausalLM"):
    pytest.skip("this transformers has no Gemma 4", allow_module_level=True)


def made(num: int) -> transformers.PreTrainedModel:
    """num: of four layers the last ones, which read keys and values of those before."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 8}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": num}
    kinds = ["sliding_attention", "full_attention"] * 2
    ids = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 1}
    config = transformers.Gemma4TextConfig(
        **sizes, **heads, **inputs, **ids, layer_types=kinds, max_position_embeddings=128
    )
    return transformers.Gemma4ForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def target():
    return made(0)


@pytest.mark.parametrize("levels", [[], ["early_exit:2"], ["prompt_lookup"], ["early_exit:1", "ngram"]], ids="+".join)
def test_a_chain_writes_what_each_row_writes_alone(target, levels):
    inputs, until = prompts([12, 9, 5, 1]), {"max_new_tokens": 14, "eos_token_id": EOS}
    config = {"num_draft_tokens": 3, "confidence_threshold": 0.0}
    assert together(target, inputs, levels, speculation_config=config, **until) == alone(target, inputs, **until)
    assert all(level.drafted for level in hf_mlspec.last_stats(target).levels)


def test_an_early_exit_shares_every_tensor(target):
    view = hf_mlspec.early_exit(target, 2)
    assert hf_mlspec.resident_bytes(view, shared_with=target) == 0
    assert view.model.embed_tokens_per_layer.weight.shape[1] == 2 * 8
    assert target.model.embed_tokens_per_layer.weight.shape[1] == 4 * 8


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_an_early_exit_where_layers_share_keys_and_values_is_a_model_of_its_own(num_layers):
    target, ids = made(2), prompts([9])["input_ids"]
    view, how = hf_mlspec.early_exit(target, num_layers), {"max_new_tokens": 6, "do_sample": False}
    assert view.config.num_kv_shared_layers == max(0, num_layers - 2)
    assert target.config.num_kv_shared_layers == 2
    assert torch.equal(view.generate(ids, **how), view.generate(ids, use_cache=False, **how))


@pytest.mark.parametrize(
    "levels", [["early_exit:2"], ["early_exit:3"], ["early_exit:3", "early_exit:1"]], ids="+".join
)
def test_early_exits_draft_with_and_without_layers_that_share(levels):
    target, inputs, until = made(2), prompts([12, 5, 1]), {"max_new_tokens": 10, "eos_token_id": EOS}
    config = {"num_draft_tokens": 3, "confidence_threshold": 0.0}
    assert together(target, inputs, levels, speculation_config=config, **until) == alone(target, inputs, **until)
    assert all(level.drafted for level in hf_mlspec.last_stats(target).levels)


def test_the_size_of_heads_is_what_divides_all(target):
    assert head_size(target) == 8
