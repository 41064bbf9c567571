"""Does a float16 model run compiled on the CPU, as exactly as in float32, and are its changes noticed?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import random_model
from models import EOS, near, prompts, tiny, together

import hf_mlspec
from hf_mlspec.engines.choose import engine_of, required_decoder
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled kernels")
KINDS = ("gpt2", "gemma3", "phi3", "cohere2", "qwen3-moe", "gpt-oss", "qwen3-next")
IDS = [[5, 9, 3, 22, 41, 7, 30], [8, 8, 2, 19]]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_it_computes_is_what_its_weights_say(kind):
    """In float32, as a float32 copy of the modules does."""
    model = random_model(kind, torch.float16)
    exact = copy.deepcopy(model).float()
    assert engine_of(model).name == "cpu"
    for ids, row in zip(IDS, token_logprobs(model, IDS), strict=True):
        scores = torch.log_softmax(exact(torch.tensor([ids])).logits[0, :-1], -1)
        right = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].float()
        torch.testing.assert_close(row.logprobs, right, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("levels", [["mxfp4"], ["early_exit:1", "prompt_lookup"], ["near"]], ids="+".join)
def test_a_chain_writes_what_the_target_alone_writes(levels, how):
    target, inputs = tiny(seed=2, dtype=torch.float16), prompts([9, 4, 13])
    levels = [near(target) if level == "near" else level for level in levels]
    written = []
    for below in ([], levels):
        torch.manual_seed(5)
        how = {"do_sample": False, **how}
        out = target.generate(**inputs, **how, max_new_tokens=16, eos_token_id=EOS, assistant_models=below)
        written.append(out.tolist())
    assert written[0] == written[1]
    assert engine_of(target).name == "cpu"


def test_a_returned_cache_has_the_dtype_of_the_model_and_goes_on():
    target, inputs = tiny(seed=2, dtype=torch.float16), prompts([6])
    until = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    first = target.generate(**inputs, max_new_tokens=6, assistant_models=["mxfp4"], use_cache=True, **until)
    assert {layer.keys.dtype for layer in first.past_key_values.layers} == {torch.float16}
    whole = target.generate(**inputs, max_new_tokens=12, assistant_models=[], **until).sequences
    for levels in (["mxfp4"], None):
        given = {} if levels is None else {"assistant_models": levels}
        kept = {"past_key_values": first.past_key_values, "max_new_tokens": 2}
        more = target.generate(first.sequences, **kept, **given, **until)
        assert more.sequences[0].tolist() == whole[0, :14].tolist()
        first = target.generate(**inputs, max_new_tokens=6, assistant_models=["mxfp4"], **until)


def test_a_change_of_a_weight_is_noticed():
    target, inputs = tiny(seed=2, dtype=torch.float16), prompts([6])
    before = together(target, inputs, [], max_new_tokens=8, eos_token_id=None)
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight.mul_(-3)
    assert together(target, inputs, [], max_new_tokens=8, eos_token_id=None) != before


def test_prepared_it_runs_under_plain_generate():
    target = hf_mlspec.prepare(tiny(seed=2, dtype=torch.float16))
    inputs = prompts([6, 9])
    alone = together(target, inputs, [], max_new_tokens=8, eos_token_id=EOS)
    stock = target.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=EOS)
    assert [row[: len(own)] for row, own in zip(stock[:, 9:].tolist(), alone, strict=True)] == alone
    assert engine_of(target).name == "cpu"


def test_the_decoder_of_gpus_says_that_it_does_not_take_it():
    with pytest.raises(ValueError, match=r"is torch.float16; the compiled decoder takes"):
        required_decoder(tiny(dtype=torch.float16), "cuda")
