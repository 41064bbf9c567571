"""What stands for the tensors of a file where a test writes none? Tensors in memory, described as a header would."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_mlspec.checkpoints.layer import HeldTensor, LayerPlan, Reader, ReadLayer, StoredLayer


def stored(tensors: Mapping[str, torch.Tensor], inputs: int, outputs: int, name: str = "up_proj") -> StoredLayer:
    """A layer of these tensors."""
    found = {key: HeldTensor(f"{name}.{key} in the.file", tensor) for key, tensor in tensors.items()}
    return StoredLayer(name, inputs, outputs, found)


def read(reader: Reader, layer: StoredLayer) -> tuple[LayerPlan, ReadLayer]:
    """What the reader plans, and what it reads."""
    assert reader.holds(layer)
    plan = reader.plan(layer)
    return plan, plan.read({name: one.load() for name, one in plan.tensors.items()})


def values(layer: ReadLayer, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] as the inputs come."""
    if isinstance(layer.weight, torch.Tensor):
        assert layer.order is None
        return layer.weight
    wide = layer.weight.dequantize(torch.float32).to(dtype)
    return wide if layer.order is None else wide[:, torch.argsort(layer.order)]
