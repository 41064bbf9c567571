"""How is an integer weight split into a dense low part and a sparse high part, and joined again?

Codes q have K bits, two's complement; the low part gets k1 of them and the high part k2 = K - k1. With s = 2^k1:

    "exact"   u = q mod s, h = floor(q / s); where q < 0: low = u - s, high = h + 1, else low = u, high = h
              low -s .. s - 1 (k1 + 1 bits), high 0 where -s <= q < s             q = low + s * high
    "paper"   low of "exact", halved: round to nearest, ties to even, then at most s / 2 - 1
              low -s/2 .. s/2 - 1 (k1 bits)                         q' = 2 * low + s * high, |q - q'| <= 1
    "clamp"   low = q, at least -s and at most s - 1; high = q - low
              low -s .. s - 1 (k1 + 1 bits), high 0 where -s <= q < s             q = low + high

Example, K = 6 and k1 = 4: 20 is 4 + 16 * 1 ("exact"), 2 * 2 + 16 * 1 ("paper"), 15 + 5 ("clamp"); -3 is -3, with
high 0, in "exact" and "clamp", and -2 * 2 = -4 in "paper". What "paper" loses is lost when a weight is quantized:
q' is its code, and splitting q' loses nothing.

"exact" and "paper" wrap: the low part of 20 is 4, so the low part alone is far from large weights. That of "clamp"
is the nearest there is.

Source: ZipperQuant (bit-based split with restored signs; the halving to 4 bits, sections 4.2 and 4.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MODES = ("exact", "paper", "clamp")
BITS = (4, 5, 6, 7, 8)
LOW_BITS = (2, 3, 4, 5, 6)


class Split(NamedTuple):
    """K, k1 and the mode of a weight; ValueError for those that there are not comes from `require`."""

    bits: int = 6
    low_bits: int = 4
    mode: str = "exact"

    @property
    def high_bits(self) -> int:
        """k2."""
        return self.bits - self.low_bits

    @property
    def largest(self) -> int:
        """The largest magnitude of a code that is rounded to: 31 of 6 bits."""
        return 2 ** (self.bits - 1) - 1

    @property
    def low_planes(self) -> int:
        """Bits that a low part takes, its sign included."""
        return self.low_bits + (self.mode != "paper")

    @property
    def low_is_int4(self) -> bool:
        """Whether the low part has 4 bits, sign included, so that kernels of int4 weights take it."""
        return self.low_planes == 4

    @property
    def low_unit(self) -> int:
        """Steps of the weight in one of the low part."""
        return 2 if self.mode == "paper" else 1

    @property
    def high_unit(self) -> int:
        """Steps of the weight in one of the high part."""
        return 1 if self.mode == "clamp" else 2**self.low_bits

    def require(self) -> Split:
        """Itself, or ValueError naming the number that does not fit."""
        if type(self.bits) is not int or self.bits not in BITS:
            raise ValueError(f"zipper: bits is {self.bits!r}, choose 4 to 8")
        if type(self.low_bits) is not int or not 2 <= self.low_bits <= self.bits - 2:
            raise ValueError(
                f"zipper: low_bits is {self.low_bits!r} of {self.bits} bits, the high part needs 2 of them: choose 2 "
                f"to {self.bits - 2}"
            )
        if self.mode not in MODES:
            raise ValueError(f"zipper: mode is {self.mode!r}, choose {', '.join(MODES[:-1])} or {MODES[-1]}")
        return self


def split(codes: Tensor, how: Split) -> tuple[Tensor, Tensor]:
    """int8 codes of any shape -> low and high, int8, of the same. ValueError for a code beyond ``how.bits`` bits."""
    wide = codes.to(torch.int16)
    _require_codes(wide, how)
    step = 2**how.low_bits
    if how.mode == "clamp":
        low = wide.clamp(-step, step - 1)
        return low.to(torch.int8), (wide - low).to(torch.int8)
    negative = (wide < 0).to(torch.int16)
    low, high = (wide & (step - 1)) - step * negative, (wide >> how.low_bits) + negative
    if how.mode == "paper":
        low = (low.float() / 2).round().clamp(max=step // 2 - 1).to(torch.int16)
    return low.to(torch.int8), high.to(torch.int8)


def join(low: Tensor, high: Tensor, how: Split) -> Tensor:
    """int8 low and high -> the codes they stand for, int8. The inverse of ``split`` but in mode "paper", whose codes
    are those that ``split`` takes apart without loss."""
    return (low.to(torch.int16) * how.low_unit + high.to(torch.int16) * how.high_unit).to(torch.int8)


def representable(codes: Tensor, how: Split) -> Tensor:
    """The codes that a weight in this split holds: themselves, or in mode "paper" the rounded ones."""
    return codes if how.mode != "paper" else join(*split(codes, how), how)


def rounded_codes(values: Tensor, how: Split) -> Tensor:
    """Floats, in steps of the weight -> the nearest of the codes that are written, of the same dtype; in mode "paper"
    these are even. Ties to even."""
    if how.mode == "paper":
        return (values / 2).round().mul_(2).clamp_(-how.largest - 1, how.largest - 1)
    return values.round().clamp_(-how.largest, how.largest)


def _require_codes(codes: Tensor, how: Split) -> None:
    least, most = -(2 ** (how.bits - 1)), 2 ** (how.bits - 1) - 1
    wrong = (codes < least) | (codes > most)
    if wrong.any():
        raise ValueError(f"zipper: code {int(codes[wrong][0])} does not fit {how.bits} bits, {least} to {most}")
