"""What is a weight format? One record has all that other packages need: its words, options, tensors and bits.

A format is a file (or folder) of this package. It ends with its record, and ``register(record)``. ops, nn and engines
keep what they do with it under its ``word``. docs/guide/add_a_format.md adds one, step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..precision import Bits, Family, add_family, remove_family
from .damage import ValueCheck, require_finite
from .weight import PackedWeight, Parts


@dataclass(frozen=True)
class Option:
    """A setting of a format, in MLSpecConfig and on the command line.

    meaning: for the command line's help. choices: all values there are; where they cannot be listed, require: raises
    ValueError for one that is not possible. shapes: whether the tensors' shapes depend on it. read: a text -> the
    value. off: of a setting that is True or False, the command line's word for False.
    """

    name: str
    default: Any
    meaning: str
    choices: tuple[Any, ...] = ()
    require: Callable[[Any], Any] = lambda value: None
    shapes: bool = False
    read: Callable[[str], Any] = str
    off: str = ""

    def check(self, value: Any, format: str) -> None:
        """ValueError naming the setting, the value and what ``format`` has."""
        if self.choices and not any(type(value) is type(choice) and value == choice for choice in self.choices):
            raise ValueError(f"{self.name} is {value!r}, {format} has {' or '.join(map(repr, self.choices))}")
        try:
            self.require(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name} is {value!r}: {error}") from error


@dataclass(frozen=True)
class CastWord:
    """What a cast of another model to a format is called as a level, and with which options it is made."""

    word: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


def _same(bits: Bits, device: str) -> Bits:
    return bits


@dataclass(frozen=True)
class Format:
    """One weight format. Its functions take the options by name and ignore what does not matter to them.

    word: what code calls it. written: what config.json says (``word``, if it is not given); either is read.
    title: what messages call it. weight: its tensors on disk as one object. zeros: ``((..., out, in), device,
    **options)`` -> the parts of a weight whose values are all 0: with their names, shapes and dtypes they say what is
    on disk. group: options -> how many weights along ``in`` share a scale and divide it. bits_per_weight:
    options, and in_features where that matters -> bits a weight takes, scales included. families: words of its
    precisions, those that a switch of such layers is called at first. bit_choices: the number of stored weight bits ->
    what a call can ask for, the finest first; stored_bits: options -> that number; least_bits: options -> the fewest
    weight bits of these that are there.
    weights_called, remedy: what a message calls the weights that such a level reads, and how a model comes by them.
    value_checks: part -> what looks for numbers in it that no quantizer
    writes (damage.py has some); None: that every floating part is finite.
    """

    word: str
    title: str
    weight: type[PackedWeight]
    zeros: Callable[..., Parts]
    group: Callable[..., int]
    bits_per_weight: Callable[..., float]
    families: tuple[Family, ...]
    bit_choices: Callable[[int], tuple[Bits, ...]]
    weights_called: str
    remedy: str
    written: str = ""
    value_checks: Mapping[str, ValueCheck] | None = field(default=None, hash=False)
    require_group: Callable[[int, int], None] | None = None  # (group, in_features); None: a group that divides
    options: tuple[Option, ...] = ()
    require_together: Callable[..., Any] = lambda **options: None  # ValueError for options that do not fit each other
    stored_bits: Callable[..., int] = lambda **options: 8
    least_bits: Callable[..., int] = lambda **options: 1
    casts: tuple[CastWord, ...] = ()
    cast_activations: Callable[[str], int] = lambda device: 16  # kind of device -> what a cast multiplies by
    level_examples: tuple[str, ...] = ()  # words for levels below such a target, for messages
    level_words: tuple[str, ...] = ()  # all of levels below such a target, where they are not those of bit_choices
    as_level: Callable[[Bits, str], Bits] = _same  # what a word asks for, as a level on a kind of device
    reads_part: bool = False  # whether fewer bits of a weight are a weight, too
    multiplies: tuple[str, ...] = ("fused",)  # PrecisionSwitch.multiply
    experts: bool = False  # whether modules of experts can be held in it
    in_place: bool = False  # whether a model takes it on after it was loaded, instead of tensor by tensor
    stays_whole: bool = False  # whether its tensors only say together what they hold, and cannot be cut
    why_not_quantized: str = ""  # of one that is only read: why, and what to do instead

    def __post_init__(self) -> None:
        object.__setattr__(self, "written", self.written or self.word)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its tensors, behind ``weight_``."""
        return self.weight.PARTS._fields

    @property
    def option_names(self) -> tuple[str, ...]:
        return tuple([option.name for option in self.options])

    @property
    def activations(self) -> tuple[int, ...]:
        """Activation bits that a call can ask for, of whatever weight bits."""
        return tuple(dict.fromkeys(bits.activation for bits in self.bit_choices(8)))

    @property
    def family(self) -> str:
        """Of the precisions that a call can ask for."""
        return self.families[0].name

    def value_check(self, part: str, dtype: torch.dtype) -> ValueCheck | None:
        """What looks for damage among the numbers of ``part``, which is saved as ``dtype``; None: nothing does."""
        if self.value_checks is not None:
            return self.value_checks.get(part)
        return require_finite if dtype.is_floating_point else None

    def shaping(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those of ``options`` on which shapes depend."""
        return {option.name: options[option.name] for option in self.options if option.shapes}

    def require_fit(self, in_features: int, name: str, **options: Any) -> None:
        """ValueError naming ``name`` where groups do not divide ``in_features``, or for a group that there is not."""
        group = self.group(**options)
        if self.require_group is not None:
            try:
                self.require_group(group, in_features)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        elif in_features % group:
            raise ValueError(f"{name}: in_features is {in_features}, {self.title} needs a multiple of {group}")


FORMATS: dict[str, Format] = {}


def register(record: Format) -> Format:
    """Make a format known to everything that goes through FORMATS. ValueError when one of its words is taken."""
    taken = {*_words(record)} & {word for known in FORMATS.values() for word in _words(known)}
    if taken:
        raise ValueError(f"format {record.word!r}: the word {min(taken)!r} is taken, choose another")
    for family in record.families:
        add_family(family)
    FORMATS[record.word] = record
    return record


def unregister(word: str) -> None:
    """Make a format unknown again; KeyError when it is not known."""
    families = FORMATS.pop(word).families
    shared = {family.name for record in FORMATS.values() for family in record.families}
    for family in families:
        if family.name not in shared:
            remove_family(family.name)


def _words(record: Format) -> Iterator[str]:
    yield from (record.word, record.written, *(cast.word for cast in record.casts))


def format_named(name: object) -> Format | None:
    """The format of a config's word, the written one or the format's own; None for another."""
    return next((record for record in FORMATS.values() if name in (record.written, record.word)), None)


def casts() -> dict[str, tuple[Format, CastWord]]:
    """Every word that a cast can be called, with its format."""
    return {cast.word: (record, cast) for record in FORMATS.values() for cast in record.casts}


def options() -> dict[str, Option]:
    """Every option of any format, by name."""
    return {option.name: option for record in FORMATS.values() for option in record.options}

