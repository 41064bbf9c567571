"""What scores tokens step by step on a device? A decoder that only enqueues, its cache, and how much of that is true.

The protocol of `Runner`: the ordinary loop runs over it wherever whole rounds cannot be captured (rounds/captured.py).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from ..nn.device_decoder import DeviceDecoder
from .decoder_rows import DecoderRows
from .device_prefill import int32, padded, prefill
from .device_steps import DeviceSteps
from .draft import Rows

_LEAD = 4  # tokens a row may lack and still be fed in one step with its draft; more of them are a prefill


class DeviceRunner(DecoderRows):
    """A device decoder over its rows. See `Runner`.

    seconds: until the forward passes were launched; the device may still be at them.
    """

    decoder: DeviceDecoder

    def __init__(self, model: nn.Module, decoder: DeviceDecoder, **options: Any):
        """options: those of `DecoderRows`."""
        super().__init__(model, decoder, **options)
        self.device = decoder.device
        self._steps = DeviceSteps(decoder)

    def feed(
        self,
        rows: Rows,
        draft: Tensor | None = None,
        drafted: list[int] | None = None,
        alive: list[bool] | None = None,
    ) -> Tensor:
        """Score rows and drafts as `Runner.feed` does: float32 logits `[batch, k + 1, vocab]`.

        A row that lacks a token or two is fed them with its draft, and its neighbours are fed as many, which their
        cache may hold already: it writes the same bits again (law 3).
        """
        alive, drafted = alive or [True] * len(rows), drafted or [0] * len(rows)
        width = draft.shape[1] if draft is not None else 0
        reach = max(len(row) + n for row, n, on in zip(rows, drafted, alive, strict=True) if on)
        self._reserve(reach)
        lead = self._fill(rows, alive)
        starts = [len(row) - lead if on else 0 for row, on in zip(rows, alive, strict=True)]
        last = [row[-lead:] if on else [] for row, on in zip(rows, alive, strict=True)]
        ids = int32(padded(last, lead), self.decoder)
        if width:
            ids = torch.cat([ids, draft.to(ids)], dim=1)
        counts = [lead + n if on else 0 for n, on in zip(drafted, alive, strict=True)]
        logits = self._forward(ids, starts, counts, [lead - 1] * len(rows), width + 1)
        self.lengths = [
            start + count if on else have
            for start, count, have, on in zip(starts, counts, self.lengths, alive, strict=True)
        ]
        return logits

    def step(self, tokens: Tensor, counts: list[int], first: list[int], kept: int) -> Tensor:
        """One forward pass behind what the cache holds, as `Runner.step`; a row whose count is 0 rests."""
        self._reserve(max(have + count for have, count in zip(self.lengths, counts, strict=True)))
        starts = [have if count else 0 for have, count in zip(self.lengths, counts, strict=True)]
        logits = self._forward(tokens.to(self.device, torch.int32), starts, counts, first, kept)
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        return logits

    def _fill(self, rows: Rows, alive: list[bool]) -> int:
        """Bring the cache of every row that is alive to all but its last tokens; how many are left of each."""
        going = [row for row, on in zip(rows, alive, strict=True) if on]
        missing = [len(row) - min(have, len(row) - 1) for row, have in zip(rows, self.lengths, strict=True)]
        most = max(n for n, on in zip(missing, alive, strict=True) if on)
        # A follower must not write again what its leader wrote.
        if most <= min(_LEAD, *map(len, going)) and (most == 1 or self.follow is None):
            return most
        begin = time.perf_counter()
        lines = [row[:-1] if on else [] for row, on in zip(rows, alive, strict=True)]
        self.forwards += prefill(self.decoder, self._kv(len(rows)), lines, self.lengths, self.bits)
        self.seconds += time.perf_counter() - begin
        return 1

    def _forward(self, ids: Tensor, starts: list[int], counts: list[int], first: list[int], kept: int) -> Tensor:
        """Float32 logits `[batch, kept, vocab]` of the positions from first[r] on, soft cap applied."""
        begin = time.perf_counter()
        batch, width = ids.shape
        pick = None
        if kept < width:
            rows = torch.arange(batch)[:, None] * width
            wanted = torch.tensor(first)[:, None] + torch.arange(kept)
            pick = (rows + wanted.clamp(max=width - 1)).flatten().to(self.device, non_blocking=True)
        operands = ids.contiguous(), int32(starts, self.decoder), int32(counts, self.decoder)
        logits = self._steps.forward(*operands, self._kv(batch), pick=pick, bits=self.bits)
        self.forwards += 1
        self.seconds += time.perf_counter() - begin
        return soft_capped(logits.float(), self.decoder.logit_softcap).view(batch, kept, -1)

    def _kv(self, batch: int) -> Tensor:
        """The cache's first rows, and as many of its layers as the decoder has: an early exit has fewer."""
        return self.cache.kv[: self.decoder.num_layers, :, :batch]


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), float32, or the logits where cap is 0."""
    return torch.tanh(logits / cap) * cap if cap else logits
