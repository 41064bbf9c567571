"""What do the weights of all formats have in common? The tensors of one linear layer on disk, as one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from .damage import require_dtype, require_size

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what can be quantized
# A NamedTuple of each format's own: tensors on disk, or in the tiles that stand for them; None: done without.
Parts = tuple[torch.Tensor | None, ...]


def require_float_matrix(what: str, weight: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of float32, bfloat16 or float16 ``[out, in]``; TypeError for another dtype, ValueError for
    another number of axes. ``what``: the words that the message begins with, "int4 quantizes"."""
    if weight.dtype not in INPUT_DTYPES:
        raise TypeError(f"{what} float32, bfloat16 or float16, not {weight.dtype}: convert the tensor first")
    if weight.ndim != 2:
        raise ValueError(f"{what} a matrix [out, in], not a tensor of shape {list(weight.shape)}")
    return weight.shape[0], weight.shape[1]


class PackedWeight(ABC):
    """One linear layer's weight, as saved: a frozen dataclass of a tensor ``weight_<part>`` for each of ``PARTS``, in
    their order, and a ``name`` that is only used in messages."""

    PARTS: ClassVar[type]  # a NamedTuple, codes first
    ROWS: ClassVar[str] = "scale"  # of formats with tiles the part with a row per output, whose axes tell the layout
    name: str

    @classmethod
    @abstractmethod
    def from_dense(cls, weight: torch.Tensor, *, name: str = "weight", **options: Any) -> PackedWeight:
        """Quantize ``[out, in]``; TypeError for a dtype, ValueError naming ``name`` for what cannot be quantized."""

    @property
    @abstractmethod
    def out_features(self) -> int:
        """Rows."""

    @property
    @abstractmethod
    def in_features(self) -> int:
        """Columns."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[out, in]`` in ``dtype``."""

    @abstractmethod
    def validate(self, out_features: int | None = None, in_features: int | None = None) -> PackedWeight:
        """Itself, or one specific error: TypeError for a dtype, ValueError for a shape or for numbers that no
        quantizer writes."""

    @property
    def parts(self) -> Parts:
        """The tensors, as a ``PARTS``."""
        return self.PARTS(*(getattr(self, f"weight_{part}") for part in self.PARTS._fields))

    def require_dtypes(self, dtypes: tuple[torch.dtype, ...], format: str) -> None:
        """TypeError unless the parts, in their order, are of ``dtypes``; None has any."""
        for part, tensor, dtype in zip(self.PARTS._fields, self.parts, dtypes, strict=True):
            if tensor is not None:
                require_dtype(self.name, f"weight_{part}", tensor, dtype, format)

    def require_like(self, expected: Parts, format: str) -> None:
        """TypeError or ValueError unless every part has dtype and shape of its counterpart in ``expected``."""
        self.require_dtypes(tuple(part.dtype for part in expected), format)
        for part, tensor, other in zip(self.PARTS._fields, self.parts, expected, strict=True):
            require_size(self.name, f"weight_{part}", tensor, other.shape)


class NibbleWeight(PackedWeight):
    """One whose first part is uint8 ``[out, in / 2]``, two codes a byte."""

    weight_packed: torch.Tensor

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.weight_packed.shape[0]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.weight_packed.shape[1] * 2


class PlaneRows(PackedWeight):
    """One whose first part is uint8 ``[planes, out, in / 8]``, a bit of eight codes a byte."""

    weight_planes: torch.Tensor

    @property
    def out_features(self) -> int:
        """Rows."""
        return self.weight_planes.shape[1]

    @property
    def in_features(self) -> int:
        """Columns."""
        return self.weight_planes.shape[2] * 8
