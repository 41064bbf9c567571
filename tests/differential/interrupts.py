"""How is a call cut short, so that the next one can show that nothing was left behind?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Bomb:
    """A stopping criterion that raises at its n-th call; a stream asks it between two events."""

    def __init__(self, calls: int):
        self.calls = calls

    def goes_off(self) -> bool:
        self.calls -= 1
        return self.calls < 0

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.goes_off():
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)


def interrupted(call: Callable, levels: list, calls: int) -> None:
    """The call, which ends early or is over before."""
    try:
        call(levels, bomb=Bomb(calls))
    except KeyboardInterrupt:
        return
