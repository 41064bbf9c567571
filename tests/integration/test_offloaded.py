"""Does a model that accelerate spreads over the CPU and a disk write with levels what it writes whole?"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_mlspec import direct_cast
from hf_mlspec.nn.replace import resident_bytes

PROMPT = torch.tensor([[5, 17, 40, 3, 200, 8]])
MAP = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu",
       "model.norm": "cpu", "lm_head": "disk"}  # fmt: skip


@pytest.fixture
def whole(saved_model):
    return AutoModelForCausalLM.from_pretrained(saved_model).eval()


@pytest.fixture
def spread(saved_model, tmp_path):
    return AutoModelForCausalLM.from_pretrained(saved_model, device_map=MAP, offload_folder=tmp_path).eval()


@pytest.mark.parametrize("levels", [[], ["mxfp4"], ["int3"], ["early_exit:1"], ["prompt_lookup"],
                                    ["mxfp4", "prompt_lookup"]], ids=str)  # fmt: skip
def test_chains_write_what_the_whole_model_writes(whole, spread, levels):
    assert any(parameter.is_meta for parameter in spread.parameters())
    how = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 20}
    expected = whole.generate(PROMPT, **how)
    assert torch.equal(spread.generate(PROMPT, assistant_models=levels, **how), expected)
    assert torch.equal(spread.generate(PROMPT, **how), expected)


@pytest.mark.parametrize("lengths", [[6, 6], [3, 6]], ids=["alike", "ragged"])
def test_what_picks_logits_is_no_tensor_that_accelerate_would_move(whole, spread, lengths):
    """It would go to the tokens, and the last norm may be on another device."""
    seen = []
    spread.register_forward_pre_hook(lambda *call: seen.append(call[2]["logits_to_keep"]), with_kwargs=True)
    mask = torch.tensor([[int(place >= 6 - length) for place in range(6)] for length in lengths])
    how = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, "assistant_models": ["prompt_lookup"]}
    ids = PROMPT.repeat(2, 1) * mask
    assert torch.equal(spread.generate(ids, **how), whole.generate(ids, **how))
    assert {type(one) for one in seen} <= {slice, list}
    assert list in {type(one) for one in seen} or len(set(lengths)) == 1


def test_a_cast_is_held_where_its_layers_run_and_leaves_the_model(whole, spread):
    cast, expected = direct_cast(spread), direct_cast(whole)
    assert not any(parameter.is_meta for name, parameter in cast.named_parameters() if "proj" in name)
    assert torch.equal(cast(PROMPT).logits, expected(PROMPT).logits)
    assert resident_bytes(cast, spread) == resident_bytes(expected, whole)
    assert spread.model.layers[0].mlp.down_proj.weight.is_meta
    assert torch.equal(spread(PROMPT).logits, whole(PROMPT).logits)


def test_an_offloaded_embedding_and_weights_that_were_not_loaded_are_refused(saved_model, whole, tmp_path):
    offloaded = AutoModelForCausalLM.from_pretrained(
        saved_model, device_map={**MAP, "model.embed_tokens": "disk"}, offload_folder=tmp_path
    )
    with pytest.raises(ValueError, match=r"embedding is offloaded\): load it onto .*, or give a device_map"):
        offloaded.generate(PROMPT, assistant_models=[], max_new_tokens=2)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(whole.config)
    with pytest.raises(ValueError, match=r"on the meta device \(not loaded"):
        empty.generate(PROMPT, assistant_models=[], max_new_tokens=2)
    with pytest.raises(ValueError, match="are on the meta device"):
        direct_cast(empty)
