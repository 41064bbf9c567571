"""Which eight magnitudes can the draft of a nested weight take, and which of them does a weight get?

A codebook is 8 ascending integers of 0..63, in units of an eighth of 2^(S - 129), where S is the exponent byte of a
block of 32 (nested.py): the largest weight of a block has 32 to 63.75 units.

    name        levels                         relative RMS error on Gaussian weights
    lloyd_max   2, 7, 11, 16, 22, 30, 38, 51   .098   Lloyd-Max (Max 1960, Lloyd 1982), rounded to integers
    mxfp4       0, 4, 8, 12, 16, 24, 32, 48    .114   E2M1's magnitudes: the nearest of them is MXFP4's own code
    fitted      of the tensor                         Lloyd's algorithm on its weights, rounded, then improved by ones

A weight gets the nearest level, the lower of two equally near. Example: 9 units lie between 7 and 11: index 1, level
7.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODEBOOKS = {
    "lloyd_max": (2, 7, 11, 16, 22, 30, 38, 51),
    "mxfp4": (0, 4, 8, 12, 16, 24, 32, 48),
}
FITTED = "fitted"
LEVELS, LARGEST_LEVEL = 8, 63
FIELDS = 1 << 12  # of nested.py: 5 bits of exponent, 7 of mantissa
_ROUNDS = 200  # of Lloyd's algorithm; it settles in 20 to 60


def require_codebook_name(codebook: str) -> None:
    """ValueError naming the known codebooks when ``codebook`` is none of them."""
    if codebook not in CODEBOOKS and codebook != FITTED:
        raise ValueError(f"unknown codebook {codebook!r}: choose one of {', '.join((*CODEBOOKS, FITTED))}")


def require_codebook(codebook: Tensor, name: str = "codebook") -> None:
    """TypeError unless uint8; ValueError unless ``[8]``, ascending, and within 0..63; each names ``name``."""
    if codebook.dtype != torch.uint8:
        raise TypeError(f"{name} is {codebook.dtype}, expected torch.uint8")
    if list(codebook.shape) != [LEVELS]:
        raise ValueError(f"{name} has shape {list(codebook.shape)}, expected [{LEVELS}]")
    if codebook.is_meta:
        return
    levels = codebook.tolist()
    if levels != sorted(set(levels)) or levels[-1] > LARGEST_LEVEL:
        raise ValueError(f"{name} holds {levels}: its {LEVELS} levels must ascend and stay within 0..{LARGEST_LEVEL}")


def codebook_of(name: str, device: torch.device | str = "cpu") -> Tensor:
    """uint8 ``[8]`` of a codebook that depends on no tensor."""
    return torch.tensor(CODEBOOKS[name], dtype=torch.uint8, device=device)


def field_values() -> Tensor:
    """float64 ``[4096]``: the units that each 12-bit field of nested.py is worth."""
    field = torch.arange(FIELDS)
    exponent, mantissa = field >> 7, (field & 127).double() / 128
    return torch.ldexp(torch.where(exponent > 0, 1 + mantissa, mantissa), exponent.clamp(min=1) - 26)


def last_fields(codebook: Tensor) -> list[int]:
    """The largest field that still gets level 0, 1, ... 6: a field's index is the number of these below it. Fields
    ascend with what they are worth, so that no float is needed to choose."""
    levels = codebook.double().cpu()
    middles = (levels[1:] + levels[:-1]) / 2
    return (torch.searchsorted(field_values(), middles, right=True) - 1).tolist()


def fit(counts: Tensor) -> Tensor:
    """The codebook uint8 ``[8]`` of small squared error for int64 ``[256, 4096]`` numbers of weights by exponent byte
    and field. Deterministic; never worse than "lloyd_max" and "mxfp4"."""
    used = counts.cpu().double()
    largest = int((used.sum(1) > 0).nonzero().max()) if used.any() else 0
    importance = (used * torch.pow(4.0, torch.arange(256.0).double() - largest)[:, None]).sum(0)  # [4096]
    values = field_values()
    keep = importance > 0
    values, importance = values[keep], importance[keep]
    starts = [_distinct(_lloyd(values, importance)), *map(list, CODEBOOKS.values())]
    improved = [_improved(start, values, importance) for start in starts]
    return torch.tensor(min(improved, key=lambda levels: _error(levels, values, importance)), dtype=torch.uint8)


def _lloyd(values: Tensor, importance: Tensor) -> Tensor:
    """Levels float64 ``[8]``, each the weighted mean of what is nearest to it."""
    levels = torch.tensor(CODEBOOKS["lloyd_max"], dtype=torch.float64)
    for _ in range(_ROUNDS):
        nearest = torch.searchsorted((levels[1:] + levels[:-1]) / 2, values)
        weight = torch.bincount(nearest, importance, LEVELS)
        moved = torch.where(weight > 0, torch.bincount(nearest, importance * values, LEVELS) / weight, levels)
        if torch.equal(moved, levels):
            break
        levels = moved.sort().values
    return levels


def _distinct(levels: Tensor) -> list[int]:
    """Rounded, ascending, each level once, within 0..63."""
    chosen: list[int] = []
    for index, level in enumerate(levels.round().int().tolist()):
        lowest = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(level, lowest), LARGEST_LEVEL - (LEVELS - 1 - index)))
    return chosen


def _improved(levels: list[int], values: Tensor, importance: Tensor) -> list[int]:
    """Moves single levels by one while that lowers the squared error."""
    error, again = _error(levels, values, importance), True
    while again:
        again = False
        for index in range(LEVELS):
            for step in (-1, 1):
                other = [*levels]
                other[index] += step
                if other != sorted(set(other)) or not 0 <= other[index] <= LARGEST_LEVEL:
                    continue
                if (lower := _error(other, values, importance)) < error:
                    levels, error, again = other, lower, True
    return levels


def _error(levels: list[int], values: Tensor, importance: Tensor) -> float:
    exact = torch.tensor(levels, dtype=torch.float64)
    nearest = exact[torch.searchsorted((exact[1:] + exact[:-1]) / 2, values)]
    return float((importance * (values - nearest).square()).sum())
