"""How near to its teacher is a model at given widths? Query by query: nats behind the query, and the distance.

A row is a query, its first tokens, and what follows it; only what follows is scored. Widths never depend on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mlspec.routing.blocks import average_bits, blocks_of
from hf_mlspec.routing.passes import Routed, Steps, at_widths
from hf_mlspec.routing.router import Router

BATCH = 16


@dataclass
class Found:
    """Of every query: nats a token, distance to the teacher in nats a token, bits of a weight, widths of blocks."""

    nats: Tensor
    distance: Tensor
    bits: Tensor
    widths: list[list[int]] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return float(self.nats.mean().exp())


class Scorer:
    """A model in bit-planes and its teacher over rows int64 ``[queries, tokens]``."""

    def __init__(self, model: Any, teacher: Any, rows: Tensor, query_tokens: int):
        self.model, self.teacher, self.rows, self.query = model, teacher, rows, query_tokens
        self.blocks = blocks_of(model)
        self.kept = rows.shape[1] - query_tokens
        self.wanted = [self._logprobs(teacher, part) for part in rows.split(BATCH)]

    @torch.no_grad()
    def _logprobs(self, model: Any, rows: Tensor) -> Tensor:
        """float32 ``[rows, scored, vocab]`` of the tokens behind the query."""
        logits = model(input_ids=rows, use_cache=False, logits_to_keep=self.kept + 1).logits
        return F.log_softmax(logits[:, :-1].float(), -1)

    def _score(self, number: int, own: Tensor) -> tuple[Tensor, Tensor]:
        wanted = self.wanted[number]
        said = self.rows[number * BATCH : number * BATCH + len(own), self.query :]
        nats = -own.gather(-1, said.unsqueeze(-1)).squeeze(-1).mean(1)
        return nats.cpu(), (wanted.exp() * (wanted - own)).sum(-1).mean(1).cpu()

    def teachers(self) -> Found:
        """The teacher itself."""
        found = [self._score(number, own)[0] for number, own in enumerate(self.wanted)]
        nats = torch.cat(found)
        return Found(nats, torch.zeros_like(nats), torch.full_like(nats, 16.0))

    def fixed(self, widths: Sequence[int]) -> Found:
        """Every query at these widths."""
        return self.each([list(widths)] * len(self.rows))

    def each(self, widths: list[list[int]]) -> Found:
        """Query r at ``widths[r]``, a number for every block."""
        found = []
        for number, part in enumerate(self.rows.split(BATCH)):
            own = widths[number * BATCH : number * BATCH + len(part)]
            found.append(self._under(number, part, at_widths(self.model, self.blocks, list(zip(*own, strict=True)))))
        return self._found(found, widths)

    def routed(self, router: Router) -> Found:
        """Every query at what the router chooses from it."""
        found, widths = [], []
        for number, part in enumerate(self.rows.split(BATCH)):
            routed = Routed(router, self.blocks, [self.query] * len(part))
            found.append(self._under(number, part, routed.over(self.model)))
            widths += [list(row) for row in zip(*routed.widths, strict=True)]
        return self._found(found, widths)

    def in_steps(self, router: Router) -> Found:
        """Every token behind a query at what it chooses for itself. widths: of the tokens of all queries."""
        found, widths, bits = [], [], []
        for number, part in enumerate(self.rows.split(BATCH)):
            steps = Steps([(self.query, part.shape[1])] * len(part), [None] * len(part))
            routed = Routed(router, self.blocks, [self.query] * len(part), steps=steps)
            found.append(self._under(number, part, routed.over(self.model)))
            for row in range(len(part)):
                of_blocks = [of[row][self.query :] for of in routed.of_tokens.values()]
                each = [list(own) for own in zip(*of_blocks, strict=True)]
                bits.append(sum(average_bits(own, self.blocks) for own in each) / len(each))
                widths += each
        nats, distance = (torch.cat(part) for part in zip(*found, strict=True))
        return Found(nats, distance, torch.tensor(bits), widths)

    def all_planes(self) -> Found:
        """Every query at all planes, as the model computes without a router."""
        found = [self._under(number, part, nullcontext()) for number, part in enumerate(self.rows.split(BATCH))]
        planes = min(one.num_planes for block in self.blocks for one in block.linears.values())
        return self._found(found, [[planes] * len(self.blocks)] * len(self.rows))

    def _under(self, number: int, rows: Tensor, widths: AbstractContextManager) -> tuple[Tensor, Tensor]:
        with widths:
            own = self._logprobs(self.model, rows)
        return self._score(number, own)

    def _found(self, found: list[tuple[Tensor, Tensor]], widths: list[list[int]]) -> Found:
        bits = torch.tensor([average_bits(row, self.blocks) for row in widths])
        return Found(*(torch.cat(part) for part in zip(*found, strict=True)), bits, widths)
