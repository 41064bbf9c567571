"""What is saved of a nested BF16 weight, and is it whole? Its tensors as one object.

    X.weight_packed  uint8   [out, in / 2]     sign and index of the draft, low nibble first
    X.weight_scale   uint8   [out, in / 32]    largest exponent of each block of 32, 31 to 254
    X.weight_low     uint8   [out, in]         low 8 bits of the 12-bit fields
    X.weight_high    uint8   [out, in / 2]     their high 4 bits, low nibble first
    X.weight_codebook        uint8    [8]      the draft's magnitudes, ascending, 0..63
    X.weight_escape_index    int64    [n]      row * in + column of weights without a field, ascending
    X.weight_escape_value    bfloat16 [n]      and what they are; both absent where n is 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..damage import require_none, require_size
from ..hessian import DAMPING
from ..packing import pack_nibbles, unpack_nibbles
from ..weight import PackedWeight
from . import codebooks, fields
from .error_feedback import feedback_indices

ESCAPE_TENSORS = ("weight_escape_index", "weight_escape_value")
_DTYPES = (torch.uint8,) * 5 + (torch.int64, torch.bfloat16)
_ROWS = 1 << 20  # elements looked at at once


class NestedParts(NamedTuple):
    """As on disk, or in tiles: then low has the high planes, too, and the escapes are whole rows (nn/nested.py)."""

    packed: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor
    codebook: Tensor
    escape_index: Tensor | None = None
    escape_value: Tensor | None = None


@dataclass(frozen=True)
class NestedWeight(PackedWeight):
    """One linear layer's nested BF16 weight, as saved. The escapes are both None where there are none; ``name`` is
    only used in messages."""

    PARTS = NestedParts
    weight_packed: Tensor
    weight_scale: Tensor
    weight_low: Tensor
    weight_high: Tensor
    weight_codebook: Tensor
    weight_escape_index: Tensor | None = None
    weight_escape_value: Tensor | None = None
    name: str = "weight"

    @classmethod
    def from_dense(
        cls,
        weight: Tensor,
        codebook: str = "lloyd_max",
        name: str = "weight",
        hessian: Tensor | None = None,
        damping: float = DAMPING,
    ) -> NestedWeight:
        """Split bfloat16 ``[out, in]``; codebook "lloyd_max", "mxfp4" or "fitted" to this tensor. With a Hessian
        ``[in, in]`` of the layer's inputs the draft's codes make up for each other's errors (error_feedback.py).

        TypeError for another dtype; ValueError naming the tensor for NaN or Inf, an ``in`` that is no multiple of 32,
        an unknown codebook or a Hessian that does not serve.
        """
        codebooks.require_codebook_name(codebook)
        fields.require_nestable(weight, name)
        if codebook == codebooks.FITTED:
            levels = codebooks.fit(fields.count_fields(weight, name)).to(weight.device)
        else:
            levels = codebooks.codebook_of(codebook, weight.device)
        parts = fields.split(weight, levels, name)
        if hessian is not None:
            try:
                index = feedback_indices(weight, parts.scale, levels, hessian, damping)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            signs = unpack_nibbles(parts.packed) & 8
            parts = parts._replace(packed=pack_nibbles(signs | index))
        escapes = (parts.escape_index, parts.escape_value) if len(parts.escape_index) else (None, None)
        return cls(parts.packed, parts.scale, parts.low, parts.high, levels, *escapes, name)

    @property
    def out_features(self) -> int:
        return self.weight_low.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight_low.shape[1]

    @property
    def num_escapes(self) -> int:
        return 0 if self.weight_escape_index is None else len(self.weight_escape_index)

    def join(self) -> Tensor:
        """The bfloat16 ``[out, in]`` it was made of, bit for bit."""
        return fields.join(self.weight_packed, self.weight_scale, self.weight_low, self.weight_high,
                           self.weight_escape_index, self.weight_escape_value)  # fmt: skip

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The exact weight ``[out, in]`` in ``dtype``."""
        return self.join().to(dtype)

    def dequantize_draft(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The draft's ``[out, in]`` in ``dtype``."""
        return fields.dequantize_draft(self.weight_packed, self.weight_scale, self.weight_codebook, dtype)

    def escape_rows(self) -> tuple[Tensor, Tensor] | None:
        """Rows int64 ``[k]``, ascending, and their exact weights bfloat16 ``[k, in]``; None without escapes."""
        if self.weight_escape_index is None:
            return None
        rows, of_row = (self.weight_escape_index // self.in_features).unique(return_inverse=True)
        exact = fields.join(self.weight_packed[rows], self.weight_scale[rows], self.weight_low[rows],
                            self.weight_high[rows])  # fmt: skip
        exact[of_row, self.weight_escape_index % self.in_features] = self.weight_escape_value
        return rows, exact

    def validate(self, out_features: int | None = None, in_features: int | None = None) -> NestedWeight:
        """Itself, or one specific error: TypeError for a dtype; ValueError for planes that do not belong together, an
        exponent byte outside 31..254, a codebook that does not ascend within 0..63, a reserved field, or escapes that
        are unsorted, out of range, not finite or at a weight that has a field."""
        self.require_dtypes(_DTYPES, "nested BF16")
        if self.weight_low.ndim != 2:
            raise ValueError(f"{self.name}: weight_low has shape {list(self.weight_low.shape)}, expected [out, in]")
        out, size = out_features or self.out_features, in_features or self.in_features
        if size % fields.BLOCK:
            raise ValueError(f"{self.name}: in_features is {size}, nested BF16 needs a multiple of {fields.BLOCK}")
        shapes = ([out, size // 2], [out, size // fields.BLOCK], [out, size], [out, size // 2], [codebooks.LEVELS])
        for part, shape in zip(NestedParts._fields, shapes, strict=False):  # escapes are checked by themselves
            require_size(self.name, f"weight_{part}", getattr(self, f"weight_{part}"), shape)
        codebooks.require_codebook(self.weight_codebook, f"{self.name}: weight_codebook")
        if not self.weight_low.is_meta:
            scale = self.weight_scale
            outside = (scale < fields.SMALLEST_SCALE) | (scale > fields.LARGEST_SCALE)
            require_none(outside, self.name, "weight_scale", scale, "exponents outside 31..254")
            self._check_fields()
        self._check_escapes()
        return self

    def _check_fields(self) -> None:
        step = max(1, _ROWS // max(self.in_features, 1))
        for first in range(0, self.out_features, step):
            part = slice(first, first + step)
            field = fields.fields_of(self.weight_low[part], self.weight_high[part])
            shifted = (self.weight_scale[part] > fields.SMALLEST_SCALE).repeat_interleave(fields.BLOCK, 1)
            reserved = shifted & (field > 0) & (field < 1 << fields.MANTISSA_BITS)
            if reserved.any():
                row, column = reserved.nonzero()[0].tolist()
                raise ValueError(
                    f"{self.name}: weight_low and weight_high hold the field {int(field[row, column])} at row "
                    f"{first + row}, column {column}, 1 to 127 occur only in blocks of exponent 31: the checkpoint is "
                    "damaged"
                )

    def _check_escapes(self) -> None:
        index, value = self.weight_escape_index, self.weight_escape_value
        if index is None and value is None:
            return
        if index is None or value is None or index.ndim != 1 or index.shape != value.shape:
            shapes = [None if tensor is None else list(tensor.shape) for tensor in (index, value)]
            raise ValueError(
                f"{self.name}: weight_escape_index has shape {shapes[0]} and weight_escape_value {shapes[1]}, both "
                "must be [n], or both absent: the checkpoint is damaged"
            )
        if not index.is_meta and len(index):
            self._check_escape_numbers(index, value)

    def _check_escape_numbers(self, index: Tensor, value: Tensor) -> None:
        count = self.weight_low.numel()
        outside = (index < 0) | (index >= count)
        self._refuse_escape(outside, index, f"outside of the {count} weights")
        unsorted = torch.zeros_like(outside)
        unsorted[1:] = index[1:] <= index[:-1]
        self._refuse_escape(unsorted, index, "not above the one before it")
        exponent = (value.view(torch.int16) & 0x7FFF) >> fields.MANTISSA_BITS
        rows, columns = index // self.in_features, index % self.in_features
        base = self.weight_scale[rows, columns // fields.BLOCK].to(torch.int16) - fields.SMALLEST_SCALE
        self._refuse_escape((exponent > base) | (value == 0), value, "zero, not finite or too large for an escape")
        high = self.weight_high[rows, columns // 2] >> (columns % 2 * 4).to(torch.uint8) & 15
        self._refuse_escape((self.weight_low[rows, columns] | high) != 0, index, "that of a weight with a field")

    def _refuse_escape(self, wrong: Tensor, numbers: Tensor, why: str) -> None:
        if wrong.any():
            place = int(wrong.nonzero()[0])
            name = ESCAPE_TENSORS[numbers.dtype == torch.bfloat16]
            raise ValueError(
                f"{self.name}: {name}[{place}] is {numbers[place].item():g}, {why}: the checkpoint is damaged"
            )
