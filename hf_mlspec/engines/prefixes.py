"""Which keys and values are kept of prompts, so that the next one with the same beginning is not read again?

Blocks of so many tokens, in a tree: a block is known by its tokens and by all blocks before it. A token's keys and
values depend on the tokens before it only (invariant 3), so kept ones have the bits of those computed anew. Where
layers keep a state, a row can go on behind blocks of which one is kept, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from .lanes import KeptState
from .memory import bytes_in

BLOCK = 64  # tokens


@dataclass(eq=False)
class _Node:
    """One block behind another. kv: `[layers, 2, kv_heads, BLOCK, head_dim]`, None of the root, which is no block.
    state: behind its last token, where layers keep one and it was there."""

    ids: tuple[int, ...] = ()
    above: _Node | None = None
    kv: Tensor | None = None
    below: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    state: KeptState | None = None

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + (0 if self.state is None else self.state.nbytes)


class KeptPrefixes:
    """Blocks of keys and values under a budget of bytes; those that were not used for longest go first, last block
    first.

    nbytes: held now. evicted: blocks that had to go.
    """

    def __init__(self, budget: int):
        self.budget, self.nbytes, self.evicted = budget, 0, 0
        self._root = _Node()
        self._by_use: OrderedDict[_Node, None] = OrderedDict()  # a block stands before those that it is behind of

    def find(self, row: list[int]) -> list[Tensor]:
        """The blocks that a row begins with."""
        path = list(self._path(row))
        self._use(path)
        return [node.kv for node in path]

    def find_with_state(self, row: list[int]) -> tuple[list[Tensor], KeptState | None]:
        """The blocks that a row begins with and behind which a state is kept, and that."""
        path = list(self._path(row))
        while path and path[-1].state is None:
            path.pop()
        self._use(path)
        return [node.kv for node in path], path[-1].state if path else None

    def keep(
        self, row: list[int], copied: Callable[[int, int], Tensor], state: Callable[[], KeptState] | None = None
    ) -> None:
        """Keep the whole blocks of a row. copied: gives a copy of the row's keys and values of tokens start .. end;
        state: of the state behind all of them."""
        path = list(self._path(row))
        for start in range(len(path) * BLOCK, len(row) - BLOCK + 1, BLOCK):
            kv = copied(start, start + BLOCK)
            if not self._make_room(kv.nbytes, path):
                break
            above = path[-1] if path else self._root
            node = _Node(tuple(row[start : start + BLOCK]), above, kv)
            above.below[node.ids] = node
            self.nbytes += kv.nbytes
            path.append(node)
        whole = len(path) == len(row) // BLOCK > 0
        if state is not None and whole and path[-1].state is None and self._make_room((kept := state()).nbytes, path):
            path[-1].state = kept
            self.nbytes += kept.nbytes
        self._use(path)

    def clear(self) -> None:
        """Let go of all blocks."""
        for node in self._by_use:  # nodes know each other: a cycle would keep their memory until the next gc
            node.above = node.kv = node.state = None
            node.below.clear()
        self._root, self.nbytes = _Node(), 0
        self._by_use.clear()

    def _path(self, row: list[int]) -> Iterator[_Node]:
        node: _Node | None = self._root
        for start in range(0, len(row) - BLOCK + 1, BLOCK):
            node = node.below.get(tuple(row[start : start + BLOCK]))
            if node is None:
                return
            yield node

    def _use(self, path: list[_Node]) -> None:
        """The last block first: then what comes first in the order has no block behind it."""
        for node in reversed(path):
            self._by_use[node] = None
            self._by_use.move_to_end(node)

    def _make_room(self, size: int, path: list[_Node]) -> bool:
        """Whether there is room for a block behind those of this path, which stay."""
        if size > self.budget:
            return False
        stay = set(path)
        while self.nbytes + size > self.budget:
            oldest = next(iter(self._by_use), None)
            if oldest is None or oldest in stay:
                return False
            del self._by_use[oldest], oldest.above.below[oldest.ids]
            self.nbytes -= oldest.nbytes
            self.evicted += 1
        return True


def bytes_of(value: object, name: str) -> int:
    """A number of bytes, or of units such as "1GiB" or "500 MB"; None is 0. ValueError or TypeError names it."""
    if value is None:
        return 0
    if isinstance(value, str):
        if (found := bytes_in(value)) is None:
            raise ValueError(f"{name} is {value!r}, it must be bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
        return found
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, it must be a number of bytes, a text such as '1GiB', or None")
    if value < 0:
        raise ValueError(f"{name} is {value}, it must not be negative: bytes")
    return value
