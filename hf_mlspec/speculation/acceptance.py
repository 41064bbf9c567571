"""Which drafted tokens does a level keep, and what does it put after them? Pure functions of their arguments.

A level keeps the guesses that are its own choices (sampling.py), greedy or drawn, up to the first that is not. Of a
tree it keeps the path on which every node is its choice behind the one before: as choices are functions of a
position's scores and noise, no other sibling matters, and nothing has to be corrected for those that were refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engines.trees import END, Parents, children


def accept_greedy(tokens: Tensor, lengths: Tensor, best: Tensor) -> Tensor:
    """How many drafted tokens equal the checker's own choice before the first that does not.

    tokens int64 `[batch, k]`, lengths int64 `[batch]`, best int64 `[batch, k + 1]` -> int64 `[batch]`. The token that
    follows the accepted ones is `best[r, accepted[r]]`.
    """
    valid = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    return _leading_true((tokens == best[:, :-1]) & valid)


def accept_row(guesses: Sequence[int], best: Sequence[int]) -> int:
    """`accept_greedy` of one row that lies on the host: best holds at least one choice more than there are guesses."""
    return next((n for n, (guess, own) in enumerate(zip(guesses, best, strict=False)) if guess != own), len(guesses))


def accept_tree(guesses: Sequence[int], parents: Parents, best: Sequence[int]) -> list[int]:
    """The nodes of a tree that are kept: a path from the row on, empty where none is.

    best: the checker's own choice behind the row, best[0], and behind each node j, best[j + 1]. The token that follows
    is its choice behind the last node kept.
    """
    behind, found, node = children(parents), [], END
    while True:
        node = next((child for child in behind.get(node, ()) if guesses[child] == best[node + 1]), None)
        if node is None:
            return found
        found.append(node)


def _leading_true(flags: Tensor) -> Tensor:
    return flags.long().cumprod(dim=1).sum(dim=1)
