"""How does the decoder of GPUs step a model whose rows read as many planes as their prompts were given?

A prompt is read in one step of its own, in which every block chooses as the step comes to it; the host waits for each
choice. Where memory is short, an MLP computes a part of its tokens after the other. Steps behind it know what they
read, so that a graph holds them (engines/cuda/steps.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engines.cuda.decoder import CudaDecoder
from ..engines.cuda.engine import CHUNK, LEAST_CHUNK, CudaEngine, int32, prefill
from ..engines.cuda.row_bits import RowBits
from ..engines.cuda.steps import CudaSteps
from ..engines.cuda.streamed import StreamedPlanesLinear
from ..engines.cuda.weights import PlanesTilesLinear
from ..engines.engine import Rows
from ..engines.memory import out_of_memory
from ..precision import Bits
from .blocks import Block, blocks_of
from .features import pooled
from .foresight import LEAD, announce
from .router import Router
from .row_widths import ChoosingRows

ORDERED = "its linears read inputs in an order or a rotation of their own, in which a router was not trained"
OTHER_BLOCKS = "its blocks are not the attention and the MLP of every layer, all of them in bit-planes"


_KEPT = 64  # choices of all rows together whose places on the device are kept


class _Scorers:
    """A router's MLPs where the model is, standardization folded into their first layers: three small kernels and one
    wait a block."""

    def __init__(self, router: Router, device: torch.device):
        self.widths, self.layers = router.widths, []
        with torch.no_grad():
            for one in router.of:
                inner = one.inner.weight / one.spread
                bias = one.inner.bias - inner @ one.mean
                parts = inner.T, bias, one.outer.weight.T, one.outer.bias
                self.layers.append([part.to(device).contiguous() for part in parts])
        self.ahead = [(own.bias.to(device), own.weight.to(device)) for own in router.ahead]

    def choose(self, block: int, features: Tensor, foresees: bool = False) -> tuple[int | None, int | None]:
        """The width of the highest score, the narrower of equal ones; None where one is NaN or infinite. features:
        float32 ``[1, features]``. Then what block + LEAD is likely to
        choose, None where nobody asks or knows."""
        inner, bias, outer, last = self.layers[block]
        scores = torch.addmm(last, F.silu(torch.addmm(bias, features, inner)), outer)
        if foresees and block < len(self.ahead):
            bias, weight = self.ahead[block]
            own, ahead = torch.cat([scores, torch.addmm(bias, features, weight)]).tolist()
        else:
            own, ahead = scores[0].tolist(), None
        chosen = self.widths[own.index(max(own))] if all(map(math.isfinite, own)) else None
        return chosen, None if ahead is None else self.widths[ahead.index(max(ahead))]


class _Choosing:
    """Bits of every block of a step over one prompt, chosen from what the block reads. widths: of all blocks."""

    def __init__(self, scorers: _Scorers, blocks: Sequence[Block]):
        self.scorers, self.blocks = scorers, blocks
        self.widest, self.key = Bits(scorers.widths[-1], 16), ()
        self.widths: list[int] = []
        self.streams = any(linear.source is not None for block in blocks for linear in block.linears.values())

    def at(self, block: int, x: Tensor) -> Bits:
        """As `BlockBits.at`; waits for the device."""
        features = x.mean(0, keepdim=True, dtype=torch.float32)
        width, ahead = self.scorers.choose(block, features, self.streams)
        if ahead is not None:
            announce(self.blocks[block + LEAD], ahead)
        if width is None:
            pooled(x[None], [len(x)], self.blocks[block].name)  # raises where x is the reason
            raise FloatingPointError(f"the router scores {self.blocks[block].name} NaN or infinite: train another")
        self.widths.append(width)
        return Bits(width, 16)


class RoutedCudaEngine(ChoosingRows, CudaEngine):
    """A CUDA decoder over its rows, a width per block and row. See `Engine`; chosen: as of `RowWidths`."""

    can = replace(CudaEngine.can, capturable=False, bit_exact=False)  # rows of one beginning may read other planes

    def __init__(self, model: nn.Module, decoder: CudaDecoder, router: Router, **options: Any):
        """options: those of `CudaEngine`."""
        super().__init__(model, decoder, **options)
        self.can = RoutedCudaEngine.can
        self.router, self.blocks = router, blocks_of(model)
        self.chosen = []
        self._row_bits: dict[tuple, RowBits] = {}  # graphs hold addresses of theirs
        self._scorers = _Scorers(router, decoder.device)

    def start(self, batch: int, device: torch.device) -> None:
        super().start(batch, device)
        self._let_go()

    def _let_go(self) -> None:
        """Of graphs of other widths, which keep streamed planes where they are, too."""
        self._steps, self._row_bits = CudaSteps(self.model, self.decoder), {}

    def _choose(self, r: int, row: list[int], batch: int) -> None:
        self._reserve(len(row))
        operands = [int32(own, self.decoder) for own in ([row], [0], [len(row)])]
        pick = torch.zeros(1, dtype=torch.int64, device=self.decoder.device)  # nobody reads its logits
        how, at_once = {"pick": pick, "draft_window": self.draft_window}, CHUNK
        while True:
            choosing = _Choosing(self._scorers, self.blocks)
            try:
                self.decoder.forward(
                    *operands, self._kv(batch)[:, :, r : r + 1], bits=choosing, at_once=at_once, **how
                )
                break
            except RuntimeError as error:
                if at_once <= LEAST_CHUNK or not out_of_memory(error):
                    raise
            at_once = min(at_once, len(row)) // 2  # what was written is written again, with the same bits
            torch.cuda.empty_cache()  # behind the error, whose frames hold what the step had computed
        self.forwards += 1
        self.chosen[r], self.lengths[r] = choosing.widths, len(row) - 1

    def _prefill(self, lines: Rows) -> None:
        """As `CudaEngine` does, row by row."""
        for r, line in enumerate(lines):
            if len(line) > self.lengths[r]:
                kv, bits = self._kv(len(lines))[:, :, r : r + 1], self._bits_of([self.chosen[r]])
                self.forwards += prefill(self.decoder, kv, [line], [self.lengths[r]], bits, self.draft_window)

    def _bits_of_rows(self) -> RowBits:
        """Of inactive rows, whose logits are meaningless, those of another row."""
        known = next(own for own in self.chosen if own is not None)
        return self._bits_of([own or known for own in self.chosen])

    def _bits_of(self, widths: Sequence[Sequence[int]]) -> RowBits:
        key = tuple(map(tuple, widths))
        if key not in self._row_bits:
            if len(self._row_bits) == _KEPT:  # rows came and went
                self._let_go()
            self._row_bits[key] = RowBits(widths, self.decoder.device)
        return self._row_bits[key]


def why_not_compiled(model: nn.Module, decoder: CudaDecoder) -> str:
    """Why a decoder cannot step a routed model; "" where it can."""
    own, found = blocks_of(model), decoder.blocks()
    outputs = [sum(linear.out_features for linear in block.linears.values()) for block in own]
    if not all(isinstance(first, PlanesTilesLinear | StreamedPlanesLinear) for first, _, _ in found) or outputs != [
        first.out_features + last.out_features for first, last, _ in found
    ]:
        return OTHER_BLOCKS
    return ORDERED if any(order is not None for _, _, order in found) else ""
