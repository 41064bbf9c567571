"""Which rows of a step become integers in the kernel that makes them?

Inputs of int4 linears at 8 or 4 activation bits. The bits are those of two kernels, one that makes rows and one that
codes them.
"""

from __future__ import annotations

from torch import Tensor

from ... import ops
from ...ops import CodesOf
from ...precision import Bits
from .layer import LayerLinear
from .linears import FourBitLinear, OutlierLinear
from .row_bits import BitsOfBlock, BlockBits, times
from .weights import OrderedLinear, RotatedLinear


def coding_of(linear: LayerLinear | None, bits: BitsOfBlock | BlockBits) -> CodesOf | None:
    """How the inputs of a linear are coded before it multiplies them; None: it reads rows."""
    known = isinstance(linear, FourBitLinear | OutlierLinear) and isinstance(bits, Bits)
    return linear.coding(bits) if known else None


def times_turned(linear: LayerLinear, x: Tensor, bits: BitsOfBlock) -> Tensor:
    """``[n, in]`` -> ``[n, out]``; rows that the linear puts in an order or rotates are coded there."""
    if isinstance(linear, OrderedLinear | RotatedLinear):
        how = coding_of(linear.linear, bits)
        if how is not None:
            turned = linear.order if isinstance(linear, OrderedLinear) else linear.how
            return linear.linear(ops.row_codes(x, turned, how), bits)
    return times(linear, x, bits)
