"""Does what accelerate hooked to a module, to move its inputs to its device, go on with the one in its place?"""

from __future__ import annotations

from typing import TypeVar

from accelerate.hooks import add_hook_to_module
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def keep_hook(old: nn.Module, new: Module) -> Module:
    """``new`` with accelerate's hook of ``old``, where it has one."""
    hook = getattr(old, "_hf_hook", None)
    return new if hook is None else add_hook_to_module(new, hook)
