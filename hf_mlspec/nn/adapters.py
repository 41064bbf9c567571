"""What do the adapters of PEFT add to a model's linears, and which model is it without them?

PEFT itself is not imported: its classes are known by name, and a model without adapters never meets them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

_LORA = "peft.tuners.lora.layer.Linear"
_PLACES = ("base_layer", "original_module")  # where a module of PEFT keeps the one whose place it took
_SAID = ("_disable_adapters", "_active_adapter", "scaling", "merged_adapters", "lora_variant", "fan_in_fan_out")


class LowRank(NamedTuple):
    """What adapters add to a linear: up (down x). down float32 ``[rank, in]``, up float32 ``[out, rank]``, times the
    scale (LoRA, arXiv 2106.09685); ranks of several active adapters lie one behind the other."""

    down: Tensor
    up: Tensor


def is_lora(module: nn.Module) -> bool:
    """Whether a module is PEFT's LoRA layer of a linear, and no subclass of it."""
    kind = type(module)
    return kind.__name__ == "Linear" and f"{kind.__module__}.{kind.__qualname__}" == _LORA


def is_adapted(module: nn.Module) -> bool:
    """Whether a module stands for another one, its `base_layer`, and adds to what that computes."""
    return "base_layer" in module._modules


def base_of(module: nn.Module) -> nn.Module:
    """The module whose place adapters took, or the module itself."""
    while is_adapted(module):
        module = module._modules["base_layer"]
    return module


def without_wrapper(model: nn.Module, action: str) -> nn.Module:
    """The transformers model inside of a PeftModel, which holds the adapters; any other model as it is.

    ValueError for adapters that are not in the layers (prompts): the model inside has nothing of them.
    """
    if not type(model).__module__.startswith("peft.") or not hasattr(model, "get_base_model"):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        kind = model.active_peft_config.peft_type
        raise ValueError(f"{action}: a {type(model).__name__} whose prompts are learned ({kind}) is not supported")
    return model.get_base_model()


def adapted_names(model: nn.Module) -> list[str]:
    """Paths of the modules that carry adapters."""
    return [name for name, module in model.named_modules() if is_adapted(module)]


def of_adapters(model: nn.Module) -> set[int]:
    """Ids of all modules that belong to adapters: neither the layers that carry them nor what is in their places."""
    found: set[int] = set()
    for module in model.modules():
        if is_adapted(module):
            parts = [child for name, child in module._modules.items() if name not in _PLACES and child is not None]
            found |= {id(inner) for part in parts for inner in part.modules()}
    return found


def remove_adapters(model: nn.Module) -> nn.Module:
    """Put every module back whose place PEFT took; merged adapters stay in its weights. Returns the model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None or not type(child).__module__.startswith("peft."):
                continue
            inner = child
            while place := next((place for place in _PLACES if place in inner._modules), None):
                inner = inner._modules[place]
            parent._modules[name] = inner
    if vars(model).pop("peft_config", None) is not None:
        model._hf_peft_config_loaded = False
    return model


def why_not_low_rank(module: nn.Module) -> str | None:
    """Why what a LoRA layer adds is not up (down x) alone; None where it is, or where nothing is added."""
    for name in _adding(module):
        if name in module.lora_variant:
            return f"its adapter {name!r} is a variant of LoRA ({type(module.lora_variant[name]).__name__})"
        if module.lora_B[name].bias is not None:
            return f"its adapter {name!r} has a bias"
        dropout = module.lora_dropout[name]
        if type(dropout) not in (nn.Identity, nn.Dropout):
            return f"its adapter {name!r} has a {type(dropout).__name__}"
    if is_adapted(module._modules["base_layer"]):
        return "its adapters stand on other adapters"
    return None


@torch.no_grad()
def low_rank_of(module: nn.Module) -> LowRank | None:
    """What the active adapters of a LoRA layer add, as copies; None where nothing is added: disabled or merged."""
    names = _adding(module)
    if not names:
        return None
    downs = [module.lora_A[name].weight.detach().float() for name in names]
    ups = [module.lora_B[name].weight.detach().float() * float(module.scaling[name]) for name in names]
    return LowRank(torch.cat(downs).contiguous(), torch.cat(ups, dim=1).contiguous())


def adapters_said(modules: list[nn.Module]) -> tuple:
    """What adapters hold beside weights: which of them are active, on, merged, and their scales."""
    carrying = [vars(module) for module in modules if is_adapted(module)]
    return tuple([tuple(_frozen(own)) for own in carrying])


def _frozen(own: dict) -> Iterator[str]:
    for name in _SAID:
        value = own.get(name)
        yield repr(sorted(value.items(), key=lambda item: item[0]) if isinstance(value, dict) else value)


def _adding(module: nn.Module) -> list[str]:
    """The adapters of a layer that its forward adds to the base's outputs."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]
