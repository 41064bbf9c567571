"""Does a model whose layers lie on two GPUs write with levels what it writes alone?"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_mlspec import demo_pair, last_stats

PROMPT = torch.tensor([[5, 17, 40, 3, 200, 8]])
TARGET, DRAFT = map(str, demo_pair())
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")


def halves(path: str) -> dict[str, int]:
    """The first half of a model's layers on one GPU, the others on the next."""
    layers = AutoConfig.from_pretrained(path).num_hidden_layers
    places = {f"model.layers.{index}": int(2 * index >= layers) for index in range(layers)}
    ends = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0}  # tied to the embedding
    return {**ends, **places}


@needs_two
@pytest.mark.parametrize("levels", [["mxfp4"], [DRAFT], ["mxfp4", DRAFT], ["prompt_lookup"]], ids=str)
def test_chains_write_what_the_model_alone_writes(levels):
    """Float32, in which ties do not hang on the shape of a product."""
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, device_map=halves(TARGET)).eval()
    assert {parameter.device.index for parameter in model.parameters()} == {0, 1}
    ids = PROMPT.to("cuda:0")
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24}
    alone = model.generate(ids, assistant_models=[], **how)
    assert torch.equal(model.generate(ids, assistant_models=levels, **how), alone)
    assert sum(level.drafted for level in last_stats(model).levels) > 0
    assert torch.equal(model.generate(ids, **how), alone)
