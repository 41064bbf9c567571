"""May the scales of a format be of any floating dtype? The toy format, with scales of 8, 32 and 64 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import toy_format
from models import prompts, tiny
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.formats import CastWord, register, unregister
from hf_mlspec.formats.damage import require_finite
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.packed_formats import Packing, register_packing, unregister_packing
from hf_mlspec.precision import Family

GREEDY = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
SHIFT = 2.0**12  # scales of tiny models, into the range of float8


def toy(dtype):
    """The toy format with scales of ``dtype``, and nothing said of their values."""

    def zeros(shape, device, **options):
        codes, scale = toy_format.zeros(shape, device)
        return toy_format.Toy6Parts(codes, torch.ones(scale.shape, device=device).to(dtype))

    @dataclass(frozen=True)
    class Weight(toy_format.Toy6Weight):
        @classmethod
        def from_dense(cls, weight, name="weight"):
            own = toy_format.Toy6Weight.from_dense(weight, name)
            return cls(own.weight_codes, (own.weight_scale.float() * SHIFT).to(dtype), name)

        def dequantize(self, dtype=torch.float32):
            scale = self.weight_scale.float() / SHIFT
            return replace(self, weight_scale=scale)._plain(dtype)

        def _plain(self, dtype):
            return toy_format.Toy6Weight.dequantize(self, dtype)

        def validate(self, out_features=None, in_features=None):
            shape = out_features or self.out_features, in_features or self.in_features
            self.require_like(zeros(shape, torch.device("meta")), "toyf")
            require_finite(self.name, "weight_scale", self.weight_scale)
            return self

    return replace(
        toy_format.FORMAT, word="toyf", written="toyf", title="toyf", weight=Weight, zeros=zeros, value_checks=None,
        families=(Family("toyf", ((6, 16),), {"toyf": 6}, examples=("toyf",)),), casts=(CastWord("toyf"),),
    )  # fmt: skip


class ToyLinear(PackedLinear):
    format = "toyf"


@pytest.fixture(params=[torch.float8_e4m3fn, torch.float32, torch.float64], ids=str)
def dtype(request):
    register(toy(request.param))
    register_packing(Packing(ToyLinear))
    yield request.param
    unregister_packing("toyf")
    unregister("toyf")


@pytest.fixture
def model(dtype, tmp_path):
    tiny(seed=2, dtype=torch.float32).save_pretrained(tmp_path / "dense")
    config = MLSpecConfig("toyf")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config).eval()


def test_saved_loaded_and_cast_with_their_bits(model, dtype, tmp_path):
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").eval()
    layer = again.model.layers[0].mlp.up_proj
    assert (type(layer), layer.weight_scale.dtype) == (ToyLinear, dtype)
    held = model.state_dict()
    assert all(torch.equal(t.view(torch.uint8), held[n].view(torch.uint8)) for n, t in again.state_dict().items())
    scale = layer.weight_scale.detach().clone()
    layer.bfloat16().float()
    assert layer.weight_scale.dtype == dtype
    assert torch.equal(layer.weight_scale.view(torch.uint8), scale.view(torch.uint8))
    with pytest.raises(TypeError, match=rf"ToyLinear: its weight_scale is {dtype} and cannot be cast"):
        layer._apply(lambda tensor: tensor.half())


def test_a_nan_scale_is_damage(model, tmp_path):
    scale = model.model.layers[1].self_attn.o_proj.weight_scale.data
    scale[3, 0] = float("nan")
    model.save_pretrained(tmp_path / "packed")
    said = r"layers\.1\.self_attn\.o_proj: weight_scale holds 1 values that are NaN or Inf, .* row 3, group 0"
    with pytest.raises(ValueError, match=said):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_drafts(dtype):
    target, inputs = tiny(seed=2, dtype=torch.float32), prompts([8, 5])
    alone = target.generate(**inputs, **GREEDY, assistant_models=[])
    assert torch.equal(target.generate(**inputs, **GREEDY, assistant_models=["toyf"]), alone)
    (level,) = hf_mlspec.last_stats(target).levels
    assert level.accepted > level.drafted / 2
