"""What are queries over a ragged cache on a GPU, and what do they attend to exactly?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.ops.attention_plain import FIRST_SLOTS

DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """Queries `[batch, width, heads, dim]` over a cache whose slots behind a row's end are NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    starts: list[int]
    counts: list[int]
    window: int = 0
    softcap: float = 0.0
    draft_window: int = 0
    sinks: Tensor | None = None  # [heads]

    def lengths(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in (self.starts, self.counts))

    def attend(self) -> Tensor:
        poisoned = torch.full_like(self.q, torch.nan)  # the allocator hands its memory to the result
        del poisoned
        scale = self.q.shape[-1] ** -0.5
        lanes = self.keys, self.values
        rule = scale, self.window, self.softcap, self.draft_window, self.sinks
        return ops.ragged_attention_rows(self.q, *lanes, *self.lengths(), *rule)


def make(
    starts: list[int],
    counts: list[int],
    width: int,
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 128,
    slots: int = 640,
    **rule,
) -> Case:
    random = torch.Generator().manual_seed(len(starts) * 1000 + dim)
    q = torch.randn(len(starts), width, heads, dim, generator=random) * 1.5
    keys, values = torch.randn(2, len(starts), kv_heads, slots, dim, generator=random) * 1.5
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        end = start + min(count, width) if count > 0 else 0
        keys[row, :, end:], values[row, :, end:] = torch.nan, torch.nan
        q[row, max(count, 0) :] = torch.nan
    return Case(*(t.bfloat16().to(DEVICE) for t in (q, keys, values)), starts, counts, **rule)


def seen(case: Case, position: int) -> list[int]:
    """The slots that a token sees."""
    first = max(0, position - case.window + 1) if case.window else 0
    recent = max(0, position - case.draft_window + 1) if case.draft_window else 0
    return [slot for slot in range(first, position + 1) if slot < FIRST_SLOTS or slot >= recent]


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """Float64 result, zeros for padding; and the mean of |values| under the same weights, which scales the errors."""
    q, keys, values = (t.double().cpu() for t in (case.q, case.keys, case.values))
    out, size = torch.zeros_like(q), torch.zeros_like(q)
    group = q.shape[2] // keys.shape[1]
    for row, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        for t in range(min(count, q.shape[1])):
            slots = seen(case, start + t)
            k, v = (x[row, :, slots].repeat_interleave(group, 0) for x in (keys, values))
            scores = torch.einsum("hd,hsd->hs", q[row, t], k) * q.shape[3] ** -0.5
            if case.softcap:
                scores = torch.tanh(scores / case.softcap) * case.softcap
            if case.sinks is not None:
                scores = torch.cat([scores, case.sinks.double().cpu()[:, None]], dim=1)
            weights = scores.softmax(-1)[:, : len(slots)]
            out[row, t] = torch.einsum("hs,hsd->hd", weights, v)
            size[row, t] = torch.einsum("hs,hsd->hd", weights, v.abs())
    return out, size


def check(case: Case) -> Tensor:
    """Within the rounding of the result, of the weights (both bfloat16) and a little for exp2 and tanh."""
    y = case.attend()
    expected, size = exact(case)
    error = (y.double().cpu() - expected).abs()
    bound = 2.0**-8 * expected.abs() + 2.0**-7 * size + 1e-6
    assert (error <= bound).all(), (error / bound).max()
    for row, count in enumerate(case.counts):
        assert y[row, max(count, 0) :].eq(0).all()
    return y
