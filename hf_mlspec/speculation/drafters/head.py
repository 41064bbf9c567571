"""What does a trained head propose? What a model would, of the rows whose hidden states it has."""

from __future__ import annotations

from ...engines.head import HeadEngine
from ..draft import Draft, Rows
from .model import ModelDrafter


class HeadDrafter(ModelDrafter):
    """A head at the end of a chain, in a cache of its own. See `ModelDrafter`.

    It drafts nothing for a row that the levels above have not read yet.
    """

    runner: HeadEngine

    @property
    def follows(self) -> bool:
        """Whether it waits until the target has read the prompts: it reads what the target leaves behind."""
        return True

    @property
    def in_engine(self) -> bool:
        """Whether the head itself takes the tokens that the sampler would take."""
        return self.allowed is None and self.sampler.is_greedy and self.runner.vocab_size <= self.sampler.vocab_size

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        known = [self.runner.knows(r, len(row)) for r, row in enumerate(rows)]
        return super().propose(rows, [limit if on else 0 for limit, on in zip(limits, known, strict=True)])
