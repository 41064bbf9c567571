"""What replaces nn.Linear where a weight is looked up in tables, one for each number of planes that may be read?"""

from __future__ import annotations

import torch
from torch import nn

from .. import ops
from ..formats import LutWeight, Parts
from ..formats.lut import LutParts
from ..ops.lut import lut_fits_device
from .packed import PackedLinear
from .packed_formats import Packing, register_packing
from .switch import PrecisionSwitch


class LutLinear(PackedLinear):
    """``y = x W^T + b`` with W in planes whose bits are looked up in a table per output (formats/lut/weight.py).

        parameter        dtype     on disk, in state_dict()    in tiles, from the first forward on
        weight_planes    uint8     [B, out, in / 8]            plane_tiles (ops/lut/tiles.py)
        weight_tables    float16   [out, 2^(B+1) - 2^S]        table_tiles

    At (b, 16) bits, S <= b <= B, x and the values are rounded to bfloat16 and the first b planes are read, with the
    table of that width. Options: ``num_planes``, B, and ``least_planes``, S.
    """

    format = "lut"

    def __init__(
        self, weight: LutWeight, bias: nn.Parameter | None = None, switch: PrecisionSwitch | None = None
    ) -> None:
        """As PackedLinear; ValueError when ``switch`` is for other widths."""
        weight.validate()
        widths = {"num_planes": weight.num_planes, "least_planes": weight.least_planes}
        super().__init__(weight, bias, switch or PrecisionSwitch("lut", **widths))
        self.num_planes, self.least_planes = weight.num_planes, weight.least_planes
        if (self.switch.num_planes, self.switch.least_planes) != (self.num_planes, self.least_planes):
            raise ValueError(
                f"{weight.name}: the weight has tables of {self.least_planes} to {self.num_planes} bits, its switch "
                f"is for {self.switch.least_planes} to {self.switch.num_planes}: make it PrecisionSwitch('lut', "
                f"num_planes={self.num_planes}, least_planes={self.least_planes})"
            )

    @property
    def table_tiles(self) -> nn.Parameter:
        """float16, as ``weight_tiles``; RuntimeError before ``prepack_()``."""
        return self._tiles("tables")

    def dequantized(self, dtype: torch.dtype = torch.float32, num_planes: int | None = None) -> torch.Tensor:
        """W as ``[out, in]`` in ``dtype``, as the first ``num_planes`` planes have it (None: all)."""
        return self.packed_weight().dequantize(dtype, num_planes)

    @property
    def reads_dense(self) -> bool:
        """A materialized weight stands for all planes; fewer are read from the codes."""
        return self.switch.bits.weight == self.num_planes

    def extra_repr(self) -> str:
        read = f"num_planes={self.num_planes}, least_planes={self.least_planes}"
        return f"{super().extra_repr()}, {read}, weight_bits={self.switch.bits.weight}"


def _prepack(planes: torch.Tensor, tables: torch.Tensor) -> LutParts:
    return LutParts(*ops.prepack_lut(planes, tables))


def _unprepack(planes: torch.Tensor, tables: torch.Tensor, rows: int) -> LutParts:
    return LutParts(*ops.unprepack_lut(planes, tables, rows))


def _multiply(
    x: torch.Tensor, tiles: Parts, rows: int, bias: torch.Tensor | None, switch: PrecisionSwitch
) -> torch.Tensor:
    return ops.lut_linear(x, *tiles, rows, bias, num_planes=switch.bits.weight)


register_packing(Packing(LutLinear, _prepack, _unprepack, _multiply, fits=lut_fits_device))
