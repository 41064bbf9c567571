"""What does a model propose where it is not sure? Its likeliest tokens at every place, as a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engines.engine import Engine
from ...engines.trees import END, Parents, width_at
from ..checker import roll_back
from ..draft import Draft, Rows
from ..sampling import Sampler
from .model import ModelDrafter

# A token beside the likeliest is proposed from this share of the threshold on: less probable ones cost more passes of
# many tokens than they save.
BESIDE = 0.125


class ModelTree(ModelDrafter):
    """A model whose drafts are trees. See `ModelDrafter`.

    widths: the most tokens that are proposed behind a token, by depth, one behind the last. With a threshold, nothing
    is proposed behind a token less probable than it, and beside the likeliest only what is at least `BESIDE` of it;
    without one the shape is always the same. Each depth is one pass over the tree so far, so that siblings see their
    own branch alone (tree attention: Miao et al. 2024, "SpecInfer"; EAGLE, Li et al. 2024). Tokens of a row that
    samples are those of the largest scores with the noise that all levels share (sampling.py).
    """

    def __init__(self, runner: Engine, sampler: Sampler, name: str, *, widths: list[int], **limits):
        super().__init__(runner, sampler, name, **limits)
        self.widths = widths

    @property
    def in_engine(self) -> bool:
        """The engine drafts rows."""
        return False

    def _draft(self, rows: Rows, limits: list[int], seen: Rows) -> Draft:
        draft = Draft.nothing(len(rows), self.runner.device)
        tokens: Rows = [[] for _ in rows]
        parents: list[Parents] = [[] for _ in rows]
        edge = [[END] if limit else [] for limit in limits]  # whose successors are asked for
        for depth in range(max(limits)):
            alive = [bool(own) and depth < limit for own, limit in zip(edge, limits, strict=True)]
            if not any(alive):
                break
            guess = draft.guess()
            scores = self.sampler.scores(self._behind(seen, draft, edge, alive), rows, guess, alive)
            found = self._likeliest(scores, rows, draft, alive, depth)
            lines = zip(tokens, parents, edge, found, alive, strict=True)
            edge = [self._grow(*one) if on else [] for *one, on in lines]
            draft = Draft.trees(tokens, parents, self.runner.device)
            roll_back(self.runner, [len(row) for row in seen])
        return draft

    def _behind(self, seen: Rows, draft: Draft, edge: list[list[int]], alive: list[bool]) -> Tensor:
        """Logits `[batch, nodes + 1, vocab]` behind the rows and the nodes so far; only those of the edge are read."""
        return self._feed(seen, draft.guess(), alive)

    def _likeliest(
        self, scores: Tensor, rows: Rows, draft: Draft, alive: list[bool], depth: int
    ) -> list[list[list[tuple[int, float]]]]:
        """Per row and position (0: its end, node j: j + 1) the tokens to propose behind it, with probabilities."""
        firsts, parents = [len(row) for row in rows], draft.parents if draft.branches else None
        lengths = [n if on else -1 for n, on in zip(draft.lengths, alive, strict=True)]
        probabilities = self.sampler.probabilities(scores)
        taken, sure = [], []
        for _ in range(width_at(self.widths, depth)):
            best = self.sampler.choose(scores, firsts, lengths, parents)[..., None].clamp(min=0)
            chance = probabilities.gather(2, best)
            if taken:  # where no token is left, one comes a second time
                chance = chance.masked_fill(scores.gather(2, best) == float("-inf"), 0.0)
            taken.append(best)
            sure.append(chance)
            scores = scores.scatter(2, best, float("-inf"))
        pairs = zip(torch.cat(taken, 2).tolist(), torch.cat(sure, 2).tolist(), strict=True)
        return [
            [list(zip(own, p, strict=True)) for own, p in zip(lines, chances, strict=True)] for lines, chances in pairs
        ]

    def _grow(
        self, tokens: list[int], parents: Parents, edge: list[int], found: list[list[tuple[int, float]]]
    ) -> list[int]:
        """Append to a row's tree what was found behind its edge; the nodes that are the next edge."""
        further = []
        for node in edge:
            for place, (token, chance) in enumerate(found[node + 1]):
                if place and chance < max(self.threshold * BESIDE, 1e-9):
                    continue
                if chance >= self.threshold:
                    further.append(len(tokens))
                tokens.append(token)
                parents.append(node)
        return further
