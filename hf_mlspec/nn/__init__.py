"""What replaces a module, or a whole model. Importing registers the modules of every format."""

from . import linear, lut, nested, planes

__all__ = ["linear", "lut", "nested", "planes"]
