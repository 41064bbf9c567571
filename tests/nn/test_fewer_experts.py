"""Is fewer_experts the model with fewer experts a token, on the very same tensors?"""

from __future__ import annotations

import pytest
import torch
from models import MIXTURES, prompts, tiny

import hf_mlspec
from hf_mlspec import SpeculationConfig, fewer_experts, resident_bytes
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.nn.fewer_experts import routers
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

IDS = torch.arange(5, 17)[None]


@pytest.mark.parametrize("kind", [*MIXTURES, "gpt_oss"])
def test_a_view_routes_to_the_first_of_each_tokens_experts(kind):
    model = tiny(kind, dtype=torch.float32)
    view = fewer_experts(model, 1)
    assert resident_bytes(view, shared_with=model) == 0
    assert {router.top_k for _, router in routers(view)} == {1}
    assert {router.top_k for _, router in routers(model)} == {2}
    assert (view.config.num_experts_per_tok, model.config.num_experts_per_tok) == (1, 2)
    with torch.no_grad():
        drafted, stock = view(IDS).logits, model(IDS).logits
        for _, router in routers(model):
            router.top_k = 1
        assert torch.equal(model(IDS).logits, drafted)
    assert not torch.equal(drafted, stock)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_view_is_compiled_and_notices_a_router_that_changes(kind):
    model = tiny(kind, dtype=torch.float32)
    view = fewer_experts(model, 1)
    decoder = decoder_of(view, "cpu")
    assert isinstance(decoder, CpuDecoder)
    assert decoder_of(view, "cpu") is decoder
    for _, router in routers(view):
        router.top_k = 2
    assert decoder_of(view, "cpu") is not decoder


@pytest.mark.parametrize(
    ("kind", "number", "words"),
    [
        ("llama", 1, "LlamaForCausalLM has no experts that a router chooses, it is no mixture of experts"),
        ("mixtral", 2, "num_experts is 2, the tokens of this MixtralForCausalLM go to 2: choose 1 to 1"),
        ("mixtral", 0, "num_experts is 0, the tokens of this MixtralForCausalLM go to 2: choose 1 to 1"),
        ("mixtral", True, "num_experts is True, the tokens"),
    ],
)
def test_what_cannot_be_is_refused(kind, number, words):
    with pytest.raises(ValueError, match=words):
        fewer_experts(tiny(kind), number)


def test_one_expert_a_token_cannot_be_fewer():
    with pytest.raises(ValueError, match="go to one expert each: there are no fewer"):
        fewer_experts(tiny("mixtral", num_experts_per_tok=1), 1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("levels", [["experts:1"], ["mxfp4", "experts:1"], ["experts:1", "early_exit:1"],
                                    ["experts:1", "ngram"]], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", [*MIXTURES, "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_level_of_fewer_experts_changes_no_token(kind, levels, shared, dtype):
    model, inputs = tiny(kind, dtype=dtype), prompts([5, 13, 1, 8])
    options = {"do_sample": False, "max_new_tokens": 30}
    config = SpeculationConfig(num_draft_tokens=5, confidence_threshold=0.0, shared_cache=shared)
    stock = model.generate(**inputs, **options, assistant_models=[])
    out = model.generate(**inputs, **options, assistant_models=levels, speculation_config=config)
    assert torch.equal(out, stock)
    stats = hf_mlspec.last_stats(model)
    assert all(level.drafted > 0 for level in stats.levels)
    assert sum(level.accepted for level in stats.levels) > 0


def test_words_that_no_target_takes(caplog):
    model, inputs = tiny("llama", dtype=torch.float32), prompts([4])
    for level, words in (
        ("experts:", "experts takes a number of experts a token, as in 'experts:4'"),
        ("experts:x", "experts takes a number of experts a token"),
        ("experts:1", "LlamaForCausalLM has no experts that a router chooses"),
        ("expert:1", "did you mean 'experts:N'"),
    ):
        with pytest.raises(ValueError, match=words):
            model.generate(**inputs, assistant_models=[level], max_new_tokens=4)
    assert not caplog.text


@pytest.mark.parametrize(("target", "level"), [("llama", "mixtral"), ("qwen3_moe", "llama"), ("olmoe", "qwen2_moe")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixtures_and_dense_models_draft_for_each_other(target, level, dtype):
    model, draft, inputs = tiny(target, dtype=dtype), tiny(level, dtype=dtype, seed=1), prompts([5, 13, 1, 8])
    options = {"do_sample": False, "max_new_tokens": 20}
    stock = model.generate(**inputs, **options, assistant_models=[])
    config = SpeculationConfig(num_draft_tokens=3, confidence_threshold=0.0)
    for levels in ([draft], [draft, "ngram"]):
        out = model.generate(**inputs, **options, assistant_models=levels, speculation_config=config)
        assert torch.equal(out, stock)
        assert hf_mlspec.last_stats(model).levels[0].drafted > 0
