"""What do tests put beside linears where PEFT is not installed? A stand-in for its LoRA layer: what is read of it."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Module):
    """``base_layer(x) + scaling B(A x)`` of every active adapter, in the dtype of A."""

    def __init__(self, base_layer: nn.Module, rank: int, scale: float = 1.0):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B, self.lora_dropout = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        self.scaling, self.lora_variant, self.merged_adapters = {}, {}, []
        self._disable_adapters, self._active_adapter = False, ["default"]
        self.add("default", rank, scale)

    def add(self, name: str, rank: int, scale: float = 1.0) -> None:
        out, into = self.base_layer.weight.shape
        self.lora_A[name], self.lora_B[name] = nn.Linear(into, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.normal_(self.lora_B[name].weight, std=0.3)
        self.lora_dropout[name], self.scaling[name] = nn.Identity(), scale
        self.eval()

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    @property
    def merged(self) -> bool:
        return bool(self.merged_adapters)

    @property
    def active_adapters(self) -> list[str]:
        return self._active_adapter

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        if self.disable_adapters or self.merged:
            return result
        total = result
        for name in self.active_adapters:
            if name in self.lora_A:
                inner = self.lora_dropout[name](x.to(self.lora_A[name].weight.dtype))
                total = total + self.lora_B[name](self.lora_A[name](inner)) * self.scaling[name]
        return total.to(result.dtype)


Linear.__module__ = "peft.tuners.lora.layer"


def add_lora(model: nn.Module, places: tuple[str, ...] = ("proj",), rank: int = 4, seed: int = 0) -> list[Linear]:
    """Give every linear of a layer whose name ends so an adapter that changes what the model writes. -> the layers."""
    torch.manual_seed(seed)
    found = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.endswith(places) and ".layers." in f".{name}":
            layer = Linear(module, rank + len(found) % 3, scale=0.5)
            model.set_submodule(name, layer)
            found.append(layer)
    return found
