"""Can the target draft for itself, on fewer bits of its own weights or coarser activations? Each no says why, and what
to do."""

from __future__ import annotations

from torch import nn

from ..engines.built import switches
from ..nn.switch import CHOICES, FAMILIES, PrecisionSwitch, precision_switch
from ..precision import Bits, Precision
from .config import (
    CONFIDENCE_THRESHOLD,
    NUM_DRAFT_TOKENS,
    NUM_DRAFT_TOKENS_AT_LOWER_PRECISION,
    QSPEC_ACTIVATION_BITS,
)

# What holds the weights that a family of words drafts with, and how a model comes by them.
_REMEDIES = {
    "nested": ("nested weights", "nest it with hf_mlspec.nest(model), or load it with from_pretrained(..., "
               "quantization_config=hf_mlspec.MLSpecConfig(format='nested-bf16'))"),
    "planes": ("bit-planes", "load it with from_pretrained(..., "
               "quantization_config=hf_mlspec.MLSpecConfig(format='bitplanes'))"),
    "4-bit": ("4-bit weights", "load it with from_pretrained(..., "
              "quantization_config=hf_mlspec.MLSpecConfig(format='int4')), or draft with 'mxfp4', its cast"),
}  # fmt: skip
_NAMES = {"int4": "int4", "mxfp4": "MXFP4", "nested": "nested BF16", "planes": "bit-planes"}


def lower_precision(target: nn.Module, word: str, precision: Precision | None) -> Bits:
    """What a level word reads of the target's weights, and multiplies it by.

    precision: None for the word "qspec", the best that the kernels have for 4-bit weights. "nested" stands for the
    draft inside nested weights: times int8 activations on a CPU, bfloat16 elsewhere, as "mxfp4" casts. ValueError for
    a target without packed weights, or with weights of another format, or bits they do not take.
    """
    switch = _switch(target, word, precision)
    family = FAMILIES[switch.weights]
    if precision is None and switch.weights in CHOICES:
        return Bits(4, QSPEC_ACTIVATION_BITS)
    if precision is None or precision.family != family or (family == "w" and precision.weight_bits != 4):
        raise ValueError(
            f"level {word!r} drafts with the target's own weights, and those of this {type(target).__name__} are "
            f"{_NAMES[switch.weights]}: its levels are called {_fitting(switch)}"
        )
    if precision == Precision("nested", 16):
        return Bits(4, 8 if next(target.parameters()).device.type == "cpu" else 16)
    if family == "planes" and precision.weight_bits > switch.num_planes:
        raise ValueError(
            f"level {word!r}: the weights of this {type(target).__name__} have {switch.num_planes} bit-planes; its "
            f"levels are called {_fitting(switch)}"
        )
    if precision.bits not in switch.bit_choices:
        raise ValueError(
            f"level {word!r}: {_NAMES[switch.weights]} weights take activations of {_listed(switch.choices)} bits, "
            f"not {precision.activation_bits}"
        )
    return precision.bits


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
    held, remedy = _REMEDIES.get(precision.family if precision else "4-bit", _REMEDIES["4-bit"])
    if found:
        kinds = ", ".join(_NAMES[switch.weights] for switch in found)
        raise ValueError(
            f"level {word!r} drafts with the target's own weights, and this {type(target).__name__} has those of "
            f"{len(found)} switches ({kinds}): assign one PrecisionSwitch to the `switch` of all its packed layers"
        )
    raise ValueError(
        f"level {word!r} drafts with the target's own {held} (these are {target.dtype}), and this "
        f"{type(target).__name__} has none: {remedy}"
    )


def _fitting(switch: PrecisionSwitch) -> str:
    """The words for levels of these weights."""
    if switch.weights == "nested":
        return "'nested', 'nested4' or 'nested4a8'"
    family, (finest, *coarser) = FAMILIES[switch.weights], switch.bit_choices
    words = ", ".join(repr(str(Precision(family, *bits))) for bits in coarser)
    return words or f"by no word, {Precision(family, *finest)} is the least there is"


def _told(switch: PrecisionSwitch, bits: Bits, again: bool = False) -> str:
    """Bits in words, those of activations where weights are always read whole; again: the same thing was named."""
    if switch.weights in CHOICES:
        return str(bits.activation) if again else f"{bits.activation}-bit activations"
    word = Precision(FAMILIES[switch.weights], *bits)
    return f"those of {word}" if again else f"the bits of {word}"


def _listed(choices: tuple[int, ...]) -> str:
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last
