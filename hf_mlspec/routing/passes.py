"""How does a forward pass meet the choice of a width? At the first product of every block.

What the first layer of a block multiplies is the block's input. `Routed` chooses widths there: of rows that begin from
the mean of their own query, of all others as it chose before. Nothing is changed in the model: its layers ask the
switch they share, which answers in the thread of the pass alone. Tokens behind a query may choose on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..nn.planes import PlanesLinear
from ..nn.switch import PrecisionSwitch, precision_switch
from .blocks import Block
from .choice import widths_of
from .features import moved, pooled
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


class Steps(NamedTuple):
    """Tokens of a pass that choose on their own. spans: of each row their first place in the pass and the one behind
    the last. means: of each row what its query was to every block, None where the pass itself reads it."""

    spans: list[tuple[int, int]]
    means: list[Sequence[Tensor] | None]


class Routed:
    """Widths of every row and block of one pass.

    lengths: tokens of the query at the beginning of each row of the pass, 0 for rows that have their widths. known:
    ``known[j][r]`` is the width of block j for row r, read for rows with no query here. After the pass ``widths`` has
    those of all rows, and ``of_tokens[j]`` those of block j for each token, where steps are given.
    """

    def __init__(
        self, router: Router, blocks: Sequence[Block], lengths: list[int], known: Widths | None = None,
        steps: Steps | None = None,
    ):  # fmt: skip
        self.router, self.blocks, self.lengths, self.steps = router, list(blocks), lengths, steps
        widest = [[router.widths[-1]] * len(lengths) for _ in self.blocks]
        self.widths = [list(line) for line in (known or widest)]
        self.fresh = [row for row, length in enumerate(lengths) if length]
        self.features: dict[int, Tensor] = {}  # of fresh rows, of the blocks that the pass has come to
        self.step_features: dict[int, list[Tensor]] = {}  # of tokens that choose on their own, of every row
        self.of_tokens: dict[int, list[list[int]]] = {}
        if steps is not None and all(begin >= end for begin, end in steps.spans):
            self.steps = None

    @contextmanager
    def over(self, model: nn.Module, switch: PrecisionSwitch | None = None) -> Iterator[Routed]:
        """One pass of ``model`` inside reads the widths that are chosen on its way."""
        with in_blocks(model, self.blocks, self._product, switch):
            yield self

    def _product(self, place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
        if self.fresh and place not in self.features:
            self._choose(place, x)
        if self.steps is None:
            return linear.at_rows(x, self.widths[place])
        if place not in self.of_tokens:
            self.of_tokens[place] = self._choose_steps(place, x)
        each = [width for row in self.of_tokens[place] for width in row]
        return linear.at_rows(x.reshape(-1, 1, x.shape[-1]), each).view(*x.shape[:2], -1)

    def _choose(self, place: int, x: Tensor) -> None:
        if x.dim() != 3 or len(x) != len(self.lengths):
            raise ValueError(f"the query lengths are of {len(self.lengths)} rows, the pass has {list(x.shape)}")
        lengths = [self.lengths[row] for row in self.fresh]
        found = self.features[place] = pooled(x[self.fresh], lengths, self.blocks[place].name)
        for row, width in zip(self.fresh, widths_of(self.router, self.blocks, place, found), strict=True):
            self.widths[place][row] = width

    def _choose_steps(self, place: int, x: Tensor) -> list[list[int]]:
        found = [[own] * x.shape[1] for own in self.widths[place]]
        for row, (begin, end) in enumerate(self.steps.spans):
            if begin >= end:
                continue
            known = self.steps.means[row]
            mean = self.features[place][self.fresh.index(row)] if known is None else known[place]
            features = moved(mean, x[row, begin:end], self.router.step_share, self.blocks[place].name)
            self.step_features.setdefault(place, []).append(features)
            found[row][begin:end] = widths_of(self.router, self.blocks, place, features)
        return found


@contextmanager
def at_widths(model: nn.Module, blocks: Sequence[Block], widths: Widths) -> Iterator[None]:
    """Passes inside read ``widths[j][r]`` planes in block j for row r: fixed allocations, for comparison."""
    with in_blocks(model, blocks, lambda place, linear, x: linear.at_rows(x, widths[place])):
        yield


@contextmanager
def recorded(
    model: nn.Module, blocks: Sequence[Block], lengths: list[int],
    see: Callable[[int, Tensor, list[int]], Tensor] | None = None,
) -> Iterator[dict[int, Tensor]]:  # fmt: skip
    """A pass inside, at the switch's bits, leaves ``see(j, input, lengths)`` of every block j, or its pooled input,
    float32 ``[rows, features]``."""
    found: dict[int, Tensor] = {}

    def product(place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
        if place not in found:
            with torch.no_grad():
                found[place] = see(place, x, lengths) if see else pooled(x, lengths, blocks[place].name)
        return linear.plain(x)

    with in_blocks(model, blocks, product):
        yield found
