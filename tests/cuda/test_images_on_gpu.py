"""Do prompts with an image go on compiled on a GPU, and do chains write what the model alone writes?"""

from __future__ import annotations

import pytest
import torch
from wrappers import random_wrapper

from hf_mlspec.engines.choose import engine_of

IMAGE = 190


def seen(name: str) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    ids = torch.tensor([[5, 9, 192, *[IMAGE] * 4, 193, 17, 23, 60]])
    if name.startswith("qwen"):
        found = {"input_ids": ids, "pixel_values": torch.randn(16, 1176, generator=draw).bfloat16(),
                 "image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (ids == IMAGE).int()}  # fmt: skip
    else:
        found = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 28, 28, generator=draw).bfloat16(),
                 "token_type_ids": (ids == IMAGE).long()}  # fmt: skip
    return {key: value.cuda() for key, value in found.items()}


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl"])
def test_chains_behind_an_image(name):
    model = random_wrapper(name, torch.bfloat16).cuda()
    assert engine_of(model).name == "cuda"
    how = {"max_new_tokens": 12, "do_sample": False}
    alone = model.generate(**seen(name), **how, assistant_models=[])
    for levels in (["mxfp4"], ["early_exit:1", "prompt_lookup"]):
        assert torch.equal(model.generate(**seen(name), **how, assistant_models=levels), alone)
