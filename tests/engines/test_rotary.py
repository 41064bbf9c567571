"""Do rotary tables reach as far as a model does, with its own values, and without much memory on the way?"""

from __future__ import annotations

import pytest
import torch
from models import tiny

from hf_mlspec.engines.architecture import rotary
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

MANY = 262_144
ROPES = {
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 32_768},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
                 "factor": 4.0, "original_max_position_embeddings": 65_536},
}  # fmt: skip


def model(kind: str):
    return tiny(rope_parameters=ROPES[kind], max_position_embeddings=MANY, num_hidden_layers=1)


@pytest.mark.parametrize("kind", ROPES)
def test_tables_are_the_models_own_as_far_as_its_rotation_stays(kind):
    target = model(kind)
    border = rotary.rotary_border(target)
    assert border == {"dynamic": MANY, "longrope": 65_536}.get(kind)
    reach = border or MANY
    cos, sin = rotary.rope_tables(target.model.rotary_emb, [None], reach)[0]
    assert cos.shape == sin.shape == (reach, 4)
    for places in ([0, 1, 8191, 8192], [reach // 2, 131_071 % reach, 131_072 % reach], [reach - 1]):
        expected = target.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([places]))
        for found, own in zip((cos, sin), expected, strict=True):
            assert torch.equal(found[places], own[0, :, :4])


def test_longer_tables_begin_with_the_same_bits():
    embedding = model("yarn").model.rotary_emb
    long = rotary.rope_tables(embedding, [None], 20_000)[0]
    for reach in (1, 1024, 8193, 12_345):
        for short, whole in zip(rotary.rope_tables(embedding, [None], reach)[0], long, strict=True):
            assert torch.equal(short, whole[:reach])


def test_a_models_embedding_is_asked_for_few_positions_at_a_time(monkeypatch):
    embedding, asked = model("llama3").model.rotary_emb, []
    own = type(embedding).forward

    def counted(self, like, ids):
        asked.append(ids.numel())
        return own(self, like, ids)

    monkeypatch.setattr(type(embedding), "forward", counted)
    rotary.rope_tables(embedding, [None], 140_000)
    assert sum(asked) == 140_000
    assert max(asked) <= 8192


@pytest.mark.parametrize(
    ("count", "have", "border", "known", "expected"),
    [
        (5, 0, None, 4096, 1024),
        (1024, 1024, None, 4096, 1024),
        (1025, 1024, None, 4096, 2048),
        (1025, 1024, None, 1500, 1500),
        (2000, 1024, None, 1500, 2000),  # padding may lie beyond what the model knows
        (140_000, 131_072, None, 163_840, 163_840),
        (140_000, 131_072, None, None, 262_144),
        (200_000, 131_072, None, MANY, MANY),
        (5000, 1024, 4096, MANY, 4096),
        (5, 0, 64, 512, 64),
    ],
)
def test_tables_double_up_to_what_there_is_to_know(count, have, border, known, expected):
    assert rotary.grown_positions(count, have, border, known) == expected


def test_a_decoder_has_no_tables_beyond_its_positions_but_where_it_must():
    decoder = CudaDecoder(tiny(dtype=torch.bfloat16, max_position_embeddings=1500))
    decoder.reserve_positions(1025)
    assert decoder.positions == 1500
    decoder.reserve_positions(1501)
    assert decoder.positions == 1501


def test_tables_of_yarn_double_beyond_the_positions_from_before_it_was_extended():
    """Else each token behind them would have tables of its own, and a GPU keeps those that graphs may read."""
    rope = {**ROPES["yarn"], "factor": 4.0, "original_max_position_embeddings": 1024}
    target = tiny(dtype=torch.bfloat16, rope_parameters=rope, max_position_embeddings=1024)
    decoders = [CudaDecoder(target)]
    if has_compiled_decoder():
        decoders.append(CpuDecoder(target))
    for decoder in decoders:
        for count, positions in ((1025, 2048), (2000, 2048), (2049, 4096), (4096, 4096)):
            decoder.reserve_positions(count)
            assert decoder.positions == positions
