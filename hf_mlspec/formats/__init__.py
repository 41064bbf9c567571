"""What the bits of a weight, and of keys and values, mean: one record for each format, in FORMATS and CACHE_FORMATS.
Pure torch, no state, any device."""

from . import int4, int4_int8, lut, mxfp4, nested, planes, zipper
from .cache import CACHE_FORMATS, CacheFormat, cache_format, stored_format
from .int4 import Int4Weight
from .int4_int8 import Int4Int8Weight
from .lut import LutWeight
from .mxfp4 import Mxfp4Weight
from .nested import NestedWeight
from .planes import PlanesWeight
from .record import FORMATS, CastWord, Format, Option, casts, format_named, options, register, unregister
from .weight import NibbleWeight, PackedWeight, Parts
from .zipper import ZipperWeight

__all__ = [
    "CACHE_FORMATS",
    "FORMATS",
    "CacheFormat",
    "CastWord",
    "Format",
    "Int4Int8Weight",
    "Int4Weight",
    "LutWeight",
    "Mxfp4Weight",
    "NestedWeight",
    "NibbleWeight",
    "Option",
    "PackedWeight",
    "Parts",
    "PlanesWeight",
    "ZipperWeight",
    "cache_format",
    "casts",
    "format_named",
    "options",
    "register",
    "stored_format",
    "unregister",
]

for own in (mxfp4.FORMAT, int4.FORMAT, nested.FORMAT, planes.FORMAT, lut.FORMAT, int4_int8.FORMAT, zipper.FORMAT):
    register(own)
