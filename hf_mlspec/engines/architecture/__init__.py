"""What does a decoder take from a model, or why does it not take it? Read by a description of the model's class."""

from .description import Description, Mixture
from .interpret import (
    CPU,
    Block,
    Outline,
    UnknownArchitecture,
    linear_shape,
    norm_weight,
    outline,
    require_format,
    require_known,
    table_dtype,
)
from .known import KNOWN
from .mixture import ExpertBlock
from .rotary import FIRST_POSITIONS, grown_positions, rope_tables, rotary_border

__all__ = [
    "CPU",
    "FIRST_POSITIONS",
    "KNOWN",
    "Block",
    "Description",
    "ExpertBlock",
    "Mixture",
    "Outline",
    "UnknownArchitecture",
    "grown_positions",
    "linear_shape",
    "norm_weight",
    "outline",
    "require_format",
    "require_known",
    "rope_tables",
    "rotary_border",
    "table_dtype",
]
