"""How is the high part kept as sparse rows, of which a product adds entries of tables?

Inputs are cut into groups of g columns. A row is a list of terms, each for one group and one power of two:

    term int32     bits 0..7    pattern: which of the group's columns it adds
                   bits 8..10   shift: it counts 2^shift times
                   bit  11      1: it is subtracted
                   bits 12..30  number of the group

A value of the high part is a signed sum of powers of two, one for each bit of its magnitude, so a row's terms are in
the order of groups, in a group added ones first, and of these small powers first. For g activations there are
2^g - 1 sums of some of them; they are made once, and a term is one of them. With ``starts`` int32 ``[out + 1]`` row r
has the terms starts[r] .. starts[r + 1].

Source: ZipperQuant (tables of sums for sparse high bits); tables of activations as in T-MAC (arXiv 2407.00088).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 4  # columns: 15 sums of 4 activations lie in one cache line
MAX_GROUP = 8
MAX_INPUTS = 2**19 * 2  # groups are numbered in 19 bits, of at least 2 columns
_SHIFTS = 8
_SIGN, _COLUMN = 11, 12


class SparseRows(NamedTuple):
    """The high part of a weight: ``starts`` int32 ``[out + 1]`` and ``terms`` int32 ``[n]``."""

    starts: Tensor
    terms: Tensor


def to_sparse(high: Tensor, group: int = GROUP) -> SparseRows:
    """int8 ``[out, in]`` -> its sparse rows over groups of ``group`` columns. ValueError for a group that does not
    divide ``in``, is not 2 to 8, or for too many inputs."""
    require_group(group, high.shape[1])
    groups = high.to(torch.int16).unflatten(1, (-1, group))  # [out, in / g, g]
    bits = 2 ** torch.arange(group, device=high.device, dtype=torch.int32)
    columns = torch.arange(groups.shape[1], device=high.device, dtype=torch.int32) << _COLUMN
    found = []
    for negative in (0, 1):
        magnitude = (-groups if negative else groups).clamp(min=0)
        for shift in range(_SHIFTS):
            pattern = ((magnitude >> shift & 1).to(torch.int32) * bits).sum(-1, dtype=torch.int32)
            term = pattern | shift << 8 | negative << _SIGN | columns
            found.append(torch.where(pattern > 0, term, -1))
    every = torch.stack(found, -1).flatten(1)  # [out, in / g * 16], -1 where there is none
    there = every >= 0
    counts = there.sum(1).cumsum(0)
    starts = torch.cat([counts.new_zeros(1), counts]).to(torch.int32)
    return SparseRows(starts, every[there])


def to_dense(rows: SparseRows, in_features: int, group: int = GROUP) -> Tensor:
    """The inverse: int8 ``[out, in]``. ValueError for a term beyond the inputs."""
    out, terms = len(rows.starts) - 1, rows.terms
    if terms.numel() and int((terms >> _COLUMN).max()) >= in_features // group:
        raise ValueError(f"zipper: a term names group {int((terms >> _COLUMN).max())} of {in_features // group}")
    lengths = (rows.starts[1:] - rows.starts[:-1]).long()
    at = torch.repeat_interleave(torch.arange(out, device=terms.device), lengths)
    values = coefficients(terms).to(torch.int32)
    high = torch.zeros(out, in_features // group, group, dtype=torch.int32, device=terms.device)
    for place in range(group):
        own = (terms >> place & 1).bool()
        high[:, :, place].index_put_((at[own], (terms[own] >> _COLUMN).long()), values[own], accumulate=True)
    return high.flatten(1).to(torch.int8)


def coefficients(terms: Tensor) -> Tensor:
    """float32: what each term counts, in steps of the high part."""
    powers = (1 << (terms >> 8 & 7)).float()
    return torch.where((terms >> _SIGN & 1).bool(), -powers, powers)


def places(terms: Tensor, group: int = GROUP) -> Tensor:
    """int64: where in tables ``[in / group, 2^group]`` the sum of each term stands."""
    return ((terms >> _COLUMN).long() << group) + (terms & 0xFF)


def sums_of_groups(x: Tensor, group: int = GROUP) -> Tensor:
    """float32 ``[rows, in]`` -> ``[rows, in / group * 2^group]``: of every group the sum of the columns in each
    pattern. That of a pattern is the sum of the pattern without its last column, and that column."""
    groups = x.unflatten(1, (-1, group))
    tables = [torch.zeros_like(groups[..., 0])]
    for place in range(group):
        tables += [table + groups[..., place] for table in tables]
    return torch.stack(tables, -1).flatten(1)


def require_group(group: int, in_features: int) -> None:
    """ValueError unless groups of so many columns divide ``in_features`` and can be numbered."""
    if type(group) is not int or not 2 <= group <= MAX_GROUP:
        raise ValueError(f"zipper: groups of tables hold 2 to {MAX_GROUP} columns, not {group!r}")
    if in_features % group:
        raise ValueError(f"zipper: in_features is {in_features}, no multiple of the group of {group} columns")
    if in_features > MAX_INPUTS:
        raise ValueError(f"zipper: in_features is {in_features}, terms number the groups of {MAX_INPUTS} inputs")
