"""How many bits do a layer's weights and activations have? The word every floor uses for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

_WORD = re.compile(
    r"(?:(?P<named>mxfp4|nested4|nested|int3|int2|ternary)|(?P<family>w|planes)(?P<weight>\d+))(?:a(?P<act>\d+))?"
)
# Words that are no family and a number of bits: what they mean, and what they are called.
_NAMED = {
    "mxfp4": ("mxfp4", 4),
    "nested": ("nested", 16),
    "nested4": ("nested", 4),
    "int3": ("int", 3),
    "int2": ("int", 2),
    "ternary": ("ternary", 2),
}
_NAMES = {meaning: name for name, meaning in _NAMED.items()}
# family -> the pairs of weight and activation bits there are.
_PAIRS = {
    "mxfp4": [(4, act) for act in (4, 8, 16)],
    "w": [(bits, act) for bits in range(1, 9) for act in (4, 8, 16)],
    "planes": [(bits, 16) for bits in range(1, 9)],
    "nested": [(16, 16), (4, 16), (4, 8)],
    "int": [(3, 16), (2, 16)],
    "ternary": [(2, 16)],
}


class Bits(NamedTuple):
    """What one call asks of weights and activations; 0 stands for what the layer's switch says.

    weight: nested BF16 16 (exact) or 4 (the draft), bit-planes how many of them, int4 and MXFP4 4. activation: 16
    (rounded to bfloat16), 8 or 4.
    """

    weight: int = 0
    activation: int = 0


OWN_BITS = Bits()  # every layer's own


@dataclass(frozen=True)
class Precision:
    """Weight format and bits, and activation bits (16 means: whatever floating type the model computes in).

    Words: ``"mxfp4"`` (MXFP4 weights), ``"w4a16"``, ``"w4a8"``, ``"w4a4"`` (integer weights), ``"nested"`` (nested
    BF16, exactly), ``"nested4"`` (its 4-bit draft), ``"planes3"`` (the first three bit-planes), ``"int3"``, ``"int2"``
    and ``"ternary"`` (casts to so few levels); ``"mxfp4a8"`` and ``"nested4a8"`` add activation bits.
    """

    family: str  # "mxfp4", "w", "nested", "planes", "int" or "ternary"
    weight_bits: int
    activation_bits: int = 16

    @classmethod
    def parse(cls, word: str) -> Precision:
        """``"w4a8"`` -> ``Precision("w", 4, 8)``; ValueError names the word and what is understood."""
        match = _WORD.fullmatch(word) if isinstance(word, str) else None
        if match is None:
            raise ValueError(
                f"unknown precision {word!r}: write mxfp4, w4a16, w4a8, w4a4, nested, nested4, nested4a8, int3, int2, "
                "ternary or planes1 ... planes8"
            )
        family, bits = _NAMED[match["named"]] if match["named"] else (match["family"], int(match["weight"]))
        return cls(family, bits, int(match["act"] or 16))

    def __post_init__(self) -> None:
        pairs = _PAIRS.get(self.family)
        if pairs is None:
            raise ValueError(f"precision family {self.family!r}: choose one of {', '.join(_PAIRS)}")
        weights = sorted({weight for weight, _ in pairs})
        if self.weight_bits not in weights:
            raise ValueError(f"precision {self}: {self.weight_bits} weight bits, must be {_listed(weights)}")
        activations = sorted(act for weight, act in pairs if weight == self.weight_bits)
        if self.activation_bits not in activations:
            raise ValueError(
                f"precision {self}: {self.activation_bits} activation bits, must be {_listed(activations)}"
            )

    def __str__(self) -> str:
        weights = _NAMES.get((self.family, self.weight_bits), f"{self.family}{self.weight_bits}")
        shown = self.family == "w" or self.activation_bits != 16
        return f"{weights}a{self.activation_bits}" if shown else weights

    @property
    def bits(self) -> Bits:
        """What a call at this precision asks for."""
        return Bits(self.weight_bits, self.activation_bits)

    def reads_no_more_than(self, other: Precision) -> bool:
        """True when neither weights nor activations have more bits than in ``other`` (a level below it may draft)."""
        return self.weight_bits <= other.weight_bits and self.activation_bits <= other.activation_bits


def _listed(numbers: list[int]) -> str:
    if numbers == list(range(1, 9)):
        return "1 to 8"
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
