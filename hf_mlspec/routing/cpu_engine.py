"""How does the decoder of CPUs step a model whose rows read as many planes as their prompts were given?

A prompt is read in one pass of its own, however long it is: each block chooses from all of it. Later calls name the
planes of every block; rows that read alike share one. Where every step chooses, all tokens of a call share a pass, in
which each block multiplies them by as many planes as each has chosen.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..engines.cpu.decoder import CpuDecoder
from ..engines.cpu.engine import CpuEngine
from .blocks import blocks_of
from .choice import widths_of
from .features import moved, pooled
from .router import STEP, Router
from .row_widths import ChoosingRows, Query

OTHER_BLOCKS = "its blocks are not the attention and the MLP of every layer, all of them in bit-planes and plain"


class RoutedCpuEngine(ChoosingRows, CpuEngine):
    """A CPU decoder over its rows, a width per block and row. See `Engine`; chosen: as of `RowWidths`."""

    can = replace(CpuEngine.can, greedy_rounds=False, bit_exact=False, tapped=False, trees=False)

    def __init__(self, model: nn.Module, decoder: CpuDecoder, router: Router, **options: Any):
        """options: those of `CpuEngine`."""
        super().__init__(model, decoder, **options)
        self.can = RoutedCpuEngine.can
        self.router, self.blocks = router, blocks_of(model)
        self.chosen, self.queries = [], []

    def _choose(self, r: int, row: list[int], batch: int) -> None:
        self._reserve(len(row))
        only = [int(other == r) for other in range(batch)]
        where = [len(row) * own for own in only], [0] * batch, only
        means: list[Tensor] = []

        def choose(block: int, inputs: Tensor) -> list[int]:
            found = pooled(inputs[None], [len(inputs)], self.blocks[block].name)
            means.append(found[0])
            return widths_of(self.router, self.blocks, block, found) * len(inputs)

        begin = time.perf_counter()
        how = False, False, self.draft_window
        *_, self.chosen[r] = self.decoder.score_choosing(self.cache.kv, row, *where, *how, choose=choose)
        self._count(1, time.perf_counter() - begin)
        if self.router.every == STEP:
            self.queries[r] = Query(len(row), means)
        self.lengths[r] = len(row) - 1

    def _scored(
        self, tokens: list[int], counts: list[int], starts: list[int], kept: list[int], *wanted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `CpuEngine` does, a call for all rows that read the same planes, or one whose tokens choose."""
        if self.router.every == STEP and any(kept):
            return self._scored_in_steps(tokens, counts, starts, kept, *wanted)
        ends, ways = list(accumulate(counts)), dict.fromkeys(tuple(self.chosen[r]) for r, n in enumerate(kept) if n)
        if not ways:  # all rows rest
            return super()._scored(tokens, counts, starts, kept, *wanted)
        found: list[tuple[Tensor, ...]] = [()] * len(kept)
        for widths in ways:
            own = [n and tuple(self.chosen[r]) == widths for r, n in enumerate(kept)]
            places = [range(end - n, end) for on, end, n in zip(own, ends, counts, strict=True) if on]
            fed = [tokens[at] for place in places for at in place]
            some, asked = ([n if on else 0 for on, n in zip(own, every, strict=True)] for every in (counts, kept))
            parts = self.decoder.call(
                "score_routed", self.cache.kv, fed, some, starts, asked, *wanted, self.draft_window, list(widths)
            )
            cut = [part.split(asked) if len(part) else [part] * len(kept) for part in parts]
            for r in (r for r, on in enumerate(own) if on):
                found[r] = tuple(part[r] for part in cut)
        best, confidence, logits = zip(*(own for own in found if own), strict=True)
        return torch.cat(best), torch.cat(confidence), torch.cat(logits)

    def _scored_in_steps(
        self, tokens: list[int], counts: list[int], starts: list[int], kept: list[int], *wanted: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same where each token behind a query chooses."""
        places = [(r, start + at) for r, (count, start, asked) in enumerate(zip(counts, starts, kept, strict=True))
                  for at in range(count if asked else 0)]  # fmt: skip
        begin = end = 0

        def choose(block: int, inputs: Tensor) -> list[int]:
            nonlocal begin, end
            if block == 0:  # the next pass
                begin, end = end, end + len(inputs)
            return self._widths_of(block, inputs, places[begin:end])

        how = self.cache.kv, tokens, counts, starts, kept, *wanted, self.draft_window
        return self.decoder.score_choosing(*how, choose=choose, mixes=True)[:3]

    def _widths_of(self, block: int, inputs: Tensor, places: list[tuple[int, int]]) -> list[int]:
        """Of tokens at (row, position): of a query those of the query, of the others what each chooses."""
        found = [self.chosen[r][block] for r, _ in places]
        behind = [at for at, (r, place) in enumerate(places) if place >= self.queries[r].tokens]
        if behind:
            means = torch.stack([self.queries[places[at][0]].means[block] for at in behind])
            features = moved(means, inputs[behind], self.router.step_share, self.blocks[block].name)
            for at, width in zip(behind, widths_of(self.router, self.blocks, block, features), strict=True):
                found[at] = width
        return found


def why_not_compiled(model: nn.Module, decoder: CpuDecoder) -> str:
    """Why a decoder cannot step a routed model; "" where it can."""
    outputs = [sum(linear.out_features for linear in block.linears.values()) for block in blocks_of(model)]
    return "" if outputs == decoder.blocks else OTHER_BLOCKS
