"""How many bits do a layer's weights and activations have? The word every floor uses for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"(?:(?P<mx>mxfp4)|w(?P<weight>\d+)|planes(?P<planes>\d+))(?:a(?P<act>\d+))?")
_ACTIVATION_BITS = (4, 8, 16)


@dataclass(frozen=True)
class Precision:
    """Weight format and bits, and activation bits (16 means: whatever floating type the model computes in).

    Words: ``"mxfp4"`` (MXFP4 weights), ``"w4a16"``, ``"w4a8"``, ``"w4a4"`` (integer weights), ``"planes3"`` (the first
    three bit-planes); ``"mxfp4a8"`` and ``"planes3a8"`` add activation bits.
    """

    family: str  # "mxfp4", "w" or "planes"
    weight_bits: int
    activation_bits: int = 16

    @classmethod
    def parse(cls, word: str) -> Precision:
        """``"w4a8"`` -> ``Precision("w", 4, 8)``; ValueError names the word and what is understood."""
        match = _WORD.fullmatch(word) if isinstance(word, str) else None
        if match is None:
            raise ValueError(f"unknown precision {word!r}: write mxfp4, w4a16, w4a8, w4a4 or planes1 ... planes8")
        family = "mxfp4" if match["mx"] else "planes" if match["planes"] else "w"
        bits = 4 if match["mx"] else int(match["planes"] or match["weight"])
        return cls(family, bits, int(match["act"] or 16))

    def __post_init__(self) -> None:
        if not 1 <= self.weight_bits <= 8:
            raise ValueError(f"precision {self}: {self.weight_bits} weight bits, must be 1 to 8")
        if self.activation_bits not in _ACTIVATION_BITS:
            raise ValueError(f"precision {self}: {self.activation_bits} activation bits, must be 4, 8 or 16")

    def __str__(self) -> str:
        weights = "mxfp4" if self.family == "mxfp4" else f"{self.family}{self.weight_bits}"
        shown = self.family == "w" or self.activation_bits != 16
        return f"{weights}a{self.activation_bits}" if shown else weights

    def reads_no_more_than(self, other: Precision) -> bool:
        """True when neither weights nor activations have more bits than in ``other`` (a level below it may draft)."""
        return self.weight_bits <= other.weight_bits and self.activation_bits <= other.activation_bits
