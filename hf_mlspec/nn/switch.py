"""What does a model read of its packed weights, and multiply it by? One object that all its packed layers share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from ..formats import FORMATS, Format
from ..formats.activations import require_clip
from ..precision import Bits, Precision

MULTIPLY = ("fused", "dequant")
_PLANES = 8
_MEANING = {16: "16 (bfloat16)", 8: "8 (int8)", 4: "4 (int4)"}


Through = Callable[[nn.Module, Tensor], Tensor]


class _Override(threading.local):
    bits: Bits | None = None
    through: Through | None = None


class PrecisionSwitch:
    """The bits of every packed layer of a model: one assignment, or ``with switch.at("w4a8"):``, changes all.

    4-bit weights are read as they are and multiplied with activations of more or fewer bits (QSpec, arXiv 2410.11305).
    Of nested weights a call can read the draft only, of bit-planes the first few. An override holds for the calling
    thread and can be nested; a deep copy or a pickle of the model has a switch of its own with the same default.
    """

    def __init__(
        self, weights: str, activation_bits: int = 16, multiply: str = "fused", *, num_planes: int = _PLANES,
        least_planes: int = 1, activation_clip: float = 1.0,
    ) -> None:  # fmt: skip
        """weights: the format of the layers, a word of FORMATS; num_planes: of planes, with tables or without, how
        many there are; least_planes: the fewest that can be read; activation_clip: of 4-bit activations, .1 to 1
        (formats/activations.py). ValueError for another, or for other bits."""
        if weights not in FORMATS:
            raise ValueError(f"PrecisionSwitch: weights is {weights!r}, choose one of {', '.join(FORMATS)}")
        if type(num_planes) is not int or not 1 <= num_planes <= _PLANES:
            raise ValueError(f"PrecisionSwitch: num_planes is {num_planes!r}, choose 1 to {_PLANES}")
        if type(least_planes) is not int or not 1 <= least_planes <= num_planes:
            raise ValueError(f"PrecisionSwitch: least_planes is {least_planes!r}, choose 1 to {num_planes}")
        self.weights, self.num_planes, self.least_planes = weights, num_planes, least_planes
        self._clip = require_activation_clip(activation_clip, weights)
        self._override = _Override()
        self._default = self.bit_choices[0]
        self.activation_bits = activation_bits
        self.multiply = multiply

    @property
    def record(self) -> Format:
        """The record of the format."""
        return FORMATS[self.weights]

    @property
    def bit_choices(self) -> tuple[Bits, ...]:
        """What these weights can be called with, the finest first."""
        choices = self.record.bit_choices(self.num_planes)
        return tuple([bits for bits in choices if bits.weight >= self.least_planes])

    @property
    def choices(self) -> tuple[int, ...]:
        """The activation bits that these weights can be called with."""
        return tuple(dict.fromkeys(bits.activation for bits in self.bit_choices))

    @property
    def bits(self) -> Bits:
        """This thread's override inside ``with switch.at(...)``, else the default. Assigning sets the default."""
        bits = self._override.bits
        return self._default if bits is None else bits

    @bits.setter
    def bits(self, bits: Bits) -> None:
        self._default = self.require(bits)

    @property
    def activation_bits(self) -> int:
        """Those of ``bits``. Assigning changes the default's."""
        return self.bits.activation

    @activation_bits.setter
    def activation_bits(self, bits: int) -> None:
        self._default = self.bits_of(bits)

    @property
    def default_bits(self) -> Bits:
        """The bits outside of every ``with switch.at(...)``, in every thread."""
        return self._default

    @property
    def default_activation_bits(self) -> int:
        """Those of ``default_bits``."""
        return self._default.activation

    @property
    def activation_clip(self) -> float:
        """What the largest 4-bit code of activations means, as a share of its group's largest: the model's own."""
        return self._clip

    @property
    def multiply(self) -> str:
        """How a 16-bit call multiplies int4 weights: "fused", by the kernel that reads the codes; or "dequant", the
        whole matrix in bfloat16 first, then a dense product, as systems without such a kernel do (for comparison)."""
        return self._multiply

    @multiply.setter
    def multiply(self, how: str) -> None:
        if how not in MULTIPLY:
            raise ValueError(f"PrecisionSwitch: multiply is {how!r}, choose one of {', '.join(MULTIPLY)}")
        if how not in self.record.multiplies:
            fitting = ", ".join(word for word, record in FORMATS.items() if how in record.multiplies)
            raise ValueError(f"PrecisionSwitch: multiply {how!r} is for {fitting} weights, these are {self.weights}")
        self._multiply = how

    @property
    def in_force(self) -> tuple[Bits, str, float]:
        """The bits, the multiplication and the clip of activations that a call in this thread uses."""
        return self._override.bits or self._default, self._multiply, self._clip

    @property
    def precision(self) -> Precision:
        """The precision of a call in this thread: w4a8, mxfp4a8, nested4 ..."""
        return Precision(self.record.family, *self.bits)

    def at(self, precision: str | Precision | Bits | int) -> AbstractContextManager[PrecisionSwitch]:
        """A ``with`` block in which this thread computes at ``precision``: a word, a Precision, Bits or activation
        bits.

        Raises ValueError for a word of other weights than this switch's, or for bits without a kernel.
        """
        return self._overridden(self.bits_of(precision))

    @property
    def through(self) -> Through | None:
        """What computes the products of bit-planes in this thread, inside ``with switch.sent_through(...)``."""
        return self._override.through

    @contextmanager
    def sent_through(self, through: Through) -> Iterator[PrecisionSwitch]:
        """A ``with`` block in which ``through(layer, x)`` gives the output of every bit-planes layer in this thread: a
        width per row (routing/passes.py), a mixture of widths. ValueError for weights that are not bit-planes."""
        if self.weights != "planes":
            raise ValueError(f"widths per row are for bit-planes, these weights are {self.weights}")
        before, self._override.through = self._override.through, through
        try:
            yield self
        finally:
            self._override.through = before

    def bits_of(self, precision: str | Precision | Bits | int) -> Bits:
        """The bits that ``precision`` stands for; ValueError as ``at``."""
        if isinstance(precision, str):
            precision = Precision.parse(precision)
        if isinstance(precision, Bits):
            return self.require(precision)
        if not isinstance(precision, Precision):
            return self._with_activations(precision)
        fitting = {bits.weight for bits in self.bit_choices}
        if precision.family != self.record.family or precision.weight_bits not in fitting:
            raise ValueError(
                f"precision {precision}: this model's weights are {self.weights}, choose one of {self.words}"
            )
        if not self.record.reads_part:
            return self._with_activations(precision.activation_bits)
        return self.require(precision.bits)

    @property
    def words(self) -> str:
        """All precisions of these weights, for messages."""
        return ", ".join(str(Precision(self.record.family, *bits)) for bits in self.bit_choices)

    def require(self, bits: Bits) -> Bits:
        """``bits``, the default in place of zeros, or ValueError where these weights cannot be called with them."""
        full = filled(bits, self._default)
        if full not in self.bit_choices:
            raise ValueError(
                f"bits are {full.weight} of weights and {full.activation} of activations: {self.weights} weights are "
                f"called at one of {', '.join(f'({w}, {a})' for w, a in self.bit_choices)}: {self.words}"
            )
        return full

    def _with_activations(self, activation_bits: int) -> Bits:
        if not self.record.reads_part:
            return Bits(self.bit_choices[0].weight, require_activation_bits(activation_bits, self.weights))
        if type(activation_bits) is not int:
            raise ValueError(f"activation_bits is {activation_bits!r}: {self.weights} weights take {self.words}")
        return self.require(Bits(activation=activation_bits))

    @contextmanager
    def _overridden(self, bits: Bits) -> Iterator[PrecisionSwitch]:
        before, self._override.bits = self._override.bits, bits
        try:
            yield self
        finally:
            self._override.bits = before

    def __reduce__(self) -> tuple:
        """For copy and pickle: an override belongs to a thread and stays behind."""
        planes = self.num_planes, self.least_planes
        return _switch_at, (self.weights, planes, self._multiply, self._default, self._clip)

    def __repr__(self) -> str:
        if not self.record.reads_part:
            how = f"activation_bits={self.activation_bits}, multiply={self.multiply!r}"
            how += "" if self._clip == 1 else f", activation_clip={self._clip:g}"
            return f"PrecisionSwitch({self.weights!r}, {how})"
        return f"PrecisionSwitch({self.weights!r}) at {self.precision}"


