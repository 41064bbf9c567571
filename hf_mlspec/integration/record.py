"""What does one call of generate stream and return?"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from ..speculation.checker import Verdict
from ..speculation.draft import Rows
from ..speculation.stats import SpeculationStats
from .processing import Prompts


class Record:
    """What is streamed and returned, collected round by round."""

    def __init__(self, settings: GenerationConfig, streamer, batch: int):
        self.settings, self.streamer, self.batch = settings, streamer, batch
        wanted = settings.return_dict_in_generate
        self.scores = [[] for _ in range(batch)] if wanted and settings.output_scores else None
        self.logits = [[] for _ in range(batch)] if wanted and settings.output_logits else None

    def __call__(self, numbers: list[int], kept: Rows, verdict: Verdict) -> None:
        if self.streamer is not None and any(kept):
            self.streamer.put(torch.tensor(kept[0] if self.batch == 1 else kept))
        for store, values in ((self.scores, verdict.scores), (self.logits, verdict.logits)):
            if store is not None:
                for r, (number, tokens) in enumerate(zip(numbers, kept, strict=True)):
                    # A copy: views would keep the rejected positions of every round alive.
                    store[number] += values[r, : len(tokens)].to(torch.float32, copy=True).unbind(0)

    def result(self, prompts: Prompts, rows: Rows, stats: SpeculationStats, cache):
        new = [row[n:] for row, n in zip(rows, prompts.lengths, strict=True)]
        width = max(map(len, new))
        tail = torch.tensor(
            [line + [prompts.filler] * (width - len(line)) for line in new],
            dtype=prompts.input_ids.dtype,
            device=prompts.input_ids.device,
        ).view(len(new), width)
        sequences = torch.cat([prompts.input_ids, tail], dim=1)
        if not self.settings.return_dict_in_generate:
            return sequences
        out = GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=_by_step(self.scores, new),
            logits=_by_step(self.logits, new),
            past_key_values=cache,
        )
        out.speculation = stats
        return out


def _by_step(store: list[list[Tensor]] | None, new: Rows) -> tuple[Tensor, ...] | None:
    """Per new token one `[batch, vocab]`; rows that had stopped hold zeros."""
    if store is None:
        return None
    blank = torch.zeros_like(next(line[0] for line in store if line))
    lines = list(zip(store, map(len, new), strict=True))
    return tuple(
        torch.stack([line[t] if t < count else blank for line, count in lines]) for t in range(max(map(len, new)))
    )
