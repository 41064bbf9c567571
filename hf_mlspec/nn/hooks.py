"""Which hooks does a module have that change what it computes, and which go on with the module in its place?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from accelerate.hooks import add_hook_to_module
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
    """``new`` with accelerate's hook of ``old``, where it has one."""
    hook = getattr(old, "_hf_hook", None)
    return new if hook is None else add_hook_to_module(new, hook)
