"""Are experts of a mixture nested like its linears, undone after an error, saved, loaded, cast, drafted with?"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.formats import NestedWeight
from hf_mlspec.nn import nest_in_place
from hf_mlspec.nn.expert_modules import is_experts
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.nested_experts import NestedExperts
from hf_mlspec.precision import Bits
from tests.models import MIXTURES, prompts, tiny

BF16 = torch.bfloat16
INPUTS = prompts([8, 5])
KINDS = [*MIXTURES, "gpt_oss"]
KEYS = "gate_up_proj", "down_proj"
FAR_BELOW = 2.0**-60
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def write(target, *chain):
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    return target.generate(**INPUTS, **options, assistant_models=list(chain))


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def experts_of(model: nn.Module, kind: type = NestedExperts) -> list:
    return [module for module in model.modules() if isinstance(module, kind)]


def with_escapes(model: nn.Module, *places: tuple[int, int]) -> nn.Module:
    """Values far below their block's largest, in these rows of these experts of the second layer."""
    experts = model.model.layers[1].mlp.experts
    weight = experts.down_proj.transpose(1, 2) if experts.is_transposed else experts.down_proj
    with torch.no_grad():
        for expert, row in places:
            weight[expert, row, 3] = FAR_BELOW
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_nested_and_back_bit_for_bit(kind):
    model = tiny(kind, dtype=BF16)
    before, expected = bits(model), write(model)
    hf_mlspec.nest(model)
    assert len(experts_of(model)) == 2
    assert not any(map(is_experts, model.modules()))
    for chain in ([], ["nested"], ["nested4"], ["nested", "experts:1"], ["mxfp4"], ["experts:1"]):
        assert torch.equal(write(model, *chain), expected), chain
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
    assert same_bits(bits(hf_mlspec.unnest(model)), before)
    assert not experts_of(model)


@pytest.mark.parametrize("key", KEYS)
def test_experts_take_no_more_than_their_exponents(key, monkeypatch):
    """On the CPU they are nested where they lie; where someone outside holds one projection, neither is."""
    in_place = []
    monkeypatch.setattr(nest_in_place.NestingInPlace, "tiles", lambda self, tiles=nest_in_place.NestingInPlace.tiles:
                        in_place.append(1) or tiles(self))
    model = tiny("qwen3_moe", dtype=BF16)
    before, expected = bits(model), write(model)
    held = getattr(model.model.layers[0].mlp.experts, key)
    kept, size = held.detach().clone(), sum(p.nbytes for p in model.model.layers[1].mlp.experts.parameters())
    hf_mlspec.nest(model)
    assert torch.equal(held, kept)
    linears = sum(isinstance(module, hf_mlspec.nn.nested.NestedLinear) for module in model.modules())
    assert len(in_place) == linears + 2
    assert torch.equal(write(model, "nested"), expected)
    assert sum(p.nbytes for p in experts_of(model)[1].parameters()) <= 1.017 * size + 100
    assert same_bits(bits(hf_mlspec.unnest(model)), before)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_an_error_leaves_experts_as_they_were(monkeypatch, cut):
    """Whichever of the four projections it comes in."""
    model, calls = tiny("olmoe", dtype=BF16), []
    before, modules = bits(model), [module for module in model.modules() if is_experts(module)]
    tiles = nest_in_place.NestingInPlace.tiles

    def failing(self):
        calls.append(1)
        parts = tiles(self)
        if len(calls) == cut:
            raise KeyboardInterrupt
        return parts

    monkeypatch.setattr(nest_in_place.NestingInPlace, "tiles", failing)
    with pytest.raises(KeyboardInterrupt):
        hf_mlspec.nest(model)
    assert same_bits(bits(model), before)
    assert sum(map(is_experts, model.modules())) == len(modules)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_escapes_of_experts_are_exact_saved_and_loaded(kind, tmp_path):
    """One row of each expert is kept whole, where one expert has an escape; two are too many of 32."""
    model = with_escapes(tiny(kind, dtype=BF16), (1, 5), (3, 0))
    before, expected = bits(model), write(model)
    hf_mlspec.nest(model)
    nested = experts_of(model)[1]
    assert torch.equal(write(model), expected)
    assert torch.equal(write(model, "nested"), expected)
    assert nested.is_prepacked
    assert nested.escaped_rows("down_proj") == 1
    model.save_pretrained(tmp_path)
    index = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.experts.down_proj_escape_index"]
    assert len(index) == 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(write(again, "nested"), expected)
    assert same_bits(bits(hf_mlspec.unnest(again)), before)
    many = with_escapes(tiny(kind, dtype=BF16), (1, 5), (1, 6))
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.experts \(down_proj: 2 values below .* 2 of 32 rows"):
        hf_mlspec.nest(many)
    assert len(experts_of(many)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_nested(kind, tmp_path):
    model = tiny(kind, dtype=BF16)
    before, expected = bits(model), write(model)
    model.save_pretrained(tmp_path / "dense")
    hf_mlspec.nest(model).save_pretrained(tmp_path / "nested")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "nested")
    assert len(experts_of(again)) == 2
    assert torch.equal(write(again, "nested"), expected)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=BF16, quantization_config=MLSpecConfig("nested-bf16")
    )
    assert len(experts_of(loaded)) == 2
    assert same_bits(bits(loaded), bits(again))
    assert same_bits(bits(hf_mlspec.unnest(again)), before)
    assert same_bits(bits(loaded.dequantize()), before)


