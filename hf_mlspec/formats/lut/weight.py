"""What do bits mean that are looked up in a table per row? Planes of a number's bits, and the values it stands for.

    X.weight_planes  uint8    [B, out, in / 8]         bit B - 1 - p of all numbers; bit i of byte j is element 8 j + i
    X.weight_tables  float16  [out, 2^(B+1) - 2^S]     of each output the values of S bits, of S + 1 ... of B bits

A weight of b bits, S <= b <= B, reads the first b planes, whose bits are a number c, plane 0 the highest, and is the
very value ``weight_tables[output, 2^b - 2^S + c]``: S is the width of the smallest table (Any-Precision LLM, arXiv
2402.10517, calls it the seed, and B the parent). Fewer planes need a table of their own: it is fitted to what they can
tell apart. With S = B there is one table a row, as in SqueezeLLM (arXiv 2306.07629).

The values are float16. Products take them as bfloat16, which each is rounded to once, to nearest even, as the inputs
are: on every device, in models of every dtype. So a model in bfloat16 computes with the very weights that its
dequantized twin has, and ``dequantize`` gives in each dtype what the table holds, rounded once.

Example: B = 2, S = 1, a row with tables (-1, 2) and (-3, -1, 1, 4). Element 0 has bits 1, 0: it is 2 by one plane and
1 by two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..damage import require_finite, require_size
from ..planes.codes import MAX_PLANES, unpack_planes
from ..weight import PlaneRows

INPUTS = 32  # in_features is a multiple of this
WHY_NOT_QUANTIZED = (
    "tables are fitted to calibration data by whoever wrote the checkpoint, and are only read here: load a folder "
    "that has them with hf_mlspec.load, or quantize to 'bitplanes' or 'int4'"
)
_DTYPES = (torch.uint8, torch.float16)
_CHUNK = 1 << 20  # elements whose numbers are in flight


class LutParts(NamedTuple):
    """As on disk; in tiles both are those of their device."""

    planes: Tensor
    tables: Tensor


def table_columns(num_planes: int, least_planes: int) -> int:
    """Values in all tables of one row."""
    return 2 ** (num_planes + 1) - 2**least_planes


def table_start(num_planes: int, columns: int, read: int) -> int:
    """Where the table of ``read`` of ``num_planes`` planes begins in a row of so many values."""
    return columns - 2 ** (num_planes + 1) + 2**read


def least_planes_of(num_planes: int, columns: int) -> int:
    """S, of the shape of a weight; 0 where no S has so many columns."""
    least = (2 ** (num_planes + 1) - columns).bit_length() - 1
    return least if 1 <= least <= num_planes and table_columns(num_planes, least) == columns else 0


def require_widths(num_planes: int, least_planes: int) -> None:
    """ValueError unless 1 <= least_planes <= num_planes <= 8."""
    if any(type(count) is not int for count in (num_planes, least_planes)) or not (
        1 <= least_planes <= num_planes <= MAX_PLANES
    ):
        raise ValueError(
            f"lookup-table planes: tables of {least_planes!r} to {num_planes!r} bits, expected 1 <= least_planes <= "
            f"num_planes <= {MAX_PLANES}"
        )


@dataclass(frozen=True)
class LutWeight(PlaneRows):
    """One linear layer's weight in planes with tables, as saved. ``name`` is only used in messages."""

    PARTS = LutParts
    ROWS = "tables"
    weight_planes: Tensor
    weight_tables: Tensor
    name: str = "weight"

    @classmethod
    def from_dense(cls, weight: Tensor, name: str = "weight", **options: int) -> LutWeight:
        """ValueError: no table is fitted here."""
        raise ValueError(f"{name}: lookup-table planes are not made here: {WHY_NOT_QUANTIZED}")

    @property
    def num_planes(self) -> int:
        """Of the widest table."""
        return self.weight_planes.shape[0]

    @property
    def least_planes(self) -> int:
        """Of the narrowest table."""
        return least_planes_of(self.num_planes, self.weight_tables.shape[1])

    def table(self, num_planes: int | None = None) -> Tensor:
        """float16 ``[out, 2^num_planes]`` (None: of all planes), a view. ValueError naming the widths there are."""
        read = self.num_planes if num_planes is None else num_planes
        if not self.least_planes <= read <= self.num_planes:
            have = ", ".join(map(str, range(self.least_planes, self.num_planes + 1)))
            raise ValueError(
                f"{self.name}: {read} planes asked for, and there is no table of that width: take one of {have}"
            )
        start = table_start(self.num_planes, self.weight_tables.shape[1], read)
        return self.weight_tables[:, start : start + 2**read]

    def dequantize(self, dtype: torch.dtype = torch.float32, num_planes: int | None = None) -> Tensor:
        """``[out, in]`` in ``dtype``, as the first ``num_planes`` planes have it (None: all); ValueError for a width
        without a table."""
        table = self.table(num_planes)
        used = table.shape[1].bit_length() - 1
        out = self.weight_planes.new_empty((self.out_features, self.in_features), dtype=dtype)
        for part in _row_chunks(out):
            numbers = unpack_planes(self.weight_planes[:used, part])
            out[part] = table[part].to(dtype).gather(1, numbers.long())
        return out

    def validate(self, out_features: int | None = None, in_features: int | None = None) -> LutWeight:
        """Itself, or one specific error: TypeError for a dtype; ValueError for a shape, a truncated tensor, or a table
        with NaN or Inf."""
        self.require_dtypes(_DTYPES, "lookup-table planes")
        planes, tables = list(self.weight_planes.shape), list(self.weight_tables.shape)
        fits = len(planes) == 3 and len(tables) == 2 and 1 <= planes[0] <= MAX_PLANES
        if not fits or not least_planes_of(planes[0], tables[1]):
            raise ValueError(
                f"{self.name}: weight_planes has shape {planes} and weight_tables {tables}, expected [B, out, in / 8] "
                f"with B from 1 to {MAX_PLANES} and [out, 2^(B+1) - 2^S] with S from 1 to B: a table of every width "
                "from S to B"
            )
        out, size = out_features or planes[1], in_features or planes[2] * 8
        if size % INPUTS:
            raise ValueError(f"{self.name}: in_features is {size}, lookup-table planes need a multiple of {INPUTS}")
        require_size(self.name, "weight_planes", self.weight_planes, [planes[0], out, size // 8])
        require_size(self.name, "weight_tables", self.weight_tables, [out, tables[1]])
        if not self.weight_tables.is_meta:
            require_finite(self.name, "weight_tables", self.weight_tables)
        return self


def _row_chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK // max(rows.shape[1], 1))
    return (slice(first, min(first + step, len(rows))) for first in range(0, len(rows), step))
