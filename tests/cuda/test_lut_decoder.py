"""On a GPU: does a model of lookup-table planes decode compiled, at every width, and draft for itself in a graph?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, in_float64, random_model
from lut_models import lut_packed
from models import prompts
from torch import nn

import hf_mlspec
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.switch import precision_switch

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
LENGTH = 60


def on_gpu(name: str = "llama", stored: int = 8, least: int = 3, **options) -> nn.Module:
    return lut_packed(random_model(name, torch.bfloat16, **SHAPE, **options), stored, least).cuda()


def random_ids(batch: int) -> list[list[int]]:
    return torch.randint(1, 199, (batch, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize(("name", "stored", "least"), [("llama", 8, 1), ("phi3", 4, 3), ("gemma3", 5, 5)])
def test_every_width_is_what_the_modules_compute_in_steps_with_the_same_bits(name, stored, least):
    model, ids = on_gpu(name, stored, least), random_ids(2)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    decoder, switch = CudaDecoder(model), precision_switch(model)
    assert len(switch.bit_choices) == stored - least + 1
    for bits in switch.bit_choices:
        with torch.no_grad(), switch.at(f"planes{bits.weight}"):
            modules = model(torch.tensor(ids).cuda()).logits.float()
        together = torch.stack(Lanes(decoder, 2, slots=128).feed(ids, bits=bits))
        assert (together.float() - modules).abs().mean() < 0.04 * modules.abs().mean(), bits
        single = Lanes(decoder, 2, slots=128)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids], bits=bits)) for i in range(LENGTH)]
        assert torch.equal(torch.cat(steps, dim=1), together), bits
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def test_near_float64_with_all_planes():
    model, ids = on_gpu(tie_word_embeddings=False), random_ids(2)
    with torch.no_grad():
        exact = in_float64(model).cuda()(torch.tensor(ids).cuda()).logits
    out = torch.stack(Lanes(CudaDecoder(model), 2, slots=128).feed(ids))
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("levels", [["planes3"], ["planes5", "planes3"], ["planes4", "prompt_lookup"]], ids=str)
def test_a_captured_chain_writes_what_the_target_alone_writes(levels):
    model = hf_mlspec.prepare(on_gpu(stored=6), engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40]).items()}
    options = {"do_sample": False, "max_new_tokens": 48, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    stats = hf_mlspec.last_stats(model)
    assert stats.levels[0].drafted > 0
    assert stats.capture_seconds > 0
