"""Do calls beyond 131,072 tokens write what transformers writes, and which lengths are refused?

The keys and values of the long text are given, random ones, so that only its end is computed.
"""

from __future__ import annotations

import models
import pytest
import torch
from models import prompts, tiny
from transformers import DynamicCache

import hf_mlspec
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

LONG = 131_080
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 32_768}
ROPES = {
    "yarn": YARN,
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
}  # fmt: skip
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(not has_compiled_decoder(), reason="the kernels are not built"))
    if name != "modules"
    else name
    for name in ("cpu", "cuda", "modules")
]


def filled(model, count: int) -> DynamicCache:
    """Keys and values of `count` tokens that a model might have read."""
    config, generator, cache = model.config, torch.Generator().manual_seed(7), DynamicCache()
    shape = 1, config.num_key_value_heads, count, config.head_dim
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, generator=generator, dtype=model.dtype) for _ in range(2)), layer)
    return cache


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ROPES)
def test_tokens_beyond_131072_positions_are_those_of_transformers(kind, engine):
    model = tiny(seed=2, dtype=torch.float32, rope_parameters=ROPES[kind], max_position_embeddings=262_144,
                 num_hidden_layers=1)  # fmt: skip
    ids = prompts([LONG])
    with torch.no_grad():
        stock = model.generate(**ids, **OPTIONS, past_key_values=filled(model, LONG - 3))
    short = tiny(seed=3, dtype=torch.float32, max_position_embeddings=64)
    for chain in ([], ["prompt_lookup"], [short]):  # the last drafts from the end of the row
        cache = filled(model, LONG - 3)
        out = model.generate(**ids, **OPTIONS, past_key_values=cache, assistant_models=chain,
                             speculation_config={"engine": engine})  # fmt: skip
        assert torch.equal(out, stock)
        assert cache.get_seq_length() == LONG + 11
    stats = hf_mlspec.last_stats(model)
    assert stats.target_cache_bytes > LONG * 2 * 2 * 8 * 4 > stats.levels[0].cache_bytes
    assert stats.levels[0].drafted


@pytest.mark.parametrize("given", [262_144, 32_768], ids=["extended", "as before it was extended"])
def test_yarn_has_its_original_positions_times_its_factor(given):
    model = tiny(rope_parameters=YARN, max_position_embeddings=given)
    words = {
        262_144: r"40 prompt tokens and up to 262105 new ones exceed the 262144 positions of the target "
                 r"\(max_position_embeddings\): pass max_new_tokens=262104 or less",
        32_768: r"exceed the 262144 positions of the target \(original_max_position_embeddings times the factor of",
    }  # fmt: skip
    models.refused(ValueError, words[given], prompts([40]), model, assistant_models=[], max_new_tokens=262_105)
    out = model.generate(**prompts([40]), **OPTIONS | {"max_new_tokens": 3}, assistant_models=["early_exit:1"])
    assert out.shape == (1, 43)


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn of one"])
def test_other_rotations_have_the_positions_of_the_config(kind):
    rope = {**YARN, "factor": 1.0} if kind == "yarn of one" else ROPES[kind]
    model = tiny(rope_parameters=rope, max_position_embeddings=32_768, num_hidden_layers=1)
    models.refused(ValueError, r"32770 new ones exceed the 32768 positions", prompts([4]), model, assistant_models=[],
                   max_new_tokens=32_770)  # fmt: skip
    models.refused(ValueError, r"32769 prompt tokens .* exceed the 32768 positions .*shorten the prompt",
                   prompts([32_769]), model, assistant_models=[], max_new_tokens=2)  # fmt: skip
