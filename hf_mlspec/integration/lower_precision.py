"""Can the target draft for itself with coarser activations, as QSpec does? Each no says why, and what to do."""

from __future__ import annotations

from torch import nn

from ..nn.switch import PrecisionSwitch, precision_switch
from ..precision import Precision
from .config import QSPEC_ACTIVATION_BITS


def lower_precision(target: nn.Module, word: str, precision: Precision | None) -> int:
    """The activation bits of a level word; `precision` None (the word "qspec") means the best the kernels have.

    Raises ValueError for a target without packed weights, or with weights of another format, or bits they do not take.
    """
    switch = _switch(target, word)
    if precision is None:
        return QSPEC_ACTIVATION_BITS
    own = switch.precision
    if (precision.family, precision.weight_bits) != (own.family, own.weight_bits):
        fitting = ", ".join(repr(str(Precision(own.family, own.weight_bits, bits))) for bits in _drafting(switch))
        raise ValueError(
            f"level {word!r} drafts with the target's own weights, and those of this {type(target).__name__} are "
            f"{_weights(own)}: its levels are called {fitting}"
        )
    if precision.activation_bits not in switch.choices:
        raise ValueError(
            f"level {word!r}: {_weights(own)} weights take activations of {_listed(switch.choices)} bits, not "
            f"{precision.activation_bits}"
        )
    return precision.activation_bits


def check_descent(target: nn.Module, bits: list[int | None], levels: list) -> None:
    """Raise ValueError unless the activation bits of the target's own levels fall from level to level.

    bits: per level, None for those that are another model. A level that computes what the level above computes would
    cost as much and add nothing.
    """
    if all(own is None for own in bits):
        return
    above, name = precision_switch(target).activation_bits, "the target"
    for index, (own, level) in enumerate(zip(bits, levels, strict=True)):
        if own is None:
            continue
        if own >= above:
            raise ValueError(
                f"level {index} ({level}) drafts with {own}-bit activations for {name}, which has {above}: each level "
                "must have fewer than the one that checks it"
            )
        above, name = own, f"level {index} ({level})"


def _switch(target: nn.Module, word: str) -> PrecisionSwitch:
    try:
        return precision_switch(target)
    except ValueError as error:
        raise ValueError(
            f"level {word!r} drafts with the target's own 4-bit weights, and this {type(target).__name__} has none: "
            "load it with from_pretrained(..., quantization_config=hf_mlspec.MLSpecConfig(format='int4')), or draft "
            "with 'mxfp4', its cast"
        ) from error


def _drafting(switch: PrecisionSwitch) -> list[int]:
    return [bits for bits in switch.choices if bits < 16]


def _weights(precision: Precision) -> str:
    return "MXFP4" if precision.family == "mxfp4" else f"int{precision.weight_bits}"


def _listed(choices: tuple[int, ...]) -> str:
    return ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
