"""On a GPU: does a model of lookup-table planes decode compiled, at every width, and draft for itself in a graph?"""

from __future__ import annotations

import pytest
import torch
from decoder_cases import check_captured_chain, check_levels, check_near_float64
from decoders import random_model
from lut_models import lut_packed
from torch import nn

from hf_mlspec.nn.switch import precision_switch

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def on_gpu(name: str = "llama", stored: int = 8, least: int = 3, **options) -> nn.Module:
    return lut_packed(random_model(name, torch.bfloat16, **SHAPE, **options), stored, least).cuda()


@pytest.mark.parametrize(("name", "stored", "least"), [("llama", 8, 1), ("phi3", 4, 3), ("gemma3", 5, 5)])
def test_every_width_is_what_the_modules_compute_in_steps_with_the_same_bits(name, stored, least):
    model = on_gpu(name, stored, least)
    choices = precision_switch(model).bit_choices
    assert len(choices) == stored - least + 1
    check_levels(model, [f"planes{bits.weight}" for bits in choices])


def test_near_float64_with_all_planes():
    check_near_float64(on_gpu(tie_word_embeddings=False))


@pytest.mark.parametrize("levels", [["planes3"], ["planes5", "planes3"], ["planes4", "prompt_lookup"]], ids=str)
def test_a_captured_chain_writes_what_the_target_alone_writes(levels):
    check_captured_chain(on_gpu(stored=6), levels)
