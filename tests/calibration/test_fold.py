"""Does a model whose scales were folded compute what it did, whatever its family?"""

from __future__ import annotations

import copy

import pytest
import torch
from models import prompts, tiny

from hf_mlspec.calibration.blocks import blocks_of, first_inputs
from hf_mlspec.calibration.families import FAMILIES, feeds_of
from hf_mlspec.calibration.fold import fold, shared

KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3"]


def random_norms(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def test_every_family_is_tested():
    assert {type(tiny(kind)).__name__ for kind in KINDS} == set(FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scaling", ["awq", "smoothquant"])
@torch.no_grad()
def test_folded_scales_change_no_output(kind, scaling):
    model = random_norms(tiny(kind, dtype=torch.float32))
    ids = prompts([20])["input_ids"]
    before = model(ids).logits
    plain = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    feeds = feeds_of(type(model).__name__, scaling)
    assert len(feeds) == (4 if scaling == "awq" else 2)
    for _, block in blocks_of(model):
        for feed in feeds:
            size = block.get_submodule(feed.consumers[0]).in_features
            scales = shared(feed, torch.exp(torch.randn(size, generator=generator)), heads, kv_heads)
            fold(block, feed, scales, heads, kv_heads)
    after = model(ids).logits
    assert (after - before).norm() < 1e-4 * before.norm()
    places = {place for feed in feeds for place in (feed.producer, *feed.consumers)}
    named = [f"{block}.{place}.weight" for block, _ in blocks_of(model) for place in places]
    assert not [name for name in named if torch.equal(plain.get_parameter(name), model.get_parameter(name))]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_blocks_called_one_by_one_are_the_model(kind):
    model = random_norms(tiny(kind, dtype=torch.float32))
    samples = [prompts([length], seed=length)["input_ids"] for length in (20, 9)]
    hidden: list[torch.Tensor] = []
    calls = first_inputs(model, samples, hidden)
    for ids, x in zip(samples, hidden, strict=True):
        for index, (_, block) in enumerate(blocks_of(model)):
            x = calls[ids.shape[1]][index].run(block, x)
        logits = model.lm_head(model.model.norm(x))
        cap = getattr(model.config, "final_logit_softcapping", None)
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        torch.testing.assert_close(logits, model(ids).logits)


def test_a_class_without_feeds_is_refused_by_name():
    with pytest.raises(ValueError, match=r"not known for GPT2LMHeadModel .* use gptq or rtn"):
        feeds_of("GPT2LMHeadModel", "awq")
