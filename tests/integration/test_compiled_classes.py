"""Does every compiled class write in chains what it writes alone, and compute with packed weights what modules do?"""

from __future__ import annotations

import pytest
import torch
from decoders import APART, CPU_CONFIGS, HYBRIDS, MIXTURES, random_model
from models import alone, packed, prompts, together
from transformers import PreTrainedModel

import hf_mlspec
from hf_mlspec.engines.architecture import KNOWN
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

LENGTHS = [14, 9, 5, 1]
NEW = 16
# Inputs of every linear in whole blocks.
BLOCKS = {"hidden_size": 96, "intermediate_size": 160}
OTHER_WORDS = {"helium": {"head_dim": 24}, "falcon": {"ffn_hidden_size": 160}, "opt": {"ffn_dim": 160}}
OTHER_WORDS |= {name: {"hidden_size_per_layer_input": 32} for name in ("gemma4-inputs", "gemma4-shared")}
OTHER_WORDS |= {"mamba2": {"num_heads": 12}, "bamba": {"mamba_n_heads": 12}}
OTHER_WORDS["granite-hybrid"] = {"mamba_n_heads": 12, "shared_intermediate_size": 160}
# Weights whose outputs are cut into q, k and v at other places than tiles have.
CUT = ("bigcode", "phi3")
HYBRID_MIXTURES = ("qwen3.5-moe", "qwen3-next", "llama4", "llama4-plain")


def one_of_each_class() -> list[str]:
    found: dict[str, str] = {}
    for name, (config, _) in {**CPU_CONFIGS, **MIXTURES, **HYBRIDS, **APART}.items():
        found.setdefault(config.__name__, name)
    return list(found.values())


NAMES = [*one_of_each_class(), *(name for name in APART if name not in ("gemma4", "llama4"))]


def target_of(name: str) -> PreTrainedModel:
    model = random_model(name, torch.float32, eos_token_id=1, tie_word_embeddings=False)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    return model


def test_every_described_class_is_among_them():
    assert {type(random_model(name, torch.float32)).__name__ for name in NAMES} == set(KNOWN)


@pytest.mark.filterwarnings("ignore:direct_cast")
@pytest.mark.parametrize("name", NAMES)
def test_a_chain_over_a_cast_writes_what_the_target_writes_alone(name):
    target, inputs = target_of(name), prompts(LENGTHS, vocab=199)
    written = alone(target, inputs, max_new_tokens=NEW)
    assert len({token for row in written for token in row}) > 2
    config = {"num_draft_tokens": 4, "confidence_threshold": 0.0}
    assert together(target, inputs, ["mxfp4"], max_new_tokens=NEW, speculation_config=config) == written
    assert isinstance(decoder_of(target, "cpu"), CpuDecoder)
    assert hf_mlspec.last_stats(target).levels[0].drafted > 0


@pytest.mark.parametrize("weights", ["mxfp4", "int4"])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*CUT, *MIXTURES, *HYBRID_MIXTURES)])
def test_packed_weights_compute_what_their_modules_do(name, weights):
    model = packed(random_model(name, torch.float32, **BLOCKS, **OTHER_WORDS.get(name, {})), weights)
    ids = torch.randint(1, 199, (1, 21), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        stock = model(ids).logits[0].double()
    engine = CpuEngine(model, CpuDecoder(model), capacity=32)
    engine.start(1, torch.device("cpu"))
    row, scored = ids[0].tolist(), []
    for end in (9, 10, 15, 21):
        scored.append(engine.feed([row[:end]])[0, -1].double())
    expected = stock[[8, 9, 14, 20]]
    assert float((torch.stack(scored) - expected).abs().max() / expected.abs().max()) < 0.02  # inputs are rounded
