"""How does the decoder of GPUs step a model whose rows read as many planes as their prompts were given?

A prompt is read in one step of its own, in which every block chooses as the step comes to it: on the device, and the
host learns all choices at the end; or, where kernels do not read widths from the device or nobody knows as yet which
streamed planes are likely (likely.py), the host waits for each (device_choice.py, host_choice.py). Where memory is
short, an MLP computes a part of its tokens after the other. Steps behind it know what they read, or choose on the
device, so that a graph holds them (engines/cuda/steps.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engines.capturing import free_cached
from ..engines.cuda.adapted import AdaptedLinear
from ..engines.cuda.decoder import CudaDecoder
from ..engines.cuda.engine import CHUNK, LEAST_CHUNK, CudaEngine, int32, prefill, soft_capped
from ..engines.cuda.row_bits import BlockBits, RowBits
from ..engines.cuda.steps import CudaSteps
from ..engines.cuda.streamed import StreamedPlanesLinear
from ..engines.cuda.weights import PlanesTilesLinear
from ..engines.engine import Guess, Rows
from ..engines.memory import out_of_memory
from .blocks import blocks_of
from .device_choice import (
    ChosenOnDevice,
    StepBits,
    StepState,
    chooses_on_device,
    streamed_top,
    weights_on_device,
)
from .host_choice import ChosenOnHost, KernelScorers, Scorers
from .likely import TRIES, likely_of
from .router import STEP, Router
from .row_widths import ChoosingRows

ORDERED = "its linears read inputs in an order or a rotation of their own, in which a router was not trained"
ADAPTED = "its linears carry adapters, beside which no planes are chosen on a GPU"
OTHER_BLOCKS = "its blocks are not the attention and the MLP of every layer, all of them in bit-planes"

Choosing = ChosenOnDevice | ChosenOnHost

_KEPT = 64  # choices of all rows together whose places on the device are kept


class RoutedCudaEngine(ChoosingRows, CudaEngine):
    """A CUDA decoder over its rows, a width per block and row. See `Engine`; chosen: as of `RowWidths`."""

    can = replace(CudaEngine.can, capturable=False, bit_exact=False)  # rows of one beginning may read other planes

    def __init__(self, model: nn.Module, decoder: CudaDecoder, router: Router, **options: Any):
        """options: those of `CudaEngine`."""
        super().__init__(model, decoder, **options)
        self.can = RoutedCudaEngine.can
        self.router, self.blocks = router, blocks_of(model)
        self.chosen, self.queries = [], []
        self._row_bits: dict[tuple, RowBits] = {}  # graphs hold addresses of theirs
        self._on_device, self._top = chooses_on_device(decoder, router), streamed_top(decoder)
        self._likely = likely_of(router, self.blocks)
        self._weights = weights_on_device(router, decoder.device) if self._on_device or router.every == STEP else []
        if not self._on_device:
            self._scorers = Scorers(router, decoder.device)
        else:
            self._scorers = KernelScorers(router, self._weights) if self._top else None  # None: the host never waits
        self._state: StepState | None = None  # of rows whose steps choose

    def start(self, batch: int, device: torch.device) -> None:
        super().start(batch, device)
        self._let_go()
        if self.router.every == STEP:
            self._state = StepState.new(self.blocks, self.router, batch, self.decoder.device)

    def select(self, keep: list[int]) -> None:
        super().select(keep)
        if self._state is not None:
            self._state = self._state.picked(keep)

    def admit(self, count: int) -> None:
        super().admit(count)
        if self._state is not None:
            self._state = self._state.grown(count)

    def forget(self, row: int) -> None:
        super().forget(row)
        if self._state is not None:
            self._state.forget(row)

    def _let_go(self) -> None:
        """Of graphs of other widths, which keep streamed planes where they are, too."""
        self._steps, self._row_bits = CudaSteps(self.model, self.decoder), {}

    def feed(self, rows: Rows, guess: Guess | None = None, alive: list[bool] | None = None) -> Tensor:
        """As `Engine.feed`. Where all rows begin here, alone, the passes that choose give their logits."""
        on = alive or [True] * len(rows)
        begins = [known is None for known, own in zip(self.chosen, on, strict=True) if own]
        if not (begins and all(begins)) or (guess is not None and guess.tokens.shape[1]):
            return super().feed(rows, guess, alive)
        pairs = enumerate(zip(rows, on, strict=True))
        found = [self._choose(r, row, len(rows)) if own else None for r, (row, own) in pairs]
        self.lengths = [len(row) if own else have for row, own, have in zip(rows, on, self.lengths, strict=True)]
        some = next(own for own in found if own is not None)
        return torch.stack([torch.zeros_like(some) if own is None else own for own in found])

    def _choose(self, r: int, row: list[int], batch: int) -> Tensor:
        """As `ChoosingRows._choose`; float32 logits behind the row ``[1, vocab]``."""
        self._reserve(len(row))
        for way in self._ways():
            logits, choosing = self._read_whole(r, row, batch, way)
            widths = choosing.told()
            self._likely.saw(widths)
            if choosing.sufficed(widths):
                break
        self.chosen[r], self.lengths[r] = widths, len(row) - 1
        if self._state is not None:
            self._state.know(r, len(row), widths, choosing.means)
        return soft_capped(logits.float(), self.decoder.logit_softcap)

    def _read_whole(
        self, r: int, row: list[int], batch: int, way: Callable[[], Choosing]
    ) -> tuple[Tensor, Choosing]:
        """Logits behind a row that begins here, from one step whose blocks choose."""
        operands = [int32(own, self.decoder) for own in ([row], [0], [len(row)])]
        pick = torch.tensor([len(row) - 1], device=self.decoder.device)
        how, at_once = {"pick": pick, "draft_window": self.draft_window}, CHUNK
        while True:
            choosing, kv = way(), self._kv(batch)[:, :, r : r + 1]
            try:
                logits = self.decoder.forward(*operands, kv, bits=choosing, at_once=at_once, **how)
                break
            except RuntimeError as error:
                if at_once <= LEAST_CHUNK or not out_of_memory(error):
                    raise
            at_once = min(at_once, len(row)) // 2  # what was written is written again, with the same bits
            free_cached()  # behind the error, whose frames hold what the step had computed
        self.forwards += 1
        return logits, choosing

    def _ways(self) -> Iterator[Callable[[], Choosing]]:
        """How a prompt's blocks may choose, one after the other until one has all planes that it chose."""
        for _ in range(TRIES if self._on_device and self._top else 0):
            if (likely := self._likely.of_all()) is None:
                break
            there = [max(own, self._top) for own in likely]
            yield partial(ChosenOnDevice, self._weights, self.blocks, there)
        if self._on_device and not self._top:
            yield partial(ChosenOnDevice, self._weights, self.blocks)
        else:
            yield partial(ChosenOnHost, self._scorers, self.blocks)

    def _prefill(self, lines: Rows) -> None:
        """As `CudaEngine` does, row by row."""
        for r, line in enumerate(lines):
            if len(line) > self.lengths[r]:
                kv, bits = self._kv(len(lines))[:, :, r : r + 1], self._bits_of([r])
                self.forwards += prefill(self.decoder, kv, [line], [self.lengths[r]], bits, self.draft_window)

    def _bits_of_rows(self) -> BlockBits:
        return self._bits_of(range(len(self.chosen)))

    def _bits_of(self, rows: Sequence[int]) -> BlockBits:
        """Of inactive rows, whose logits are meaningless, those of another row."""
        if self._state is not None:
            state = self._state if len(rows) == len(self.chosen) else self._state.of(rows[0])
            return StepBits(state, self._weights, self.router, waits=not self._on_device or self._top > 0)
        known = next(own for own in self.chosen if own is not None)
        key = tuple(tuple(self.chosen[r] or known) for r in rows)
        if key not in self._row_bits:
            if len(self._row_bits) == _KEPT:  # rows came and went
                self._let_go()
            self._row_bits[key] = RowBits(key, self.decoder.device)
        return self._row_bits[key]


def why_not_compiled(model: nn.Module, decoder: CudaDecoder) -> str:
    """Why a decoder cannot step a routed model; "" where it can."""
    own, found = blocks_of(model), decoder.blocks()
    if any(isinstance(linear, AdaptedLinear) for first, last, _ in found for linear in (first, last)):
        return ADAPTED
    outputs = [sum(linear.out_features for linear in block.linears.values()) for block in own]
    if not all(isinstance(first, PlanesTilesLinear | StreamedPlanesLinear) for first, _, _ in found) or outputs != [
        first.out_features + last.out_features for first, last, _ in found
    ]:
        return OTHER_BLOCKS
    return ORDERED if any(order is not None for _, _, order in found) else ""
