"""Can the target draft for itself, on fewer bits of its own weights or coarser activations? Errors name the reason and
the remedy."""

from __future__ import annotations

from torch import nn

from ...engines.built import switches
from ...engines.engine import Engine
from ...engines.slots import meets_integers
from ...formats import FORMATS, Format
from ...nn.packed import PackedLinear
from ...nn.switch import PrecisionSwitch, precision_switch
from ...precision import Bits, Precision
from ..config import CONFIDENCE_THRESHOLD, NUM_DRAFT_TOKENS, NUM_DRAFT_TOKENS_AT_LOWER_PRECISION, QSPEC_ACTIVATION_BITS

_QSPEC = "int4"  # whose weights the word "qspec" is meant for


def lower_precision(target: nn.Module, word: str, precision: Precision | None) -> Bits:
    """The weight and activation bits with which a level word reads the target's weights.

    precision: None for the word "qspec": the best bits that the kernels have for 4-bit weights. "nested" is the draft
    inside nested weights: with int8 activations on a CPU, bfloat16 elsewhere, as "mxfp4" casts. Raises ValueError for
    a target without packed weights, or with weights of another format, or for bits that they do not support.
    """
    switch = _switch(target, word, precision)
    record, finest = switch.record, switch.bit_choices[0]
    coarse = Bits(finest.weight, QSPEC_ACTIVATION_BITS)
    if precision is None and not record.reads_part and coarse in switch.bit_choices:
        return coarse
    other_bits = not record.reads_part and precision is not None and precision.weight_bits != finest.weight
    if precision is None or precision.family != record.family or other_bits:
        raise ValueError(
            f"level {word!r} drafts with the target's own weights, and those of this {type(target).__name__} are "
            f"{record.title}: its levels are called {_fitting(switch)}"
        )
    bits = record.as_level(precision.bits, next(target.parameters()).device.type)
    if bits.weight > finest.weight:
        raise ValueError(
            f"level {word!r}: the weights of this {type(target).__name__} have {finest.weight} {record.title}; its "
            f"levels are called {_fitting(switch)}"
        )
    if bits.weight < switch.least_planes:
        raise ValueError(
            f"level {word!r}: the weights of this {type(target).__name__} have no table of {bits.weight} bits: its "
            f"levels are called {_fitting(switch)}"
        )
    if bits not in switch.bit_choices:
        raise ValueError(
            f"level {word!r}: {record.title} weights take activations of {_listed(switch.choices)} bits, not "
            f"{precision.activation_bits}"
        )
    return bits


def require_engine(target: nn.Module, word: str, bits: Bits, engine: Engine) -> None:
    """ValueError for bits of activations that the modules of these weights have, and ``engine`` does not."""
    switch = precision_switch(target)
    if bits.activation == 16 or engine.name == "modules":
        return
    own = (layer for layer in target.modules() if isinstance(layer, PackedLinear) and layer.switch is switch)
    if not all(meets_integers(layer, engine.name.upper()) for layer in own):
        own = Precision(switch.record.family, switch.bits.weight, bits.activation)
        raise ValueError(
            f"level {word!r}: the decoder of GPUs multiplies these {switch.record.title} by 16-bit activations alone: "
            f"its levels are called {_fitting(switch)}; or quantize with mode='paper', whose low part has 4 bits; or "
            f"let the target have {bits.activation}-bit ones, too "
            f"(activation_bits={bits.activation}, {str(own)!r}), which run module by module"
        )


def check_descent(target: nn.Module, bits: list[Bits | None], levels: list) -> None:
    """Raise ValueError unless the bits of the target's own levels fall from level to level.

    bits: per level, None for those that are another model. A level that computes what the level above computes would
    cost as much and add nothing.
    """
    if all(own is None for own in bits):
        return
    switch = precision_switch(target)
    above, name = switch.bits, "the target"
    for index, (own, level) in enumerate(zip(bits, levels, strict=True)):
        if own is None:
            continue
        if own == above or own.weight > above.weight or own.activation > above.activation:
            raise ValueError(
                f"level {index} ({level}) drafts with {_told(switch, own)} for {name}, which has "
                f"{_told(switch, above, again=True)}: each level must have fewer than the one that checks it"
            )
        above, name = own, f"level {index} ({level})"


def drafting_defaults(target: nn.Module, bits: Bits) -> tuple[int, float]:
    """How many tokens a level of the target's own drafts, and its confidence threshold.

    One that reads only part of the weights drafts like a cast; one that multiplies all of them by coarser activations
    as QSpec does."""
    if bits.weight < precision_switch(target).bits.weight:
        return NUM_DRAFT_TOKENS, CONFIDENCE_THRESHOLD
    return NUM_DRAFT_TOKENS_AT_LOWER_PRECISION, 0.0


def _switch(target: nn.Module, word: str, precision: Precision | None) -> PrecisionSwitch:
    found = switches(target)
    if len(found) == 1:
        return found[0]
    wanted = _record_of(precision) if precision else FORMATS[_QSPEC]
    if found:
        kinds = ", ".join(switch.record.title for switch in found)
        raise ValueError(
            f"level {word!r} drafts with the target's own weights, and this {type(target).__name__} has those of "
            f"{len(found)} switches ({kinds}): assign one PrecisionSwitch to the `switch` of all its packed layers"
        )
    raise ValueError(
        f"level {word!r} drafts with the target's own {wanted.weights_called} (these are {target.dtype}), and this "
        f"{type(target).__name__} has none: {wanted.remedy}"
    )


def _record_of(precision: Precision) -> Format:
    """Of the format whose weights are read at a precision."""
    return next(record for record in FORMATS.values() if precision.family in [own.name for own in record.families])


def _fitting(switch: PrecisionSwitch) -> str:
    """The words for levels of these weights."""
    if switch.record.level_words:
        return _listed(tuple(map(repr, switch.record.level_words)))
    family, (finest, *coarser) = switch.record.family, switch.bit_choices
    words = ", ".join(repr(str(Precision(family, *bits))) for bits in coarser)
    return words or f"by no word, {Precision(family, *finest)} is the least there is"


def _told(switch: PrecisionSwitch, bits: Bits, again: bool = False) -> str:
    """Bits in words, those of activations where weights are always read whole; again: the same thing was named."""
    if not switch.record.reads_part:
        return str(bits.activation) if again else f"{bits.activation}-bit activations"
    word = Precision(switch.record.family, *bits)
    return f"those of {word}" if again else f"the bits of {word}"


def _listed(choices: tuple) -> str:
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last
