"""How many bits do a layer's weights and activations have? The word that every package uses for it.

Which words there are is filled by the formats (formats/record.py): `FAMILIES` is empty until one is registered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_ACTIVATIONS = re.compile(r"(?P<weights>[\w-]+?)(?:a(?P<activations>\d{1,9}))?")
_NUMBERED = re.compile(r"(?P<family>\D+)(?P<bits>\d{1,9})")


class Bits(NamedTuple):
    """What one call asks of weights and activations; 0 stands for what the layer's switch says.

    weight: nested BF16 16 (exact) or 4 (the draft), planes how many of them, int4 and MXFP4 4. activation: 16
    (rounded to bfloat16), 8 or 4.
    """

    weight: int = 0
    activation: int = 0


OWN_BITS = Bits()  # every layer's own


@dataclass(frozen=True)
class Family:
    """Words that name the precisions of one kind of weights.

    pairs: of weight and activation bits, all there are. named: words that stand for weight bits; without any, a word
    is the family's name and the weight bits. Behind either may stand ``a`` and activation bits, 16 where it does not;
    tells_activations: a precision is printed with its 16, too. levels: whether a level may be called so. examples: for
    messages.
    """

    name: str
    pairs: tuple[tuple[int, int], ...]
    named: dict[str, int] = field(default_factory=dict, hash=False)
    tells_activations: bool = False
    levels: bool = True
    examples: tuple[str, ...] = ()


FAMILIES: dict[str, Family] = {}


def add_family(family: Family) -> None:
    """Make its words known; formats may share a family. ValueError when another has the name or a word."""
    if FAMILIES.get(family.name) is family:
        return
    taken = {family.name, *family.named} & {word for known in FAMILIES.values() for word in (known.name, *known.named)}
    if taken:
        raise ValueError(f"precision family {family.name!r}: the word {min(taken)!r} is taken, choose another")
    FAMILIES[family.name] = family


def remove_family(name: str) -> None:
    """Make its words unknown again; KeyError when they are not known."""
    del FAMILIES[name]


class Spelled(NamedTuple):
    """A word taken apart; activation_bits None where it says none."""

    family: Family
    weight_bits: int
    activation_bits: int | None


def spelled(word: object) -> Spelled | None:
    """The parts of a word, whether or not there are such bits; None for what is no word of a precision."""
    match = _ACTIVATIONS.fullmatch(word) if isinstance(word, str) else None
    if match is None:
        return None
    activations = None if match["activations"] is None else int(match["activations"])
    for family in FAMILIES.values():
        if match["weights"] in family.named:
            return Spelled(family, family.named[match["weights"]], activations)
    numbered = _NUMBERED.fullmatch(match["weights"])
    family = FAMILIES.get(numbered["family"]) if numbered else None
    return None if family is None or family.named else Spelled(family, int(numbered["bits"]), activations)


@dataclass(frozen=True)
class Precision:
    """Weight format and bits, and activation bits (16 means: whatever floating type the model computes in).

    Words: ``"mxfp4"`` (MXFP4 weights), ``"w4a16"``, ``"w4a8"``, ``"w4a4"`` (integer weights), ``"nested"`` (nested
    BF16, exactly), ``"nested4"`` (its 4-bit draft), ``"planes3"`` (the first three planes), ``"int3"``, ``"int2"``
    and ``"ternary"`` (casts to so few levels); ``"mxfp4a8"`` and ``"nested4a8"`` add activation bits.
    """

    family: str  # a key of FAMILIES
    weight_bits: int
    activation_bits: int = 16

    @classmethod
    def parse(cls, word: str) -> Precision:
        """``"w4a8"`` -> ``Precision("w", 4, 8)``; ValueError names the word and what is understood."""
        found = spelled(word)
        if found is None:
            examples = [example for family in FAMILIES.values() for example in family.examples]
            raise ValueError(f"unknown precision {word!r}: write {_listed(examples)}")
        activations = 16 if found.activation_bits is None else found.activation_bits
        return cls(found.family.name, found.weight_bits, activations)

    def __post_init__(self) -> None:
        family = FAMILIES.get(self.family)
        if family is None:
            raise ValueError(f"precision family {self.family!r}: choose one of {', '.join(FAMILIES)}")
        weights = sorted({weight for weight, _ in family.pairs})
        if self.weight_bits not in weights:
            raise ValueError(f"precision {self}: {self.weight_bits} weight bits, must be {_listed(weights)}")
        activations = sorted(act for weight, act in family.pairs if weight == self.weight_bits)
        if self.activation_bits not in activations:
            raise ValueError(
                f"precision {self}: {self.activation_bits} activation bits, must be {_listed(activations)}"
            )

    def __str__(self) -> str:
        family = FAMILIES[self.family]
        names = {bits: name for name, bits in family.named.items()}
        weights = names.get(self.weight_bits, f"{self.family}{self.weight_bits}")
        shown = family.tells_activations or self.activation_bits != 16
        return f"{weights}a{self.activation_bits}" if shown else weights

    @property
    def bits(self) -> Bits:
        """What a call at this precision asks for."""
        return Bits(self.weight_bits, self.activation_bits)

    def reads_no_more_than(self, other: Precision) -> bool:
        """True when neither weights nor activations have more bits than in ``other`` (a level below it may draft)."""
        return self.weight_bits <= other.weight_bits and self.activation_bits <= other.activation_bits


def _listed(choices: list) -> str:
    if choices == list(range(1, 9)):
        return "1 to 8"
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last
