"""Which hooks does a module have that change what it computes, and which go on with the module in its place?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

Module = TypeVar("Module", bound=nn.Module)
# Hooks of transformers that note what modules give, where a call asks for hidden states or attentions. They stay on
# the model after the first such call and do nothing in others.
_NOTES_ONLY = "transformers.utils.output_capturing"


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook may change what a forward pass of the module gives: any but those that transformers leaves."""
    own = vars(module)
    return bool(own["_forward_pre_hooks"]) or (bool(own["_forward_hooks"]) and changes(own["_forward_hooks"]))


def changes(hooks: Mapping[int, Callable]) -> bool:
    """Whether one of these forward hooks may change what its module gives."""
    return any(getattr(hook, "__module__", None) != _NOTES_ONLY for hook in hooks.values())


def keep_hook(old: nn.Module, new: Module) -> Module:
    """``new`` with accelerate's hook of ``old``, where it has one. Of a hook that brings the weights of ``old`` for
    every call, its place: ``new`` has weights of its own."""
    hook = getattr(old, "_hf_hook", None)
    if offloads(old):
        new, hook = new.to(hook.execution_device), AlignDevicesHook(hook.execution_device, io_same_device=True)
    return new if hook is None else add_hook_to_module(new, hook)


def offloads(module: nn.Module) -> bool:
    """Whether a hook of accelerate brings a module's weights, from the CPU or a disk, for every call."""
    hook = getattr(module, "_hf_hook", None)
    return isinstance(hook, AlignDevicesHook) and bool(hook.offload) and hook.weights_map is not None


def own_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """A tensor of a module, also of one whose hook brings it."""
    tensor = getattr(module, name)
    return module._hf_hook.weights_map[name] if tensor is not None and tensor.is_meta and offloads(module) else tensor


def without_memory(model: nn.Module) -> list[str]:
    """Parameters that are on the meta device and that no hook brings."""
    found = ((f"{path}.{name}", module, own) for path, module in model.named_modules()
             for name, own in module._parameters.items())  # fmt: skip
    return [name for name, module, own in found if own is not None and own.is_meta and not offloads(module)]
