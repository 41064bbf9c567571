"""Which models does the GPU benchmark decode with? Shapes with random weights, made on the device, and real pairs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval import targets
from eval.random_packed import GROUP, drawn
from hf_mlspec.formats import PlanesWeight
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.switch import PrecisionSwitch


def random_model(shape: str, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """BF16, on the device from the start."""
    return targets.random_model(shape, str(device), seed)


def random_planes_model(shape: str, device: torch.device, num_planes: int = 8) -> PreTrainedModel:
    """The shape with random codes in bit-planes (groups of 128), drawn as those of `random_int4_model`."""
    return drawn(random_model(shape, device), PrecisionSwitch("planes", num_planes=num_planes), _random_planes)


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
