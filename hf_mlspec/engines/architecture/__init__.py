"""What does a decoder take from a model, or why does it not take it? Read by a description of the model's class."""

from .description import CPU_FIELDS, NORMS, Description, LayerInputs, Mixture
from .interpret import CPU, OF_ATTENTION, described, outline, require_known
from .known import KNOWN, ON_THE_CPU_ALONE
from .mixture import ExpertBlock, has_experts, routing_said
from .parts import (
    Block,
    Norm,
    Outline,
    UndescribedClass,
    UnknownArchitecture,
    as_read,
    linear_shape,
    require_format,
    table_dtype,
)
from .probe import Evidence, recognise
from .rotary import FIRST_POSITIONS, Rotation, grown_positions, rope_tables, rotary_border

__all__ = [
    "CPU",
    "CPU_FIELDS",
    "FIRST_POSITIONS",
    "KNOWN",
    "NORMS",
    "OF_ATTENTION",
    "ON_THE_CPU_ALONE",
    "Block",
    "Description",
    "Evidence",
    "ExpertBlock",
    "LayerInputs",
    "Mixture",
    "Norm",
    "Outline",
    "Rotation",
    "UndescribedClass",
    "UnknownArchitecture",
    "as_read",
    "described",
    "grown_positions",
    "has_experts",
    "linear_shape",
    "outline",
    "recognise",
    "require_format",
    "require_known",
    "rope_tables",
    "rotary_border",
    "routing_said",
    "table_dtype",
]
