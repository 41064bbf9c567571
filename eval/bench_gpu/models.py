"""Which models does the GPU benchmark decode with? Shapes with random weights, made on the device, and real pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval import targets
from hf_mlspec.formats import Int4Weight, PlanesWeight
from hf_mlspec.formats.int4_int8 import OUTLIERS, Int4Int8Weight
from hf_mlspec.nn.int4_int8 import Int4Int8Linear
from hf_mlspec.nn.linear import Int4Linear
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.switch import PrecisionSwitch

GROUP = 128  # elements of int4 weights that share a scale; 32 in tiny shapes


def random_model(shape: str, device: torch.device, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """BF16, on the device from the start; sizes: other than the shape's."""
    return targets.random_model(shape, str(device), seed, **sizes)


def random_int4_model(shape: str, device: torch.device, **sizes: int) -> PreTrainedModel:
    """The shape with random int4 codes (groups of 128) in every linear layer but the head, as MLSpecConfig packs it.

    Codes are drawn, not searched for: quantizing 8 billion random weights would say nothing and take its time.
    """
    return _drawn(random_model(shape, device, **sizes), PrecisionSwitch("int4", 16), _random_int4)


def random_outlier_model(shape: str, device: torch.device, **sizes: int) -> PreTrainedModel:
    """As `random_int4_model`, with the last 128 inputs of every layer in int8."""
    return _drawn(random_model(shape, device, **sizes), PrecisionSwitch("int4_int8", 16), _random_outliers)


def _drawn(
    model: PreTrainedModel, switch: PrecisionSwitch, draw: Callable[[nn.Linear, str, PrecisionSwitch], nn.Module]
) -> PreTrainedModel:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            model.set_submodule(name, draw(module, name, switch))
    return model


def _random_outliers(linear: nn.Linear, name: str, switch: PrecisionSwitch) -> Int4Int8Linear:
    (out_features, in_features), device = linear.weight.shape, linear.weight.device
    inputs = in_features - OUTLIERS
    codes = torch.randint(0, 256, (out_features, inputs // 2), dtype=torch.uint8, device=device)
    scale = torch.full((out_features, inputs // GROUP), 0.02 / 4.6, dtype=torch.float16, device=device)
    outlier = torch.randint(-119, 120, (out_features, OUTLIERS), dtype=torch.int8, device=device)
    outlier_scale = torch.full((out_features,), 0.02 / 69, dtype=torch.float16, device=device)
    weight = Int4Int8Weight(codes, scale, outlier, outlier_scale, name)
    return Int4Int8Linear(weight, linear.bias, switch).eval()


def _random_int4(linear: nn.Linear, name: str, switch: PrecisionSwitch) -> Int4Linear:
    out_features, in_features, device = linear.out_features, linear.in_features, linear.weight.device
    group = 32 if in_features % GROUP else GROUP
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=device)
    # Uniform codes -8..7 have a deviation of 4.6, the weights of such a model one of 0.02.
    scale = torch.full((out_features, in_features // group), 0.02 / 4.6, dtype=torch.float16, device=device)
    return Int4Linear(Int4Weight(codes, scale, None, name), linear.bias, switch).eval()


def random_planes_model(shape: str, device: torch.device, num_planes: int = 8) -> PreTrainedModel:
    """The shape with random codes in bit-planes (groups of 128), drawn as those of `random_int4_model`."""
    return _drawn(random_model(shape, device), PrecisionSwitch("planes", num_planes=num_planes), _random_planes)


def _random_planes(linear: nn.Linear, name: str, switch: PrecisionSwitch) -> PlanesLinear:
    (out_features, in_features), device, count = linear.weight.shape, linear.weight.device, switch.num_planes
    group = 32 if in_features % GROUP else GROUP
    planes = torch.randint(0, 256, (count, out_features, in_features // 8), dtype=torch.uint8, device=device)
    # Uniform codes of n bits have a deviation of 2^n / sqrt(12), the weights of such a model one of 0.02.
    step = 0.02 * 12**0.5 / 2**count
    scale = torch.full((out_features, in_features // group), step, dtype=torch.float16, device=device)
    zero = torch.tensor([2**count], dtype=torch.int32, device=device)
    return PlanesLinear(PlanesWeight(planes, scale, zero, name), linear.bias, switch).eval()


def real_model(folder: Path, device: torch.device, quantized: bool = False) -> PreTrainedModel:
    """A model of a folder in BF16, or packed to int4 while it loads; ValueError where there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: --models names the folder in which {folder.name} lies")
    how = {"quantization_config": hf_mlspec.MLSpecConfig(format="int4", group_size=GROUP)} if quantized else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how).to(device).eval()


def without_end(model: PreTrainedModel) -> PreTrainedModel:
    """The model, which no token ends: every contender then writes as many tokens."""
    model.generation_config.eos_token_id = None
    return model
