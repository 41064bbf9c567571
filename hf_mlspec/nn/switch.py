"""At how many activation bits does a model multiply its 4-bit weights? One object that all its packed layers share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from ..precision import Precision

CHOICES = {"int4": (16, 8, 4), "mxfp4": (16, 8)}
MULTIPLY = ("fused", "dequant")
_FAMILIES = {"int4": "w", "mxfp4": "mxfp4"}


class _Override(threading.local):
    bits: int | None = None


class PrecisionSwitch:
    """The activation bits of every packed layer of a model: one assignment, or ``with switch.at("w4a8"):``, changes
    all.

    The weights stay what they are (QSpec, arXiv 2410.11305: one weight, two precisions). An override is the calling
    thread's own and nests; a deep copy or a pickle of the model has a switch of its own at the same default.
    """

    def __init__(self, weights: str, activation_bits: int = 16, multiply: str = "fused") -> None:
        """weights: "int4" or "mxfp4", the format of the layers; ValueError for another, or for other bits."""
        if weights not in CHOICES:
            raise ValueError(f"PrecisionSwitch: weights is {weights!r}, choose one of {', '.join(CHOICES)}")
        self.weights, self._override = weights, _Override()
        self.activation_bits = activation_bits
        self.multiply = multiply

    @property
    def choices(self) -> tuple[int, ...]:
        """The activation bits that these weights can be called with."""
        return CHOICES[self.weights]

    @property
    def activation_bits(self) -> int:
        """This thread's override inside ``with switch.at(...)``, else the default. Assigning sets the default."""
        bits = self._override.bits
        return self._default if bits is None else bits

    @activation_bits.setter
    def activation_bits(self, bits: int) -> None:
        self._default = require_activation_bits(bits, self.weights)

    @property
    def default_activation_bits(self) -> int:
        """What holds outside of every ``with switch.at(...)``, in every thread."""
        return self._default

    @property
    def multiply(self) -> str:
        """How a 16-bit call multiplies int4 weights: "fused", by the kernel that reads the codes; or "dequant", the
        whole matrix in bfloat16 first, then a dense product, as systems without such a kernel do (for comparison)."""
        return self._multiply

    @multiply.setter
    def multiply(self, how: str) -> None:
        if how not in MULTIPLY:
            raise ValueError(f"PrecisionSwitch: multiply is {how!r}, choose one of {', '.join(MULTIPLY)}")
        if how == "dequant" and self.weights != "int4":
            raise ValueError(f"PrecisionSwitch: multiply 'dequant' is for int4 weights, these are {self.weights}")
        self._multiply = how

    @property
    def precision(self) -> Precision:
        """The word for what a call in this thread computes with: w4a8, mxfp4a8 ..."""
        return Precision(_FAMILIES[self.weights], 4, self.activation_bits)

    def at(self, precision: str | Precision | int) -> AbstractContextManager[PrecisionSwitch]:
        """A ``with`` block in which this thread computes at ``precision``: a word, a Precision or activation bits.

        ValueError for a word whose weights are not this switch's, or for bits its weights have no kernel for.
        """
        return self._overridden(self.bits_of(precision))

    def bits_of(self, precision: str | Precision | int) -> int:
        """The activation bits that ``precision`` stands for; ValueError as ``at``."""
        if isinstance(precision, str):
            precision = Precision.parse(precision)
        if not isinstance(precision, Precision):
            return require_activation_bits(precision, self.weights)
        if (precision.family, precision.weight_bits) != (_FAMILIES[self.weights], 4):
            words = ", ".join(str(Precision(_FAMILIES[self.weights], 4, bits)) for bits in self.choices)
            raise ValueError(f"precision {precision}: this model's weights are {self.weights}, choose one of {words}")
        return require_activation_bits(precision.activation_bits, self.weights)

    @contextmanager
    def _overridden(self, bits: int) -> Iterator[PrecisionSwitch]:
        before, self._override.bits = self._override.bits, bits
        try:
            yield self
        finally:
            self._override.bits = before

    def __reduce__(self) -> tuple:
        """For copy and pickle: an override belongs to a thread and stays behind."""
        return type(self), (self.weights, self._default, self._multiply)

    def __repr__(self) -> str:
        return f"PrecisionSwitch({self.weights!r}, activation_bits={self.activation_bits}, multiply={self.multiply!r})"


def require_activation_bits(activation_bits: int, weights: str) -> int:
    """``activation_bits``, or ValueError where the format has no such width."""
    choices = CHOICES[weights]
    if not isinstance(activation_bits, int) or activation_bits not in choices:
        meaning = {16: "16 (bfloat16)", 8: "8 (int8)", 4: "4 (int4)"}
        ways = " or ".join(meaning[bits] for bits in choices)
        raise ValueError(f"activation_bits is {activation_bits!r}: choose {ways} for {weights} weights")
    return activation_bits


def precision_switch(model: nn.Module) -> PrecisionSwitch:
    """The switch that all packed layers of ``model`` share; ValueError where it has none, or several."""
    found = {id(s): s for m in model.modules() if isinstance(s := vars(m).get("switch"), PrecisionSwitch)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} holds no packed 4-bit layer: load it with quantization_config=MLSpecConfig(...), "
            "or cast it with direct_cast"
        )
    if len(found) > 1:
        raise ValueError(
            f"{type(model).__name__} holds packed layers with {len(found)} switches ({list(found.values())}); assign "
            "one of them to the `switch` of all its packed layers"
        )
    return next(iter(found.values()))