def switch_for(
    record: Format, options: Mapping[str, Any], activation_bits: int = 16, activation_clip: float = 1.0
) -> PrecisionSwitch:
    """A new switch for layers of a format with these options."""
    planes = {"num_planes": record.stored_bits(**options), "least_planes": record.least_bits(**options)}
    return PrecisionSwitch(record.word, activation_bits, **planes, activation_clip=activation_clip)


def filled(bits: Bits, own: Bits) -> Bits:
    """``bits`` with those of ``own`` in place of zeros."""
    return Bits(bits.weight or own.weight, bits.activation or own.activation)


def require_activation_bits(activation_bits: int, weights: str) -> int:
    """``activation_bits``, or ValueError where a format whose weights are always read whole has no such width."""
    choices = FORMATS[weights].activations
    if not isinstance(activation_bits, int) or activation_bits not in choices:
        ways = " or ".join(_MEANING[bits] for bits in choices)
        raise ValueError(f"activation_bits is {activation_bits!r}: choose {ways} for {weights} weights")
    return activation_bits


def require_activation_clip(clip: float, weights: str) -> float:
    """``clip``, or ValueError for one that is none, or below 1 for a format whose activations never have 4 bits."""
    clip = require_clip(clip, "activation_clip")
    if clip != 1 and 4 not in FORMATS[weights].activations:
        having = " and ".join(record.written for record in FORMATS.values() if 4 in record.activations)
        raise ValueError(
            f"activation_clip is {clip:g}, of 4-bit activations, which {FORMATS[weights].written} weights do not "
            f"meet: leave it out, or use {having}"
        )
    return clip


def precision_switch(model: nn.Module) -> PrecisionSwitch:
    """The PrecisionSwitch that all packed layers of ``model`` share. Raises ValueError if it has none, or several."""
    found = {id(s): s for m in model.modules() if isinstance(s := vars(m).get("switch"), PrecisionSwitch)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no packed layer: load it with quantization_config=MLSpecConfig(...), cast "
            "it with direct_cast, or nest it with nest"
        )
    if len(found) > 1:
        raise ValueError(
            f"{type(model).__name__} holds packed layers with {len(found)} switches ({list(found.values())}); assign "
            "one of them to the `switch` of all its packed layers"
        )
    return next(iter(found.values()))


def _switch_at(
    weights: str, planes: tuple[int, int], multiply: str, default: Bits, clip: float
) -> PrecisionSwitch:
    own = {"num_planes": planes[0], "least_planes": planes[1], "activation_clip": clip}
    switch = PrecisionSwitch(weights, multiply=multiply, **own)
    switch.bits = default
    return switch
