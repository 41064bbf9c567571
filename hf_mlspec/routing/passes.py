"""How is a forward pass stopped at the door of every block, where its width is chosen?

`at_blocks` calls back before and behind each block of a pass, in this thread only. `Routed` chooses widths there: of
rows that begin from the mean of their own query, of all others as it chose before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.switch import precision_switch
from .blocks import Block
from .features import input_of, pooled
from .router import Router

Widths = list[list[int]]  # of every block, of every row


@contextmanager
def at_blocks(
    blocks: Sequence[Block], enter: Callable[[int, Tensor], None], leave: Callable[[int], None]
) -> Iterator[None]:
    """Inside, a pass of this thread calls ``enter(j, hidden)`` before block j and ``leave(j)`` behind it."""
    thread, handles = threading.get_ident(), []

    def before(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, words: tuple, options: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                enter(place, input_of(words, options))

        return hook

    def behind(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, words: tuple, out: Any) -> None:
            if threading.get_ident() == thread:
                leave(place)

        return hook

    try:
        for place, block in enumerate(blocks):
            handles.append(block.module.register_forward_pre_hook(before(place), with_kwargs=True))
            handles.append(block.module.register_forward_hook(behind(place)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Routed:
    """Widths of every row and block of one pass.

    lengths: tokens of the query at the beginning of each row of the pass, 0 for rows that have their widths. known:
    ``known[j][r]`` is the width of block j for row r, read for rows with no query here. After the pass ``widths`` has
    those of all rows.
    """

    def __init__(self, router: Router, blocks: Sequence[Block], lengths: list[int], known: Widths | None = None):
        self.router, self.blocks, self.lengths = router, list(blocks), lengths
        widest = [[router.widths[-1]] * len(lengths) for _ in self.blocks]
        self.widths: Widths = [list(line) for line in (known or widest)]
        self.fresh = [row for row, length in enumerate(lengths) if length]

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[Routed]:
        """One pass of ``model`` inside reads the widths that are chosen on its way."""
        switch = precision_switch(model)
        with ExitStack() as block:

            def enter(place: int, hidden: Tensor) -> None:
                block.enter_context(switch.at_rows(self._widths(place, hidden)))

            with at_blocks(self.blocks, enter, lambda place: block.close()):
                yield self

    def _widths(self, place: int, hidden: Tensor) -> list[int]:
        if len(hidden) != len(self.lengths):
            raise ValueError(f"the query lengths are of {len(self.lengths)} rows, the pass has {len(hidden)}")
        own = self.widths[place]
        if self.fresh:
            features = pooled(hidden[self.fresh], [self.lengths[r] for r in self.fresh], self.blocks[place].name)
            for row, width in zip(self.fresh, self.router.choose(place, features), strict=True):
                own[row] = width
        return own


@contextmanager
def at_widths(model: nn.Module, blocks: Sequence[Block], widths: Widths) -> Iterator[None]:
    """Passes inside read ``widths[j][r]`` planes in block j for row r: fixed allocations, for comparison."""
    switch = precision_switch(model)
    with ExitStack() as block:

        def enter(place: int, hidden: Tensor) -> None:
            block.enter_context(switch.at_rows(widths[place]))

        with at_blocks(blocks, enter, lambda place: block.close()):
            yield


@contextmanager
def recorded(blocks: Sequence[Block], lengths: list[int]) -> Iterator[list[Tensor]]:
    """A pass inside leaves the pooled input of every block, float32 ``[rows, features]``, in the list."""
    found: list[Tensor] = []

    def enter(place: int, hidden: Tensor) -> None:
        with torch.no_grad():
            found.append(pooled(hidden.detach(), lengths, blocks[place].name))

    with at_blocks(blocks, enter, lambda place: None):
        yield found
