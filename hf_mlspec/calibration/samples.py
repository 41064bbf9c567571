"""Which tokens does a model see while its codes are chosen? Windows of a text, by seed, or rows as they are given."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def windows(ids: Sequence[int], samples: int, tokens: int, seed: int) -> list[list[int]]:
    """``samples`` windows of ``tokens`` ids that do not overlap, of all such windows those that ``seed`` draws, in the
    order of the text. ValueError for a text that is too short, with both numbers."""
    require_counts(samples, tokens)
    there = len(ids) // tokens
    if there < samples:
        fewer, shorter = there, len(ids) // samples
        less = f", or at most {fewer} samples" if fewer else f", or samples of at most {shorter} tokens"
        raise ValueError(
            f"the calibration text has {len(ids)} tokens, {samples} samples of {tokens} need {samples * tokens}: give "
            f"a longer text{less if fewer or shorter else ''}"
        )
    drawn = torch.randperm(there, generator=torch.Generator().manual_seed(seed))[:samples].sort().values
    return [list(ids[first : first + tokens]) for first in (drawn * tokens).tolist()]


def require_counts(samples: int, tokens: int) -> None:
    """ValueError naming the one that is no positive number."""
    for name, value in (("samples", samples), ("tokens", tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, it must be a positive number")


def require_lengths(samples: list[Tensor], most: int | None) -> None:
    """ValueError naming the first sample ``[1, tokens]`` that is longer than a model's positions."""
    for index, ids in enumerate(samples):
        if most is not None and ids.shape[-1] > most:
            raise ValueError(f"calibration[{index}] has {ids.shape[-1]} tokens, the model {most} positions: give "
                             f"samples of at most {most}")
