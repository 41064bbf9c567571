"""On a GPU: does a model with LoRA adapters run compiled, with the bits of its rows, and is every change noticed?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_cases import check_captured_chain, random_ids
from decoders import Lanes
from lora import add_lora
from models import tiny

import hf_mlspec
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.cuda.decoder import CudaDecoder

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": torch.bfloat16, "seed": 2}
LENGTH = 60


def adapted(places: tuple[str, ...] = ("proj",), **own):
    model = tiny(**SHAPE, **own)
    return model, add_lora(model, places, rank=5)


@pytest.mark.parametrize("places", [("proj",), ("q_proj", "v_proj"), ("o_proj", "up_proj")])
@torch.no_grad()
def test_logits_are_as_near_to_the_exact_ones_as_those_of_the_modules(places):
    """Roundings to bfloat16 alone are 3 to 5 %, what the adapters add is 17 to 50 %."""
    model, _ = adapted(places)
    rows = [[token % model.config.vocab_size for token in row] for row in random_ids(3)]
    exact = [copy.deepcopy(model).float()(torch.tensor([row])).logits[0] for row in rows]
    modules = [model(torch.tensor([row])).logits[0].float() for row in rows]
    decoder = CudaDecoder(model.cuda())
    for found, plain, right in zip(Lanes(decoder, 3).feed(rows), modules, exact, strict=True):
        error, rounding = ((own - right).norm() / right.norm() for own in (found.float().cpu(), plain))
        assert error < 1.25 * rounding < 0.07, (error, rounding)


def test_a_row_keeps_its_bits():
    """In a batch of 16, one by one, alone, in checks of nine."""
    model, _ = adapted()
    decoder, ids = CudaDecoder(model.cuda()), random_ids(16)
    together = torch.stack(Lanes(decoder, 16).feed(ids))
    single = Lanes(decoder, 2)
    steps = [torch.stack(single.feed([row[i : i + 1] for row in ids[:2]])) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, dim=1), together[:2])
    nine = Lanes(decoder, 1, slots=256)
    pieces = [nine.feed([ids[5][first : first + 9]])[0] for first in range(0, LENGTH, 9)]
    assert torch.equal(torch.cat(pieces), together[5])


@pytest.mark.parametrize("chain", [["mxfp4"], ["mxfp4", "early_exit:1"], ["nested"]])
def test_captured_chains(chain):
    model, _ = adapted()
    model.cuda()
    check_captured_chain(hf_mlspec.nest(model) if chain == ["nested"] else model, chain)


def test_a_switch_between_two_calls_is_noticed():
    model, layers = adapted()
    for layer in layers:
        layer.add("other", 3)
    hf_mlspec.prepare(model.cuda())
    ids, seen = torch.tensor([[5, 9, 3, 22]], device="cuda"), []
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    for name in ("default", "other", "none", "default"):
        for layer in layers:
            layer._active_adapter = [name]
        alone = model.generate(ids, **options, assistant_models=[])
        assert engine_of(model).name == "cuda"
        assert torch.equal(model.generate(ids, **options, assistant_models=["mxfp4"]), alone)
        seen.append(alone.tolist())
    assert seen[0] == seen[3]
    assert seen[0] != seen[1] != seen[2] != seen[0]
