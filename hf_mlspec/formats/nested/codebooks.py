"""Which eight magnitudes can the draft of a nested weight take, and which of them does a weight get?

A codebook is 8 ascending integers of 0..63, in units of an eighth of 2^(S - 129), where S is the exponent byte of a
block of 32 (fields.py): the largest weight of a block has 32 to 63.75 units.

    name        levels                         relative RMS error, of two small language models
    lloyd_max   2, 7, 11, 16, 22, 30, 38, 51   .0985  .0989   Lloyd-Max for Gaussian weights, rounded to integers
    mxfp4       0, 4, 8, 12, 16, 24, 32, 48    .1139  .1154   E2M1's magnitudes, MXFP4's own
    fitted      of the tensor                  .0973  .0975   of least squared error on its weights

Lloyd-Max: Lloyd, Least squares quantization in PCM (1982); Max, Quantizing for minimum distortion (1960).

A weight gets the nearest level, the lower of two equally near. Example: 9 units lie between 7 and 11: index 1, level
7.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

CODEBOOKS = {
    "lloyd_max": (2, 7, 11, 16, 22, 30, 38, 51),
    "mxfp4": (0, 4, 8, 12, 16, 24, 32, 48),
}
DEFAULT, FITTED = "lloyd_max", "fitted"
LEVELS, LARGEST_LEVEL = 8, 63
FIELDS = 1 << 12  # of fields.py: 5 bits of exponent, 7 of mantissa


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
    """float64 ``[4096]``: the units that each 12-bit field of fields.py is worth."""
    field = torch.arange(FIELDS)
    exponent, mantissa = field >> 7, (field & 127).double() / 128
    return torch.ldexp(torch.where(exponent > 0, 1 + mantissa, mantissa), exponent.clamp(min=1) - 26)


def indices_of_fields(codebook: Tensor) -> Tensor:
    """uint8 ``[4096]`` on the codebook's device: the index of the nearest level for each field."""
    return _indices(tuple(codebook.tolist())).to(codebook.device)


@functools.lru_cache(maxsize=4)  # a weight is split a few rows at a time
def _indices(codebook: tuple[int, ...]) -> Tensor:
    levels = torch.tensor(codebook, dtype=torch.float64)
    index = torch.searchsorted((levels[1:] + levels[:-1]) / 2, field_values())  # of the levels' middles below a field
    return index.to(torch.uint8)


def fit(counts: Tensor) -> Tensor:
    """The codebook uint8 ``[8]`` of least squared error, of all there are, for int64 ``[256, 4096]`` numbers of
    weights by exponent byte and field.

    Neighbouring levels i < j share out the weights between them, whatever the other levels are: the cheapest way over
    eight of the 64 levels (dynamic programming; Bruce, Optimum Quantization, 1965).
    """
    way, last = _shared_costs(_sums(counts))
    reached = way[0]  # from "no level" to the first one
    froms = []
    for _ in range(LEVELS - 1):
        reached, source = (reached[:, None] + way[1:]).min(0)
        froms.append(source)
    levels = [int((reached + last).argmin())]
    for source in reversed(froms):
        levels.append(int(source[levels[-1]]))
    return torch.tensor(levels[::-1], dtype=torch.uint8)


def _sums(counts: Tensor) -> Tensor:
    """float64 ``[3, 4097]``: importance, times value, times its square, summed over the fields below each. A block's
    importance is its scale's square."""
    used = counts.cpu().double()
    largest = int((used.sum(1) > 0).nonzero().max()) if used.any() else 0
    importance = (used * torch.pow(4.0, torch.arange(256.0).double() - largest)[:, None]).sum(0)
    powers = torch.stack([importance * field_values() ** power for power in range(3)])
    return torch.nn.functional.pad(powers.cumsum(1), (1, 0))


def _shared_costs(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Squared errors float64: ``[65, 64]`` of the weights between two levels, row 0 of those below the first; and
    ``[64]`` of those above the last."""
    level = torch.arange(LARGEST_LEVEL + 1, dtype=torch.float64)
    after = torch.searchsorted(field_values(), level, right=True)
    middle = torch.searchsorted(field_values(), (level[:, None] + level) / 2, right=True)  # the lower of two

    def error(levels: Tensor, first: Tensor, end: Tensor) -> Tensor:
        weight, first_moment, second_moment = sums[:, end] - sums[:, first]
        return second_moment - 2 * levels * first_moment + levels**2 * weight

    between = error(level[:, None], after[:, None].expand(middle.shape), middle)
    between += error(level, middle, after.expand(middle.shape))
    between[level[:, None] >= level] = torch.inf
    below = error(level, torch.zeros_like(after), after)
    return torch.cat([below[None], between]), error(level, after, torch.full_like(after, FIELDS))
