"""Which packed models of random codes do programs time? int4, bit-planes, with outliers, ordered or rotated inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from eval.targets import random_model
from hf_mlspec.formats import Int4Weight, PlanesWeight
from hf_mlspec.formats.hadamard import fitting_hadamard
from hf_mlspec.formats.int4_int8 import OUTLIERS, Int4Int8Weight
from hf_mlspec.nn.int4_int8 import Int4Int8Linear
from hf_mlspec.nn.linear import Int4Linear
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.transforms import HADAMARD, ORDER, record_of

GROUP = 128  # elements of int4 weights that share a scale; 32 in tiny shapes
WIDE_ENOUGH = {"hidden_size": 256, "intermediate_size": 384}  # of a tiny shape: int4-int8 takes multiples of 128
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # which read the inputs of which


def random_int4_model(shape: str, device: torch.device, **sizes: int) -> PreTrainedModel:
    """The shape with random int4 codes (groups of 128) in every linear layer but the head, as MLSpecConfig packs it.

    Codes are drawn, not searched for: quantizing 8 billion random weights would say nothing and take its time.
    """
    return drawn(random_model(shape, str(device), 0, **sizes), PrecisionSwitch("int4", 16), _random_int4)


def random_outlier_model(shape: str, device: torch.device, **sizes: int) -> PreTrainedModel:
    """As `random_int4_model`, with the last 128 inputs of every layer in int8."""
    return drawn(random_model(shape, str(device), 0, **sizes), PrecisionSwitch("int4_int8", 16), _random_outliers)


def random_planes_model(shape: str, device: torch.device, num_planes: int = 8) -> PreTrainedModel:
    """The shape with random codes in bit-planes (groups of 128), drawn as those of `random_int4_model`."""
    return drawn(random_model(shape, str(device), 0), PrecisionSwitch("planes", num_planes=num_planes), _random_planes)


def drawn(
    model: PreTrainedModel, switch: PrecisionSwitch, draw: Callable[[nn.Linear, str, PrecisionSwitch], nn.Module]
) -> PreTrainedModel:
    """The model with what ``draw`` makes of every linear layer but the head, of a switch that all of them share."""
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


def _random_planes(linear: nn.Linear, name: str, switch: PrecisionSwitch) -> PlanesLinear:
    (out_features, in_features), device, count = linear.weight.shape, linear.weight.device, switch.num_planes
    group = 32 if in_features % GROUP else GROUP
    planes = torch.randint(0, 256, (count, out_features, in_features // 8), dtype=torch.uint8, device=device)
    # Uniform codes of n bits have a deviation of 2^n / sqrt(12), the weights of such a model one of 0.02.
    step = 0.02 * 12**0.5 / 2**count
    scale = torch.full((out_features, in_features // group), step, dtype=torch.float16, device=device)
    zero = torch.tensor([2**count], dtype=torch.int32, device=device)
    return PlanesLinear(PlanesWeight(planes, scale, zero, name), linear.bias, switch).eval()


def _packed(model: PreTrainedModel) -> Iterator[tuple[str, PackedLinear]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, PackedLinear))


def ordered(model: PreTrainedModel) -> PreTrainedModel:
    """The model, each layer's inputs gathered in an order of its own, or of those that share them."""
    for path, module in _packed(model):
        block, _, leaf = path.rpartition(".")
        seed = sum(map(ord, f"{block}.{SHARED.get(leaf, leaf)}"))
        order = torch.randperm(module.in_features, generator=torch.Generator().manual_seed(seed)).int()
        module.transform_(ORDER, {"order": order.to(module.weight_scale.device)})
    return model


def rotated(model: PreTrainedModel, across_heads: bool = True) -> PreTrainedModel:
    """The model with Hadamard matrices in front of o, across heads, and of down, or of down alone."""
    heads = model.config.num_attention_heads
    for path, module in _packed(model):
        if path.endswith("o_proj") and across_heads:
            how = fitting_hadamard(heads, module.in_features // heads)
        elif path.endswith("down_proj"):
            how = fitting_hadamard(module.in_features)
        else:
            continue
        record = {name: tensor.to(module.weight_scale.device) for name, tensor in record_of(how).items()}
        module.transform_(HADAMARD, record)
    return model
