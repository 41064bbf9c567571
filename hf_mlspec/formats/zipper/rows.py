"""How do the codes of an embedding lie in memory, so that a row is read alone and takes few bits?

    planes   uint8  [rows, P, in / 8]  the planes of a weight on disk (weight.py), row by row, without those that are 0
                                       in all codes (the last of mode "paper") and, where places stand for it, without
                                       the second
    places   int32  [rows + 1 + n]     where the bytes of each row begin and end, and the bytes: how many places each
                                       128 inputs have, and these, each less than 128. [0]: there are none

The second bit of a code is that of its sign, unless the code is 2^(K-2) or more, or less than -2^(K-2): of six bits
those that have a high part, 5 % of a row of 4,096 normal numbers. So the places of the others take less than a plane:
5.5 bits a code, 4.5 in mode "paper". Where they take more, in a row of equal magnitudes, the plane stays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..planes import unpack_planes
from .codes import Split
from .weight import to_codes

TOGETHER = 128  # inputs whose places are counted by one byte
_CHUNK = 2**25  # bits that are unpacked at once


class CodeRows(NamedTuple):
    """``planes`` and ``places`` as above; lowest: bits below the planes, all 0."""

    planes: Tensor
    places: Tensor
    lowest: int

    @property
    def bits(self) -> int:
        """Of a code."""
        return self.planes.shape[1] + self.lowest + int(len(self.places) > 0)


def lowest_of(how: Split) -> int:
    """How many of the last bits of all codes are 0."""
    return int(how.mode == "paper")


def to_rows(planes: Tensor, how: Split) -> CodeRows:
    """uint8 ``[K, rows, in / 8]`` of a weight on disk -> its rows."""
    lowest = lowest_of(how)
    kept = planes[: len(planes) - lowest].transpose(0, 1)
    places = _places(kept[:, 0] ^ kept[:, 1] ^ 0xFF)
    if 4 * len(places) >= kept[:, 1].numel():
        return CodeRows(kept.contiguous(), planes.new_empty(0, dtype=torch.int32), lowest)
    return CodeRows(torch.cat([kept[:, :1], kept[:, 2:]], 1), places, lowest)


def of_rows(rows: CodeRows) -> Tensor:
    """The inverse of ``to_rows``: uint8 ``[K, rows, in / 8]``."""
    ids = torch.arange(len(rows.planes), device=rows.planes.device).split(_together(rows.planes.shape[2] * 8))
    return torch.cat([_all_planes(rows, some) for some in ids], 1).contiguous()


def codes_of(rows: CodeRows, ids: Tensor) -> Tensor:
    """int8 ``[n, in]``: rows int64 ``ids [n]``, all of them inside."""
    return to_codes(_all_planes(rows, ids))


def _all_planes(rows: CodeRows, ids: Tensor) -> Tensor:
    """uint8 ``[K, n, in / 8]`` of rows ``ids``, those that are not stored, too."""
    own = rows.planes[ids]
    if len(rows.places):
        second = own[:, 0] ^ _marked(rows.places, ids, own.shape[2], len(rows.planes)) ^ 0xFF
        own = torch.cat([own[:, :1], second.unsqueeze(1), own[:, 1:]], 1)
    return torch.cat([own, own.new_zeros(len(own), rows.lowest, own.shape[2])], 1).transpose(0, 1)


def _places(marked: Tensor) -> Tensor:
    """uint8 ``[rows, in / 8]``, bits that are set -> int32 ``[rows + 1 + n]``."""
    rows, width = len(marked), marked.shape[1] * 8
    groups, together, device = -(-width // TOGETHER), _together(width), marked.device
    counts = marked.new_zeros(rows, groups)
    for first in range(0, rows, together):  # found for all rows at once places take 16 bytes each: more than the table
        row, column = _set_bits(marked[first : first + together])
        own = counts[first : first + together]
        own.copy_(torch.bincount(row * groups + column // TOGETHER, minlength=own.numel()).view(own.shape))
    before = torch.nn.functional.pad(counts.sum(1, dtype=torch.int64).cumsum(0), (1, 0))
    begins = before + groups * torch.arange(rows + 1, device=device)
    if int(begins[-1]) >= 2**31:
        raise ValueError(f"zipper: an embedding of {rows} rows has places of {int(begins[-1])} bytes, at most 2^31")
    found = torch.zeros(-(-int(begins[-1]) // 4) * 4, dtype=torch.uint8, device=device)
    found[(begins[:-1, None] + torch.arange(groups, device=device)).flatten()] = counts.flatten()
    for first in range(0, rows, together):
        row, column = _set_bits(marked[first : first + together])
        row += first
        rank = torch.arange(len(row), device=device) - (before[row] - before[first])
        found[begins[row] + groups + rank] = (column % TOGETHER).to(torch.uint8)
    return torch.cat([begins.to(torch.int32), found.view(torch.int32)])


def _together(width: int) -> int:
    """Rows that are unpacked at once."""
    return max(_CHUNK // width, 1)


def _set_bits(marked: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the bits that are set, by row and then column."""
    return unpack_planes(marked.unsqueeze(0)).nonzero(as_tuple=True)


def _marked(places: Tensor, ids: Tensor, width: int, rows: int) -> Tensor:
    """uint8 ``[n, width]``: of rows ``ids`` the bits that ``places`` of so many rows name."""
    groups = -(-width * 8 // TOGETHER)
    begins, found = places[: rows + 1].long(), places[rows + 1 :].contiguous().view(torch.uint8)
    first = begins[ids]
    counts = found[first[:, None] + torch.arange(groups, device=ids.device)].long()
    group = torch.arange(len(ids) * groups, device=ids.device).repeat_interleave(counts.flatten())
    lengths = counts.sum(1)
    own = torch.arange(len(ids), device=ids.device).repeat_interleave(lengths)
    rank = torch.arange(len(own), device=ids.device) - (lengths.cumsum(0) - lengths)[own]
    column = group % groups * TOGETHER + found[first[own] + groups + rank].long()
    marked = torch.zeros(len(ids), width * 8, dtype=torch.uint8, device=ids.device)
    marked[own, column] = 1
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=ids.device)
    return (marked.view(len(ids), width, 8) * weights).sum(-1, dtype=torch.uint8)
