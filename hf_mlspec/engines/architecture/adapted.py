"""Does a compiled decoder add what the adapters of a model add?"""

from __future__ import annotations

from torch import nn

from ...nn.adapters import is_lora, why_not_low_rank
from .parts import UnknownArchitecture


def require_low_rank(model: nn.Module) -> None:
    """UnknownArchitecture for adapters that no compiled decoder adds."""
    for path, module in model.named_modules():
        if is_lora(module) and (why := why_not_low_rank(module)) is not None:
            raise UnknownArchitecture(f"{why} ({path}), and the compiled decoder adds plain LoRA alone")
