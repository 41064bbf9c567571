"""On a GPU: do layers whose inputs are ordered compute what their dense weights say, in steps, prompts and chains?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, in_float64, random_model
from models import packed, prompts
from torch import nn

import hf_mlspec
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.transforms import ORDER

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "tie_word_embeddings": False}
LENGTH = 100


def ordered(weights: str = "int4", **settings) -> nn.Module:
    """A packed model on the GPU, the inputs of every layer in an order of its own or of those that share them."""
    model, kept = packed(random_model("llama", torch.bfloat16, **SHAPE), weights, keep_head=False, **settings), {}
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            block, _, leaf = path.rpartition(".")
            place = block, {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(leaf, leaf)
            seed = torch.Generator().manual_seed(len(kept))
            order = kept.setdefault(place, torch.randperm(module.in_features, generator=seed).int())
            module.transform_(ORDER, {"order": order})
    return model.cuda()


@pytest.mark.parametrize(("weights", "settings"), [("int4", {}), ("int4", {"symmetric": False}), ("mxfp4", {}),
                                                   ("planes", {}), ("nested", {})], ids=str)  # fmt: skip
def test_near_float64_in_prompts_and_in_steps_with_the_same_bits(weights, settings):
    model = ordered(weights, **settings)
    ids = torch.randint(1, 199, (2, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.no_grad():
        exact = in_float64(model).cuda()(torch.tensor(ids).cuda()).logits
    decoder = CudaDecoder(model)
    together = torch.stack(Lanes(decoder, 2, slots=128).feed(ids))
    assert (together - exact).abs().max() < 0.05 * exact.abs().max()
    single = Lanes(decoder, 2, slots=128)
    steps = [torch.stack(single.feed([row[i : i + 1] for row in ids])) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, dim=1), together)


@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4"], ["early_exit:1"]], ids=str)
def test_a_captured_chain_writes_what_the_target_alone_writes(levels):
    model = hf_mlspec.prepare(ordered(), engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40]).items()}
    options = {"do_sample": False, "max_new_tokens": 48, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
