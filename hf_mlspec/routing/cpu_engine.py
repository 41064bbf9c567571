"""How does the decoder of CPUs step a model whose rows read as many planes as their prompts were given?

A prompt is read in one pass of its own, however long it is: each block chooses from all of it. Later calls name the
planes of every block; rows that read alike share one. Where every step chooses, each token behind a prompt has a pass
of its own, so that it reads the same planes and gives the same bits in a check as in a step.
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

    can = replace(CpuEngine.can, greedy_rounds=False, bit_exact=False, tapped=False)

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

        def choose(block: int, inputs: Tensor) -> int:
            found = pooled(inputs[None], [len(inputs)], self.blocks[block].name)
            means.append(found[0])
            return widths_of(self.router, self.blocks, block, found)[0]

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
        """As `CpuEngine` does, a call for all rows that read the same planes, or for each token behind a query."""
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
        """The same row by row: what belongs to its query at its widths, then token by token."""
        found = []
        for r, (end, count, start, asked) in enumerate(zip(accumulate(counts), counts, starts, kept, strict=True)):
            if not asked:
                continue
            line, query = tokens[end - count : end], self.queries[r]
            early = min(count, max(0, query.tokens - start))
            parts = [self._part(r, line[:early], start, wanted)] if early else []
            parts += [self._part(r, [token], start + at, wanted) for at, token in enumerate(line[early:], early)]
            found.append([torch.cat(own)[-asked:] for own in zip(*parts, strict=True)])
        best, confidence, logits = zip(*found, strict=True)
        return torch.cat(best), torch.cat(confidence), torch.cat(logits)

    def _part(self, r: int, line: list[int], start: int, wanted: tuple[bool, ...]) -> tuple[Tensor, ...]:
        """Scores of tokens of row r from position ``start`` on: some of its query, or one behind it."""
        count, query = len(line), self.queries[r]
        where = [[own * (other == r) for other in range(len(self.chosen))] for own in (count, start, count)]
        how = self.cache.kv, line, *where, *wanted, self.draft_window
        if start < query.tokens:
            return self.decoder.call("score_routed", *how, self.chosen[r])

        def choose(block: int, inputs: Tensor) -> int:
            features = moved(query.means[block], inputs, self.router.step_share, self.blocks[block].name)
            return widths_of(self.router, self.blocks, block, features)[0]

        return self.decoder.score_choosing(*how, choose=choose)[:3]


def why_not_compiled(model: nn.Module, decoder: CpuDecoder) -> str:
    """Why a decoder cannot step a routed model; "" where it can."""
    outputs = [sum(linear.out_features for linear in block.linears.values()) for block in blocks_of(model)]
    return "" if outputs == decoder.blocks else OTHER_BLOCKS
