"""What the bits of a weight mean: one record for each format, in FORMATS. Pure torch, no state, any device."""

from . import int4, mxfp4, nested, planes
from .int4 import Int4Weight
from .mxfp4 import Mxfp4Weight
from .nested import NestedWeight
from .planes import PlanesWeight
from .record import FORMATS, CastWord, Format, Option, casts, format_named, options, register, unregister
from .weight import PackedWeight, Parts

__all__ = [
    "FORMATS",
    "CastWord",
    "Format",
    "Int4Weight",
    "Mxfp4Weight",
    "NestedWeight",
    "Option",
    "PackedWeight",
    "Parts",
    "PlanesWeight",
    "casts",
    "format_named",
    "options",
    "register",
    "unregister",
]

for own in (mxfp4.FORMAT, int4.FORMAT, nested.FORMAT, planes.FORMAT):
    register(own)
