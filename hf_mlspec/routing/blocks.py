"""Which parts of a model get a width of their own, and to which model does a router belong?

A block is a child of a decoder layer, its attention or its MLP, whose linears are bit-planes (QAQ, section 3).
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import nn

from ..calibration.blocks import blocks_of as layers_of
from ..nn.packed import PackedModule
from ..nn.planes import PlanesLinear

_ADAPTED = ".base_layer"  # behind the name of a layer that adapters stand for


class Block(NamedTuple):
    """One attention or MLP of a layer.

    name: of its module, `model.layers.3.mlp`. module: itself. linears: its packed layers by name. features: entries of
    its input. weights: entries of its packed matrices, by which its bits count in an average.
    """

    name: str
    module: nn.Module
    linears: dict[str, PlanesLinear]
    features: int
    weights: int


def blocks_of(model: nn.Module) -> list[Block]:
    """The blocks in the order of a forward pass.

    ValueError where the decoder is not at model.layers, holds no bit-planes, or holds packed layers that a width
    cannot be chosen for (experts, other formats).
    """
    found = []
    for layer_name, layer in layers_of(model):
        for child, module in layer.named_children():
            name = f"{layer_name}.{child}"
            packed = {f"{name}.{at}": m for at, m in module.named_modules() if isinstance(m, PackedModule)}
            packed = {at.removesuffix(_ADAPTED): m for at, m in packed.items()}
            if not packed:
                continue
            for at, linear in packed.items():
                if not isinstance(linear, PlanesLinear):
                    raise ValueError(
                        f"{at} is a {type(linear).__name__}: a router chooses widths of linear layers in bit-planes; "
                        "load the model with MLSpecConfig(format='planes', skip_modules=['mlp.experts'])"
                    )
            first = next(iter(packed.values()))
            weights = sum(linear.in_features * linear.out_features for linear in packed.values())
            found.append(Block(name, module, packed, first.in_features, weights))
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no bit-planes in its layers: a router chooses how many planes are read; "
            "load the model with MLSpecConfig(format='planes')"
        )
    return found


def shapes_of(blocks: list[Block]) -> dict[str, list[int]]:
    """Of every packed layer: planes, outputs, inputs, group."""
    return {
        name: [linear.num_planes, linear.out_features, linear.in_features, linear.group_size]
        for block in blocks
        for name, linear in block.linears.items()
    }


@torch.no_grad()
def identity_of(blocks: list[Block]) -> str:
    """SHA-256 over names, shapes and scales of the packed layers: the scales tell one model's weights from another's
    and are a hundredth of their bytes."""
    digest = hashlib.sha256()
    for name, shape in shapes_of(blocks).items():
        digest.update(f"{name}{shape}".encode())
    for block in blocks:
        for linear in block.linears.values():
            scale = linear.packed_weight().weight_scale.detach().cpu().contiguous()
            digest.update(scale.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def average_bits(widths: list[int], blocks: list[Block]) -> float:
    """Bits of a weight on average where block j has ``widths[j]`` planes."""
    total = sum(block.weights for block in blocks)
    return sum(width * block.weights for width, block in zip(widths, blocks, strict=True)) / total
