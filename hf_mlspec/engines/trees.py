"""What does a tree of guesses behind a row look like: who is behind whom, and in which order is it fed?

A tree is the list of its nodes' parents: parents[j] < j is the node that node j is behind, -1 the end of the row. A
row of guesses is the tree in which each is behind the one before it. Positions of a check are the row's end, 0, and
node j, j + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

END = -1  # the end of the row, as a parent
MOST_NODES = 256  # of one row: half of what the compiled decoder feeds in one pass

Parents = list[int]


def require_tree(parents: Parents, nodes: int) -> None:
    """ValueError unless these are the parents of so many nodes, at most MOST_NODES, each behind an earlier one."""
    if len(parents) != nodes:
        raise ValueError(f"a tree of {nodes} tokens has {nodes} parents, got {len(parents)}")
    if nodes > MOST_NODES:
        raise ValueError(f"a tree has {nodes} tokens, at most {MOST_NODES} are checked together: propose fewer")
    for node, parent in enumerate(parents):
        if not END <= parent < node:
            raise ValueError(f"token {node} of a tree is behind token {parent}: {END} (the row) to {node - 1} can be")


def width_at(widths: Sequence[int], depth: int) -> int:
    """The most guesses behind a node of this depth, 0 the row's end; one behind the last of the widths."""
    return widths[depth] if depth < len(widths) else 1


def depths(parents: Parents) -> list[int]:
    """Per node how many guesses a row that ends with it has: 1 right behind the row."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == END else found[parent] + 1)
    return found


def path(parents: Parents, node: int) -> list[int]:
    """The nodes from the row to this one, itself the last; none for END."""
    found = []
    while node != END:
        found.append(node)
        node = parents[node]
    return found[::-1]


def children(parents: Parents) -> dict[int, list[int]]:
    """The nodes behind each that has some, in their order; END's are those right behind the row."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def depth_first(parents: Parents) -> list[int]:
    """The nodes in an order in which what is behind a node follows it, its last child first: so the branch of first
    children comes last, and lies where a row of its own would when all are fed."""
    behind, order, waiting = children(parents), [], []
    waiting += behind.get(END, [])
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += behind.get(node, [])
    return order
