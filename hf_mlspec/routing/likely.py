"""Which planes is a prompt likely to read, before its router has chosen? As many as recent prompts read.

Every block keeps what the last prompts chose, and the widest of them is asked for. A prompt that chooses a wider one
is read again, with the planes that it lacked: time, never a token.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from .router import Router

RECENT = 32  # prompts
TRIES = 2  # times a prompt is read with planes that are likely, before the host waits for each choice


class LikelyWidths:
    """Of every block. Threads may ask and tell at the same time."""

    def __init__(self) -> None:
        self._recent: tuple[tuple[int, ...], ...] = ()

    def saw(self, widths: Sequence[int]) -> None:
        """What a prompt chose, block by block."""
        self._recent = (*self._recent, tuple(widths))[-RECENT:]

    def of_all(self) -> list[int] | None:
        """Planes of every block; None before the first prompt."""
        recent = self._recent
        return [max(own) for own in zip(*recent, strict=True)] if recent else None


_found: weakref.WeakKeyDictionary[nn.Module, LikelyWidths] = weakref.WeakKeyDictionary()


def likely_of(router: Router) -> LikelyWidths:
    """What prompts of a router chose: it lives as long as the router, and engines as long as a call."""
    return _found.setdefault(router.of, LikelyWidths())  # whose copies, which choose more or less often, share them
