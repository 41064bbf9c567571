"""Which planes is a prompt likely to read, before its router has chosen? As many as recent prompts read.

Every block keeps what the last prompts chose, and the widest of them is asked for. A prompt that chooses a wider one
is read again, with the planes that it lacked: time, never a token. What is kept lives with the planes that are
streamed, so that a call of generate begins with what the calls before it chose; the first call begins with what is
usual for training queries, where the router's file says it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .blocks import Block
from .router import Router

RECENT = 32  # prompts
TRIES = 2  # times a prompt is read with planes that are likely, before the host waits for each choice


class LikelyWidths:
    """Of every block. Threads may ask and tell at the same time."""

    def __init__(self, usual: Sequence[int] | None = None) -> None:
        """usual: widths that stand for a prompt before the first one."""
        self._recent: tuple[tuple[int, ...], ...] = () if usual is None else (tuple(usual),)

    def saw(self, widths: Sequence[int]) -> None:
        """What a prompt chose, block by block."""
        self._recent = (*self._recent, tuple(widths))[-RECENT:]

    def of_all(self) -> list[int] | None:
        """Planes of every block; None before the first prompt, unless something is usual."""
        recent = self._recent
        return [max(own) for own in zip(*recent, strict=True)] if recent else None


def likely_of(router: Router, blocks: Sequence[Block]) -> LikelyWidths:
    """What prompts of a router chose, as long as these planes are streamed; of resident ones nobody asks."""
    for linear in (own for block in blocks for own in block.linears.values()):
        if linear.source is not None:
            return linear.source.likely.setdefault(router.of, LikelyWidths(router.usual))
    return LikelyWidths()
