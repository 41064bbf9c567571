"""On a GPU: are rows of codes those of the CPU, and does a model with both ends in two parts write its text?"""

from __future__ import annotations

import pytest
import torch
from linear_cases import DEVICE
from models import prompts, tiny
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig, ops
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES
from hf_mlspec.nn.zipper_embedding import ZipperEmbedding
from hf_mlspec.ops.zipper import split_of
from hf_mlspec.ops.zipper_table import prepack_table, table_of, unprepack_table

pytestmark = pytest.mark.usefixtures("kernels_are_required")
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rows", "width"), [(1, 32), (37, 160), (300, 4096), (9, 8192 + 96), (3, 131072)])
@pytest.mark.parametrize("scale", [1.0, 11.3125])
def test_rows_are_those_of_the_weight(mode, rows, width, scale):
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    drawn[rows // 2] = 1.0  # a row of places alone
    weight = ZipperWeight.from_dense(drawn, mode=mode)
    parts = prepack_table(*(part.to(DEVICE) for part in weight.parts))
    again = unprepack_table(parts)
    assert all(torch.equal(own.cpu(), other) for own, other in zip(again, weight.parts, strict=True))
    table = table_of(parts, split_of(parts.split))
    ids = torch.tensor([0, rows - 1, rows // 2, -4, rows + 3, rows // 3], dtype=torch.int32)
    wanted = weight.dequantize(torch.bfloat16)[ids.clamp(0, rows - 1).long()]
    wanted = wanted if scale == 1 else (wanted.float() * scale).to(torch.bfloat16)
    for own in (ids, ids[:1]):
        found = ops.zipper_rows(own.to(DEVICE), *table, scale)
        assert torch.equal(found.cpu().view(torch.int16), wanted[: len(own)].view(torch.int16))
    assert ops.zipper_rows(ids[:0].to(DEVICE), *table).shape == (0, width)


def test_a_table_that_keeps_all_planes():
    weight = ZipperWeight.from_dense(torch.ones(40, 256))
    parts = prepack_table(*(part.to(DEVICE) for part in weight.parts))
    assert len(parts.split) == 4
    found = ops.zipper_rows(torch.arange(40, dtype=torch.int32, device=DEVICE), *table_of(parts, weight.how))
    assert torch.equal(found.cpu(), weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("high_part", ["device", "host"])
def test_chains_write_what_the_model_writes(tmp_path, mode, high_part):
    shape = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    tiny("llama", seed=2, dtype=torch.bfloat16, tie_word_embeddings=True, **shape).save_pretrained(tmp_path)
    config = MLSpecConfig("zipper", mode=mode, high_part=high_part, head_and_embedding=True)
    load = {"dtype": torch.bfloat16, "device_map": DEVICE}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, **load).eval()
    assert type(model.get_input_embeddings()) is ZipperEmbedding
    inputs = {name: part.to(DEVICE) for name, part in prompts([8, 5, 11]).items()}
    alone = model.generate(**inputs, **GREEDY, assistant_models=[])
    given = {"speculation_config": {"num_draft_tokens": 3}, "assistant_models": ["zipper-low"]}
    assert torch.equal(model.generate(**inputs, **GREEDY, **given), alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", **load).eval()
    assert torch.equal(again.generate(**inputs, **GREEDY, assistant_models=[]), alone)
