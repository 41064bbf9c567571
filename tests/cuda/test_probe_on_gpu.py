"""Does a probe recognise the form of a class without a description on a GPU, whose model then runs captured?"""

from __future__ import annotations

import torch
from decoders import random_model
from transformers import LlamaForCausalLM

import hf_mlspec
from hf_mlspec.engines.choose import engine_of


class Renamed(LlamaForCausalLM):
    """Of another name alone."""


def test_a_class_without_a_description_runs_captured():
    model = random_model("llama", torch.bfloat16, hidden_size=128, intermediate_size=176, head_dim=32).cuda()
    ids = torch.tensor([[5, 9, 40]], device="cuda")
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, assistant_models=[], **how)
    model.__class__ = Renamed
    hf_mlspec.prepare(model)
    assert engine_of(model).name == "cuda"
    assert torch.equal(model.generate(ids, assistant_models=["mxfp4"], **how), expected)
    assert torch.equal(model.generate(ids, **how), expected)
