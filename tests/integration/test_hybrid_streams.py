"""Do rows with recurrent states join and leave on the engine of GPUs, captured and not? Here by the ops of the CPU."""

from __future__ import annotations

import pytest
import torch
from decoders import PACKED_SHAPE, random_model
from models import prompts

import hf_mlspec
from hf_mlspec import Request

LENGTHS, LIMITS = (9, 4, 17, 30, 1, 12, 6), (20, 3, 15, 11, 2, 23, 8)
OPTIONS = {"do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("config", [None, {"num_draft_tokens": 3}], ids=["auto", "given"])
@pytest.mark.parametrize("levels", [[], ["mxfp4"], ["mxfp4", "llama"], ["qwen3.5"]], ids=str)
def test_requests_get_what_the_target_writes_for_each_alone(levels, config):
    model = hf_mlspec.prepare(random_model("qwen3.5", torch.bfloat16, **PACKED_SHAPE), engine="cuda")
    drafts = [random_model(word, torch.bfloat16) if word in ("llama", "qwen3.5") else word for word in levels]
    shared = prompts([40])["input_ids"][0].tolist()
    rows = [shared[:7] + prompts([n])["input_ids"][0].tolist() for n in LENGTHS]
    wanted = []
    for row, limit in zip(rows, LIMITS, strict=True):
        alone = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.int64)}
        out = model.generate(**alone, **OPTIONS, pad_token_id=0, max_new_tokens=limit, assistant_models=[])
        wanted.append(out[0, len(row) :].tolist())
    asked = [Request(row, id=n, max_new_tokens=LIMITS[n]) for n, row in enumerate(rows)]
    done = hf_mlspec.generate_stream(
        model, asked, assistant_models=drafts, max_batch=3, speculation_config=config, **OPTIONS
    )
    found = {one.id: one for one in done}
    assert [found[n].error for n in range(len(rows))] == [None] * len(rows)
    assert [found[n].new_tokens for n in range(len(rows))] == wanted
