"""Where are keys and values of a tree's nodes, while a head reads the tree depth by depth, branch by branch?

They wait beside the cache. Before a node attends, those of its branch are copied to the slots behind its row: it sees
the slots that a row of its own would have, and has that row's bits (invariant 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Places:
    """Of a few tokens: which rows they are of, in which slots of the cache, and as which nodes."""

    rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)

    def add(self, row: int, slot: int, node: int) -> None:
        """One more."""
        for line, one in ((self.rows, row), (self.slots, slot), (self.nodes, node)):
            line.append(one)


@dataclass
class Column:
    """At most one new node of every row. starts: slots of these nodes, of a row without one the slot behind it.
    before: what is before them on their branches. own: they themselves."""

    starts: list[int]
    before: Places
    own: Places


class HeadNodes:
    """The nodes behind every row that a head has read.

    hidden: `[batch, nodes, hidden]`, what it gives of each. kv: `[layers, 2, batch, kv_heads, nodes, width]`.
    """

    def __init__(self, kv: Tensor, hidden: Tensor):
        self.kv, self.hidden = kv[:, :, :, :, :0], hidden[:, None][:, :0]

    def reserve(self, nodes: int) -> None:
        """Room for so many nodes of every row."""
        have = self.kv.shape[4]
        if nodes > have:
            kv, hidden = self.kv, self.hidden
            self.kv = kv.new_zeros(*kv.shape[:4], nodes, kv.shape[5])
            self.hidden = hidden.new_zeros(len(hidden), nodes, hidden.shape[2])
            self.kv[:, :, :, :, :have], self.hidden[:, :have] = kv, hidden

    @contextmanager
    def at(self, column: Column, layer: int, keys: Tensor, values: Tensor) -> Iterator[None]:
        """Inside, the branches of a column lie in the cache of a layer; its own nodes are written to it there."""
        lanes = list(zip((keys, values), self.kv[layer], strict=True))
        before, own = column.before, column.own
        if before.rows:
            for cached, kept in lanes:
                cached[before.rows, :, before.slots] = kept[before.rows, :, before.nodes]
        yield
        for cached, kept in lanes:
            kept[own.rows, :, own.nodes] = cached[own.rows, :, own.slots]
