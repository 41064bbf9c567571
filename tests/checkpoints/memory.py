"""What stands for the tensors of a file where a test writes none? Tensors in memory, described as a header would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_mlspec.checkpoints.layer import LayerPlan, Reader, ReadLayer, StoredLayer


@dataclass
class InMemory:
    """One tensor."""

    tensor: torch.Tensor
    place: str

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def load(self) -> torch.Tensor:
        return self.tensor.clone()


def stored(tensors: Mapping[str, torch.Tensor], inputs: int, outputs: int, name: str = "up_proj") -> StoredLayer:
    """A layer of these tensors."""
    found = {key: InMemory(tensor, f"{name}.{key} in the.file") for key, tensor in tensors.items()}
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
