"""What does a trained head propose? What a model would, of the rows whose hidden states it has."""

from __future__ import annotations

from torch import Tensor

from ...engines.head import HeadEngine
from ..draft import Draft, Rows
from .model import ModelDrafter
from .model_tree import ModelTree


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


class HeadTree(HeadDrafter, ModelTree):
    """A head whose drafts are trees. See `ModelTree`; each depth is one pass over the nodes of the depth before."""

    @property
    def in_engine(self) -> bool:
        """The engine drafts rows."""
        return False

    def _behind(self, seen: Rows, draft: Draft, edge: list[list[int]], alive: list[bool]) -> Tensor:
        if not draft.tokens.shape[1]:
            return self._feed(seen, None, alive)
        asked = [own if on else [] for own, on in zip(edge, alive, strict=True)]
        found = self.runner.grow(draft.rows(), draft.parents, asked)
        logits = found.new_zeros(len(seen), draft.tokens.shape[1] + 1, found.shape[-1])
        rows, places = zip(*((r, node + 1) for r, own in enumerate(asked) for node in own), strict=True)
        logits[rows, places] = found
        return logits
