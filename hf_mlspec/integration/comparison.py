"""What is known after two decodings of the same prompts were held against each other?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..speculation.stats import LevelStats, SpeculationStats


@dataclass
class Difference:
    """The first position at which two continuations of one prompt part.

    position:             index among the new tokens; before it both are equal.
    expected, got:        token of the target alone and of the chain there; None where that one had already ended.
    top2, gap:            the target's two largest logits there, ``[(token id, logit), ...]``, largest first, and their
                          distance, from one unpadded forward pass over prompt and common tokens in the model's dtype.
    top2_float64, gap_float64: the same from a float64 copy of the target. A tiny gap is a tie: the model has no
                          preference that its dtype can resolve, and the order of a sum decides.
    """

    position: int
    expected: int | None
    got: int | None
    top2: list[tuple[int, float]]
    gap: float
    top2_float64: list[tuple[int, float]]
    gap_float64: float


@dataclass
class Item:
    """One prompt: ids are new tokens up to and including the first end-of-sequence token."""

    index: int
    prompt_tokens: int
    ids: list[int]
    reference_ids: list[int] | None = None
    difference: Difference | None = None


@dataclass
class Comparison:
    """What `compare` found.

    items:         one per prompt, in their order.
    speculation:   counts and seconds of the chain, summed over all calls of generate.
    chain_seconds: wall time inside generate with the chain; alone_seconds: with the target alone (0.0 where
                   `reference_ids` were given). Building levels and the streamer's own time are not part of it.
    """

    items: list[Item] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    chain_seconds: float = 0.0
    alone_seconds: float = 0.0

    @property
    def differences(self) -> list[Difference]:
        return [item.difference for item in self.items if item.difference is not None]

    @property
    def identical(self) -> int:
        """Number of prompts that were compared and whose ids are equal."""
        return sum(item.reference_ids is not None and item.difference is None for item in self.items)

    @property
    def tokens_compared(self) -> int:
        """Tokens of the target alone up to the first difference, that position included."""
        return sum(item.difference.position + 1 if item.difference else len(item.reference_ids or [])
                   for item in self.items)

    def beyond_ties(self, gap: float) -> list[Difference]:
        """The differences where the float64 logits of the two best tokens are `gap` or more apart, or no number."""
        return [difference for difference in self.differences if not difference.gap_float64 < gap]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        chain_tokens = sum(len(item.ids) for item in self.items)
        alone_tokens = sum(len(item.reference_ids or []) for item in self.items)
        return {"prompts": len(self.items), "identical": self.identical, "different": len(self.differences),
                "tokens_compared": self.tokens_compared, "chain_tokens": chain_tokens, "alone_tokens": alone_tokens,
                "chain_seconds": self.chain_seconds, "alone_seconds": self.alone_seconds,
                "speculation": self.speculation.to_dict(), "items": [dataclasses.asdict(item) for item in self.items]}


def accumulate(total: SpeculationStats, part: SpeculationStats) -> None:
    """Add the counts and seconds of one call of generate to those of earlier calls; of caches the largest counts."""
    if not total.levels:
        total.levels = [LevelStats(level.name) for level in part.levels]
    total.target_cache_bytes = max(total.target_cache_bytes, part.target_cache_bytes)
    for into, level in zip(total.levels, part.levels, strict=True):
        into.cache_bytes = max(into.cache_bytes, level.cache_bytes)
        for name in ("drafted", "accepted", "tested", "rounds", "forwards", "seconds", "prefill_seconds"):
            setattr(into, name, getattr(into, name) + getattr(level, name))
    counted = ("new_tokens", "target_passes", "row_passes", "seconds", "target_seconds", "prefill_seconds",
               "prefill_target_seconds", "prefill_draft_seconds", "prefill_tokens", "capture_seconds")
    for name in counted:
        setattr(total, name, getattr(total, name) + getattr(part, name))