def test_experts_that_are_kept_stay_so(tmp_path):
    model = tiny("qwen3_moe", dtype=BF16)
    model.save_pretrained(tmp_path / "dense")
    config = MLSpecConfig("nested-bf16", skip_modules=["mlp.experts"])
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=BF16, quantization_config=config)
    assert not experts_of(kept)
    kept.save_pretrained(tmp_path / "kept")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    assert not experts_of(again)
    assert torch.equal(write(again, "nested"), write(model))


def test_a_cast_of_nested_experts_is_that_of_the_dense_ones(tmp_path):
    model = tiny("qwen3_moe", dtype=BF16)
    plain = hf_mlspec.direct_cast(model, "mxfp4")
    expected = bits(plain)
    cast = hf_mlspec.direct_cast(hf_mlspec.nest(model), "mxfp4")
    assert len(experts_of(cast, PackedExperts)) == 2
    assert not experts_of(cast)
    found = bits(cast)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if "experts" in name)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    shared = hf_mlspec.direct_cast(tiny("qwen3_moe", dtype=BF16, **sizes), "int3")
    model = hf_mlspec.nest(tiny("qwen3_moe", dtype=BF16, **sizes))
    draft = hf_mlspec.direct_cast(model, "int3")
    draft.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(INPUTS["input_ids"]).logits, shared(INPUTS["input_ids"]).logits)


@pytest.mark.parametrize("codebook", ["lloyd_max", "mxfp4", "fitted"])
def test_the_draft_is_that_of_a_nested_weight_of_all_rows(codebook):
    model = tiny("qwen3_moe", dtype=BF16)
    dense = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    weight = NestedWeight.from_dense(dense.flatten(0, 1), codebook)
    hf_mlspec.nest(model, codebook)
    found = experts_of(model)[0]
    assert torch.equal(found.dequantized_draft("gate_up_proj"), weight.dequantize_draft().view(dense.shape))
    assert torch.equal(found.dequantized("gate_up_proj"), dense)
    assert torch.equal(found.prepack_().dequantized("gate_up_proj"), dense)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_an_expert_multiplies_as_a_nested_linear_does(kind):
    """Exactly and as drafts, with rows kept whole, too."""
    model = with_escapes(tiny(kind, dtype=BF16), (1, 5))
    hf_mlspec.nest(model)
    experts, x = experts_of(model)[1], torch.randn(3, 32, dtype=BF16)
    for weight_bits, activation_bits in ((16, 16), (4, 16), (4, 8)):
        with experts.switch.at(Bits(weight_bits, activation_bits)):
            for key in KEYS:
                wide = torch.randn(3, experts.original.sizes[key][1], dtype=BF16) if key == "down_proj" else x
                for expert in range(4):
                    dense = (experts.dequantized if weight_bits == 16 else experts.dequantized_draft)(key, BF16)
                    found = experts._multiply(key, expert, wide)
                    bias = experts._parameters[f"{key}_bias"][expert] if experts.has_bias else 0
                    expected = wide.double() @ dense[expert].double().T + bias
                    error = (found.double() - expected).norm() / expected.norm()
                    assert error < (0.02 if activation_bits == 8 else 0.006), (key, expert, weight_bits)


def test_what_is_wrong_names_layer_and_expert(tmp_path):
    model = tiny("qwen3_moe", dtype=BF16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 2, 1] = torch.nan
    before = bits(model)
    with pytest.raises(ValueError, match=r"nest: model\.layers\.1\.mlp\.experts\.down_proj of expert 3 holds 1 NaN"):
        hf_mlspec.nest(model)
    assert bits(model).keys() == before.keys()
    mixed = tiny("qwen3_moe", dtype=BF16)
    mixed.model.layers[0].mlp.experts.down_proj.data = mixed.model.layers[0].mlp.experts.down_proj.float()
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp\.experts \(its down_proj is torch\.float32\)"):
        hf_mlspec.nest(mixed)
    assert len(experts_of(mixed)) == 1
    with pytest.raises(ValueError, match="already nested"):
        hf_mlspec.nest(mixed)
    with pytest.raises(ValueError, match="NestedExperts keeps no copy"):
        experts_of(mixed)[0].materialize(BF16)


def test_damaged_experts_are_named(tmp_path):
    hf_mlspec.nest(tiny("qwen3_moe", dtype=BF16)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.experts.down_proj_codebook"][2] = 0
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj of expert 2: .*codebook"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    del state["model.layers.1.mlp.experts.down_proj_codebook"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj_codebook"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
