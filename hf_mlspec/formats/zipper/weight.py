"""What is saved of a weight in two parts, and is it whole? Its tensors as one object.

    X.weight_planes  uint8    [K, out, in / 8]   bit K - 1 - p of code + 2^(K - 1); bit i of byte j: element 8 j + i
    X.weight_scale   float16  [out, 1]           step of a row, above 0: largest magnitude / (2^(K - 1) - 1)
    X.weight_split   int32    [4]                K, k1, number of the mode in MODES, 1: the high part is the host's

value = code * scale. The codes are whole on disk; loading takes them apart (codes.py), so that a file takes K bits a
weight whatever its outliers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..damage import require_none, require_positive, require_size
from ..planes import pack_planes, unpack_planes
from ..weight import PlaneRows, require_float_matrix
from . import codes as splitting
from .codes import MODES, Split
from .sparse import MAX_INPUTS

BLOCK = 32  # of inputs, in the kernels of the low part
HIGH_PARTS = ("device", "host")
LARGEST_SCALE = torch.finfo(torch.float16).max / 2  # mode "paper" doubles it
_SMALLEST_SCALE = 2.0**-24  # float16's smallest subnormal
_DTYPES = (torch.uint8, torch.float16, torch.int32)
HEADER = 4  # integers of weight_split


class ZipperParts(NamedTuple):
    """As on disk. In tiles (ops/zipper.py) the planes and scales are those of the low part, as bit-planes are, and
    ``split`` goes on behind its four integers with the cells of the high part."""

    planes: Tensor
    scale: Tensor
    split: Tensor


@dataclass(frozen=True)
class ZipperWeight(PlaneRows):
    """One linear layer's weight in two parts, as saved. ``name`` is only used in messages."""

    PARTS = ZipperParts
    weight_planes: Tensor
    weight_scale: Tensor
    weight_split: Tensor
    name: str = "weight"

    @classmethod
    def from_dense(
        cls, weight: Tensor, bits: int = 6, low_bits: int = 4, mode: str = "exact", high_part: str = "device",
        name: str = "weight",
    ) -> ZipperWeight:  # fmt: skip
        """Round float ``[out, in]`` to nearest, one scale a row. TypeError for another dtype; ValueError naming the
        tensor for a split, sizes, NaN, Inf, and a row that float16 has no scale for."""
        how = Split(bits, low_bits, mode)
        try:
            how.require()
            require_float_matrix("zipper quantizes", weight)
            require_inputs(BLOCK, weight.shape[1])
            codes, scale = quantize(weight, how)
            header = [bits, low_bits, MODES.index(mode), HIGH_PARTS.index(high_part)]
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        return cls(to_planes(codes, bits), scale, torch.tensor(header, dtype=torch.int32, device=weight.device), name)

    @property
    def how(self) -> Split:
        """The split. Reads the tensor: call it once, not for every product."""
        bits, low_bits, mode, _ = self.weight_split[:HEADER].tolist()
        return Split(bits, low_bits, MODES[mode])

    @property
    def high_part(self) -> str:
        """Where the high part is multiplied: "device" or "host"."""
        return HIGH_PARTS[int(self.weight_split[HEADER - 1])]

    def codes(self) -> Tensor:
        """int8 ``[out, in]``."""
        return to_codes(self.weight_planes)

    def high_zeros(self) -> float:
        """The part of the weights whose high part is 0."""
        _, high = splitting.split(self.codes(), self.how)
        return 1 - high.count_nonzero().item() / max(high.numel(), 1)

    def dequantize(self, dtype: torch.dtype = torch.float32, low_only: bool = False) -> Tensor:
        """``[out, in]`` in ``dtype``; low_only: as the low part alone has it. Exact in float32."""
        codes = self.codes()
        if low_only:
            how = self.how
            codes = splitting.split(codes, how)[0].to(torch.int16) * how.low_unit
        return (codes.float() * self.weight_scale.float()).to(dtype)

    def validate(self, out_features: int | None = None, in_features: int | None = None) -> ZipperWeight:
        """Itself, or one specific error: TypeError for a dtype; ValueError for a shape, a truncated tensor, a scale
        that is NaN, Inf, zero, negative or above 65504 / 2, a split that there is not, or codes that mode "paper" does
        not write."""
        self.require_dtypes(_DTYPES, "zipper")
        planes = list(self.weight_planes.shape)
        if len(planes) != 3 or planes[0] not in splitting.BITS:
            raise ValueError(
                f"{self.name}: weight_planes has shape {planes}, expected [4 to 8 planes, out, in / 8]"
            )
        out, size = out_features or planes[1], in_features or planes[2] * 8
        require_size(self.name, "weight_planes", self.weight_planes, [planes[0], out, size // 8])
        require_size(self.name, "weight_scale", self.weight_scale, [out, 1])
        require_size(self.name, "weight_split", self.weight_split, [HEADER])
        try:
            require_inputs(BLOCK, size)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error
        require_positive(self.name, "weight_scale", self.weight_scale)
        if not self.weight_scale.is_meta:
            too_large, what = self.weight_scale > LARGEST_SCALE, f"scales above {LARGEST_SCALE:g}"
            require_none(too_large, self.name, "weight_scale", self.weight_scale, what)
        self._check_split()
        return self

    def _check_split(self) -> None:
        if self.weight_split.is_meta:
            return
        bits, low_bits, mode, host = self.weight_split.tolist()
        written = f"{self.name}: weight_split is {[bits, low_bits, mode, host]}"
        if bits != len(self.weight_planes) or not 0 <= mode < len(MODES) or host not in (0, 1):
            raise ValueError(
                f"{written}, expected {len(self.weight_planes)} planes, their low bits, a mode of 0 to "
                f"{len(MODES) - 1} and 0 or 1: the checkpoint is damaged"
            )
        try:
            how = Split(bits, low_bits, MODES[mode]).require()
        except ValueError as error:
            raise ValueError(f"{written}: {error}: the checkpoint is damaged") from error
        if how.mode == "paper" and bool((self.weight_planes[-1] != 0).any()):
            raise ValueError(f"{self.name}: weight_planes has odd codes, mode 'paper' writes none: it is damaged")


def quantize(weight: Tensor, how: Split) -> tuple[Tensor, Tensor]:
    """float ``[out, in]`` -> codes int8 ``[out, in]`` that ``how`` holds, scales float16 ``[out, 1]``. ValueError
    naming the row for NaN, Inf or a scale beyond 65504 / 2."""
    wide = weight.float()
    largest = wide.abs().amax(1, keepdim=True)
    fits = largest / how.largest <= LARGEST_SCALE  # NaN does not
    if not fits.all():
        row = int((~fits).nonzero()[0, 0])
        raise ValueError(
            f"zipper: row {row} reaches {largest[row].item():g}, there are {how.largest} steps of at most "
            f"{LARGEST_SCALE:g}: repair the checkpoint, or keep this layer in 16 bits with skip_modules"
        )
    scale = torch.where(largest > 0, (largest / how.largest).clamp(_SMALLEST_SCALE, LARGEST_SCALE), 1.0).half()
    codes = (wide / scale.float()).round().clamp(-how.largest, how.largest).to(torch.int8)
    return splitting.representable(codes, how), scale


def to_planes(codes: Tensor, bits: int) -> Tensor:
    """int8 ``[out, in]`` of so many bits -> planes uint8 ``[bits, out, in / 8]``."""
    return pack_planes((codes.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8), bits)


def to_codes(planes: Tensor) -> Tensor:
    """The inverse of ``to_planes``."""
    return (unpack_planes(planes).to(torch.int16) - 2 ** (len(planes) - 1)).to(torch.int8)


def require_inputs(block: int, in_features: int) -> None:
    """ValueError unless blocks of 32 divide ``in_features`` and there are 2^20 at most."""
    if in_features % block:
        raise ValueError(
            f"in_features is {in_features}, zipper takes multiples of {block}: keep this layer in 16 bits with "
            "skip_modules"
        )
    if in_features > MAX_INPUTS:
        raise ValueError(f"zipper: in_features is {in_features}, a high part has {MAX_INPUTS} inputs at most")
