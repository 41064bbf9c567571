"""What replaces a module, or a whole model. Importing registers the modules of every format."""

from . import int4_int8, linear, lut, nested, planes, zipper

__all__ = ["int4_int8", "linear", "lut", "nested", "planes", "zipper"]
