"""Does a router choose, or always the same? Entropy of its choices, and what chance would make of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def entropy(values: Sequence[int]) -> float:
    """Of what is drawn from them, in bits."""
    counts = Counter(values)
    total = sum(counts.values())
    return -sum(count / total * math.log2(count / total) for count in counts.values()) + 0.0


def between_kinds(widths: Tensor, kinds: Tensor, permutations: int, seed: int) -> tuple[float, float]:
    """Spread of the kinds' mean widths, summed over blocks, and the share of shuffled labels with as much (p).

    widths: ``[queries, blocks]``. kinds: int64 ``[queries]``.
    """
    return _tested(lambda order: _spread(widths, kinds[order]), len(widths), permutations, seed)


def between_blocks(widths: Tensor, permutations: int, seed: int) -> tuple[float, float]:
    """Spread of the blocks' mean widths, and the share with as much where each query's widths are shuffled among its
    blocks (p)."""
    generator = torch.Generator().manual_seed(seed)
    found = float(widths.mean(0).var(correction=0))
    more = 0
    for _ in range(permutations):
        order = torch.rand(widths.shape, generator=generator).argsort(1)
        more += float(widths.gather(1, order).mean(0).var(correction=0)) >= found
    return found, (more + 1) / (permutations + 1)


def _spread(widths: Tensor, kinds: Tensor) -> float:
    means = torch.stack([widths[kinds == kind].mean(0) for kind in kinds.unique()])
    return float(means.var(0, correction=0).sum())


def _tested(statistic, count: int, permutations: int, seed: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(seed)
    found = statistic(torch.arange(count))
    least = found * (1 - 1e-6)  # sums in another order
    more = sum(statistic(torch.randperm(count, generator=generator)) >= least for _ in range(permutations))
    return found, (more + 1) / (permutations + 1)


def interval(differences: Tensor, resamples: int, seed: int) -> tuple[float, float, float]:
    """The mean of differences a query, and the middle 95 % of the means of resampled queries."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(differences), (resamples, len(differences)), generator=generator)
    means = differences[drawn].mean(1).sort().values
    low, high = means[int(0.025 * resamples)], means[min(int(0.975 * resamples), resamples - 1)]
    return float(differences.mean()), float(low), float(high)
