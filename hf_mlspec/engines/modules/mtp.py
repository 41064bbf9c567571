"""How does an MTP layer score tokens? As any head does, but through modules of its target's kind."""

from __future__ import annotations

from torch import Tensor

from ...nn.mtp import MtpHead
from ..head import HeadEngine, TimedRow
from ..rows import row_bytes
from .attention import Plan, planned
from .cache import RaggedCache


class MtpEngine(HeadEngine):
    """An MTP layer over its rows, in a cache of its own. See `HeadEngine`."""

    model: MtpHead

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, and of the hidden states that wait for it."""
        shape = self.model.shape
        rows = (row_bytes(size, self.dtype, self.cache_format) for size in (shape.key_dim, shape.value_dim))
        return shape.kv_heads * sum(rows) + shape.hidden * self.dtype.itemsize

    def trial(self) -> MtpEngine:
        """As `HeadEngine.trial`."""
        return self._like(_Trial)

    def _new_cache(self, batch: int) -> RaggedCache:
        return RaggedCache(1, max(self.capacity, 1), self.cache_format)

    def _pass(self, tokens: Tensor, hidden: Tensor, slots: list[int]) -> Tensor:
        self.forwards += 1
        plan = Plan(slots, tokens.shape[1], self.device)
        with planned(plan):
            # Pair i stands at the position of its token, i + 1, as in transformers.
            return self.model(tokens, hidden, plan.positions + 1, self.cache)

    def _reserve(self, slots: int) -> None:
        """Nothing: lanes grow as they are written."""


class _Trial(TimedRow, MtpEngine):
    """See `TimedRow`."""
