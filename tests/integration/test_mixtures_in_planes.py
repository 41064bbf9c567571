"""Are experts of a mixture put in bit-planes as its linears are, saved, loaded, cast, and drafted with?"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.nn.expert_modules import is_experts
from hf_mlspec.nn.plane_experts import PlaneExperts
from tests.models import MIXTURES, prompts, tiny

BF16 = torch.bfloat16
INPUTS = prompts([8, 5])
KINDS = [*MIXTURES, "gpt_oss"]
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def write(target, *chain):
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    return target.generate(**INPUTS, **options, assistant_models=list(chain))


def experts_of(model: nn.Module) -> list[PlaneExperts]:
    return [module for module in model.modules() if isinstance(module, PlaneExperts)]


def loaded(folder, kind: str, **settings) -> nn.Module:
    tiny(kind, dtype=BF16, **SIZES).save_pretrained(folder / "dense")
    config = MLSpecConfig("bitplanes", group_size=32, **settings)
    return AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=BF16, quantization_config=config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_in_planes_drafts_with_its_first_ones(kind, tmp_path):
    model = loaded(tmp_path, kind)
    assert len(experts_of(model)) == 2
    assert not any(map(is_experts, model.modules()))
    expected = write(model)
    for chain in (["planes4"], ["planes6", "planes3"], ["planes4", "experts:1"], ["experts:1"]):
        assert torch.equal(write(model, *chain), expected), chain
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert len(experts_of(again)) == 2
    assert torch.equal(write(again, "planes4"), expected)
    assert not experts_of(again.dequantize())


@pytest.mark.parametrize("word", ["int3", "int2", "ternary"])
def test_casts_hold_experts_and_are_saved(word, tmp_path):
    model = tiny("qwen3_moe", dtype=BF16, **SIZES)
    expected = write(model)
    cast = hf_mlspec.direct_cast(model, word)
    assert len(experts_of(cast)) == 2
    assert torch.equal(write(model, cast), expected)
    assert torch.equal(write(model, word), expected)
    cast.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(experts_of(again)) == 2
    assert torch.equal(again(INPUTS["input_ids"]).logits, cast(INPUTS["input_ids"]).logits)


def test_experts_that_are_kept_stay_so(tmp_path):
    model = loaded(tmp_path, "qwen3_moe", skip_modules=["mlp.experts"])
    assert not experts_of(model)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert not experts_of(again)
    assert torch.equal(write(again), write(model))


def test_folders_of_earlier_versions_whose_experts_are_dense_load(tmp_path):
    """They do not say that experts were kept: experts could not be packed."""
    model = loaded(tmp_path, "qwen3_moe", skip_modules=["mlp.experts"])
    expected = write(model)
    config = model.config.quantization_config
    config.skip_modules = None
    config.modules_to_not_convert = [name for name in config.modules_to_not_convert if "experts" not in name]
    model.save_pretrained(tmp_path / "earlier")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "earlier")
    assert not experts_of(again)
    assert torch.equal(write(again), expected)


def test_damaged_experts_are_named(tmp_path):
    loaded(tmp_path, "qwen3_moe").save_pretrained(tmp_path / "packed")
    file = tmp_path / "packed" / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.mlp.experts.down_proj"
    good = state[f"{name}_zero_doubled"].clone()
    state[f"{name}_zero_doubled"][2] += 1
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj of expert 2: .*zero_doubled"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    state[f"{name}_zero_doubled"] = good
    del state[f"{name}_planes"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj_planes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_experts_with_nan_are_named(tmp_path):
    model = tiny("qwen3_moe", dtype=BF16, **SIZES)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj of expert 3 holds 1 NaN"):
        hf_mlspec.direct_cast(model, "int3")
