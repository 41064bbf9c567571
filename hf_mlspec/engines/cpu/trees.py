"""How does the CPU decoder score trees of guesses, each node with the bits of a row of its own?

Keys and values of all nodes are written behind the row and its longest branch. Attention then goes through the
branches in depth-first order, and copies what a branch brings to the slots of its positions: a node sees the slots
that a row of its own would have, and its sums are over the same slots in the same order (invariant 3). What is kept of
a tree is copied there once more, where the branch that came last does not lie there already.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..engine import Rows
from ..trees import Parents, depth_first, depths


@dataclass
class FedTree:
    """Where the nodes of one row's tree are: end, the tokens of the row; place: of every node, in depth-first order;
    lying: nodes that lie behind the row at their positions."""

    end: int
    deepest: int
    place: dict[int, int]
    lying: list[int]

    @classmethod
    def of(cls, parents: Parents, end: int) -> FedTree:
        order, depth = depth_first(parents), depths(parents)
        lying = {depth[node]: node for node in order}  # the last of every depth
        found = [lying[d] for d in sorted(lying)]
        return cls(end, len(lying), {node: at for at, node in enumerate(order)}, found)

    @property
    def slots(self) -> int:
        """That row and tree take while they are scored."""
        return self.end + self.deepest + len(self.place)

    def slots_of(self, kept: list[int]) -> list[int]:
        """Where these nodes were written."""
        return [self.end + self.deepest + self.place[node] for node in kept]

    def keep(self, kv: Tensor, row: int, kept: list[int]) -> None:
        """Copy the keys and values of a path to the slots behind the row; `kv` as of `DecoderCache`."""
        moves = [(at, n) for at, n in enumerate(kept) if self.lying[at] != n]
        if moves:
            to, of = zip(*moves, strict=True)
            lane = kv[:, :, row]
            lane[:, :, :, [self.end + at for at in to]] = lane[:, :, :, self.slots_of(of)]


def scored_trees(
    engine: Any, rows: Rows, guesses: Rows, parents: list[Parents], alive: list[bool], *wanted: bool
) -> tuple[list[list[int]], list[list[float]], Tensor, list[FedTree]]:
    """One call of the decoder over what the cache lacks of the rows and the trees behind them; wanted: confidences,
    logits. Of every row, position by position as `Engine.score`: choices, confidences; logits `[sum, vocab]`; where
    nodes are."""
    engine._read_ahead(rows, alive)
    starts = engine._starts(rows)
    trees = [FedTree.of(own if on else [], len(row)) for own, row, on in zip(parents, rows, alive, strict=True)]
    busy = [tree for tree, on in zip(trees, alive, strict=True) if on]
    engine._reserve(max((tree.end + tree.deepest for tree in busy), default=0))
    engine.cache.reserve(max((tree.slots for tree in busy), default=0))
    fed = [row[start:] if on else [] for row, start, on in zip(rows, starts, alive, strict=True)]
    nodes, at = [], []
    for tree, guess, own in zip(trees, guesses, parents, strict=True):
        depth = depths(own)
        nodes += [guess[node] for node in tree.place]
        at += [depth[node] for node in tree.place]
    tokens, counts = [token for line in fed for token in line], [len(line) for line in fed]
    begin = time.perf_counter()
    of_trees = nodes, at, [len(tree.place) for tree in trees]
    call = engine.cache.kv, tokens, counts, starts, *of_trees, *wanted, *engine._view
    slots = max((tree.slots for tree in busy), default=0)
    best, confidence, logits = _called(engine, call, starts, counts, slots)
    engine._count(1, time.perf_counter() - begin)
    engine.lengths = [tree.end if on else have for tree, on, have in zip(trees, alive, engine.lengths, strict=True)]
    order = _in_the_guess(trees, alive)
    flat = [place for line in order for place in line]
    bests, sure = best.tolist(), confidence.tolist()
    return (
        [[bests[place] for place in line] for line in order],
        [[sure[place] for place in line] for line in order] if wanted[0] else [],
        logits[flat] if wanted[1] else logits,
        trees,
    )


def _called(
    engine: Any, call: tuple, starts: list[int], counts: list[int], slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The call of the decoder; the hidden states of what it feeds go to the tap, those of nodes to the slots of their
    keys and values."""
    tap = engine.tap
    if tap is None:
        return engine.decoder.call("score_tree", *call)
    tap.reserve(len(counts), slots)
    try:
        found = engine.decoder.call("score_tree_tapped", *call, tap.layers, tap.states)
    except BaseException:
        tap.cut(starts, counts)
        raise
    tap.wrote(starts, counts)
    return found


def _in_the_guess(trees: list[FedTree], alive: list[bool]) -> list[list[int]]:
    """Where in the call, row by row, each position of the guesses is scored."""
    sizes = [len(tree.place) + 1 if on else 0 for tree, on in zip(trees, alive, strict=True)]
    firsts = [0, *accumulate(sizes)][:-1]
    return [
        [first, *(first + 1 + tree.place[node] for node in range(size - 1))] if size else []
        for tree, first, size in zip(trees, firsts, sizes, strict=True)
    ]
