"""How does a forward pass meet the choice of a width? At the first product of every block.

What the first layer of a block multiplies is the block's input. `Routed` chooses widths there: of rows that begin from
the mean of their own query, of all others as it chose before. Nothing is changed in the model: its layers ask the
switch they share, which answers in the thread of the pass alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..nn.planes import PlanesLinear
from ..nn.switch import PrecisionSwitch, precision_switch
from .blocks import Block
from .features import pooled
from .foresight import LEAD, announce
from .router import Router

Widths = Sequence[Sequence[int]]  # of every block, of every row
Product = Callable[[int, PlanesLinear, Tensor], Tensor]


@contextmanager
def in_blocks(
    model: nn.Module, blocks: Sequence[Block], product: Product, switch: PrecisionSwitch | None = None
) -> Iterator[None]:
    """In this thread ``product(j, layer, x)`` gives the output of each bit-planes layer of block j; layers outside of
    the blocks compute as ever. switch: the model's, where the caller has it."""
    place_of = {linear: place for place, block in enumerate(blocks) for linear in block.linears.values()}

    def through(linear: PlanesLinear, x: Tensor) -> Tensor:
        place = place_of.get(linear)
        return linear.plain(x) if place is None else product(place, linear, x)

    with (switch or precision_switch(model)).sent_through(through):
        yield


class Routed:
    """Widths of every row and block of one pass.

    lengths: tokens of the query at the beginning of each row of the pass, 0 for rows that have their widths. known:
    ``known[j][r]`` is the width of block j for row r, read for rows with no query here. After the pass ``widths`` has
    those of all rows.
    """

    def __init__(self, router: Router, blocks: Sequence[Block], lengths: list[int], known: Widths | None = None):
        self.router, self.blocks, self.lengths = router, list(blocks), lengths
        widest = [[router.widths[-1]] * len(lengths) for _ in self.blocks]
        self.widths = [list(line) for line in (known or widest)]
        self.fresh = [row for row, length in enumerate(lengths) if length]
        self.features: dict[int, Tensor] = {}  # of fresh rows, of the blocks that the pass has come to

    @contextmanager
    def over(self, model: nn.Module, switch: PrecisionSwitch | None = None) -> Iterator[Routed]:
        """One pass of ``model`` inside reads the widths that are chosen on its way."""
        with in_blocks(model, self.blocks, self._product, switch):
            yield self

    def _product(self, place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
        if self.fresh and place not in self.features:
            self._choose(place, x)
        return linear.at_rows(x, self.widths[place])

    def _choose(self, place: int, x: Tensor) -> None:
        if x.dim() != 3 or len(x) != len(self.lengths):
            raise ValueError(f"the query lengths are of {len(self.lengths)} rows, the pass has {list(x.shape)}")
        lengths = [self.lengths[row] for row in self.fresh]
        found = self.features[place] = pooled(x[self.fresh], lengths, self.blocks[place].name)
        for row, width in zip(self.fresh, self.router.choose(place, found), strict=True):
            self.widths[place][row] = width
        if (width := self.router.foresee(place, found)) is not None:
            announce(self.blocks[place + LEAD], width)


@contextmanager
def at_widths(model: nn.Module, blocks: Sequence[Block], widths: Widths) -> Iterator[None]:
    """Passes inside read ``widths[j][r]`` planes in block j for row r: fixed allocations, for comparison."""
    with in_blocks(model, blocks, lambda place, linear, x: linear.at_rows(x, widths[place])):
        yield


@contextmanager
def recorded(model: nn.Module, blocks: Sequence[Block], lengths: list[int]) -> Iterator[dict[int, Tensor]]:
    """A pass inside, at the switch's bits, leaves the pooled input of every block, float32 ``[rows, features]``."""
    found: dict[int, Tensor] = {}

    def product(place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
        if place not in found:
            with torch.no_grad():
                found[place] = pooled(x, lengths, blocks[place].name)
        return linear.plain(x)

    with in_blocks(model, blocks, product):
        yield found
