"""What replaces nn.Linear where a weight is bit-planes, of which the first few may be read alone?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import ops
from ..formats import Parts, PlanesWeight
from ..formats.planes import PlanesParts
from ..ops.planes import planes_fit_device
from .packed import PackedLinear
from .packed_formats import Packing, register_packing
from .plane_source import PlaneSource
from .switch import PrecisionSwitch
from .transforms import NONE


class PlanesLinear(PackedLinear):
    """``y = x W^T + b`` with W in 1 to 8 bit-planes, of which any number from the first on is a weight
    (formats/planes/codes.py).

        parameter             dtype     on disk, in state_dict()    in tiles, from the first forward on
        weight_planes         uint8     [planes, out, in / 8]       plane_tiles (ops/planes/tiles.py)
        weight_scale          float16   [out, in / group]           scale_tiles
        weight_zero_doubled   int32     [1]                         the same

    At (b, 16) bits x is rounded to bfloat16 and the first b planes are read; inside ``switch.sent_through`` what that
    says. Options: ``num_planes``, 1 to 8, "int3",
    "int2" or "ternary", and ``group_size``.

    ``source``: None, or where the planes are streamed from; then no parameter holds them (`stream_`).
    """

    format = "planes"

    def __init__(
        self, weight: PlanesWeight, bias: nn.Parameter | None = None, switch: PrecisionSwitch | None = None
    ) -> None:
        """As PackedLinear; ValueError when ``switch`` is for another number of planes."""
        super().__init__(weight, bias, switch or PrecisionSwitch("planes", num_planes=weight.num_planes))
        self.group_size, self.num_planes = weight.group_size, weight.num_planes
        self._zero: int | None = None  # read once: from a GPU that waits
        self.source: PlaneSource | None = None
        if self.switch.num_planes != self.num_planes:
            raise ValueError(
                f"{weight.name}: the weight has {self.num_planes} bit-planes, its switch is for "
                f"{self.switch.num_planes}: make it PrecisionSwitch('planes', num_planes={self.num_planes})"
            )

    @property
    def zero_doubled(self) -> int:
        """Twice the code that means 0."""
        if self._zero is None:
            self._zero = int(self.weight_zero_doubled[0])
        return self._zero

    def dequantized(self, dtype: torch.dtype = torch.float32, num_planes: int | None = None) -> torch.Tensor:
        """W as ``[out, in]`` in ``dtype``, as the first ``num_planes`` planes have it (None: all)."""
        return self.packed_weight().dequantize(dtype, num_planes)

    @property
    def reads_dense(self) -> bool:
        """A materialized weight stands for all planes; fewer are read from the codes."""
        return self.switch.bits.weight == self.num_planes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        through = self.switch.through
        return super().forward(x) if through is None else through(self, x)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """``forward`` at the switch's bits, whatever it is sent through."""
        return super().forward(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._at_width(x, self.switch.bits.weight)

    def at_rows(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """``[rows, tokens, in]`` -> ``[rows, tokens, out]``: row r times the first widths[r] planes. Rows of equal
        width are multiplied together. ValueError for another number of rows."""
        if x.dim() != 3 or len(x) != len(widths):
            raise ValueError(f"widths are given for {len(widths)} rows, x has shape {list(x.shape)}")
        if self.transform is not NONE:
            x = self.transform.apply(x, self.transform_tensors())
        with self._reading(max(widths, default=1)) as tiles:
            if len(set(widths)) == 1:
                return self._times(x, tiles, widths[0])
            out = x.new_empty(*x.shape[:-1], self._rows)
            for width in sorted(set(widths)):
                rows = torch.tensor([row for row, own in enumerate(widths) if own == width], device=x.device)
                out[rows] = self._times(x[rows], tiles, width)
            return out

    def _at_width(self, x: torch.Tensor, num_planes: int) -> torch.Tensor:
        with self._reading(num_planes) as tiles:
            return self._times(x, tiles, num_planes)

    def _reading(self, num_planes: int) -> AbstractContextManager[Sequence[torch.Tensor | None]]:
        """A block inside of which there is what `PlaneSource.reading` gives."""
        return nullcontext(self._for_product()[:2]) if self.source is None else self.source.reading(self, num_planes)

    def _times(self, x: torch.Tensor, tiles: Sequence[torch.Tensor | None], num_planes: int) -> torch.Tensor:
        # Knows the group and the zero, which no tile tells.
        return ops.bitplane_linear(
            x, *tiles[:2], self._rows, self.bias,
            group_size=self.group_size, zero_doubled=self.zero_doubled, num_planes=num_planes,
            total_planes=self.num_planes, apart=tiles[2:],
        )  # fmt: skip

    def stream_(self, source: PlaneSource | None, tiles: Sequence[torch.Tensor]) -> PlanesLinear:
        """Take planes from ``source`` from now on, and hold ``tiles`` in place of the parameters: tiles of no planes,
        and those of the scales. With None: hold all planes again."""
        zero = self.weight_zero_doubled.data.to(tiles[0].device)
        self.source = None
        self.hold_tiles_(PlanesParts(*tiles, zero))
        self.source = source
        return self

    def _on_disk(self, name: str) -> Parts:
        if self.source is None:
            return super()._on_disk(name)
        return _unprepack(*self.source.whole(self), self.weight_zero_doubled.data, self._rows)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PlanesLinear:
        if self.source is not None:
            device = self.weight_planes.device
            if fn(self.weight_planes.data.new_empty(0)).device != device:
                raise RuntimeError(
                    f"the planes of this model are streamed to {device} and cannot be moved: end it with "
                    "hf_mlspec.stream_planes(model, None), move the model, and stream again"
                )
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.source is not None:
            raise RuntimeError(
                "weights cannot be loaded into a model whose planes are streamed: end it with "
                "hf_mlspec.stream_planes(model, None) first"
            )
        super()._load_from_state_dict(*args, **kwargs)
        self._zero = None

    def _in_tiles(self, name: str) -> Parts:
        if not self.weight_zero_doubled.is_meta:
            self._zero = int(self.weight_zero_doubled[0])
        return super()._in_tiles(name)

    def extra_repr(self) -> str:
        read = f"num_planes={self.num_planes}, weight_bits={self.switch.bits.weight}"
        return f"{super().extra_repr()}, group_size={self.group_size}, {read}"


def _prepack(planes: torch.Tensor, scale: torch.Tensor, zero_doubled: torch.Tensor) -> PlanesParts:
    return PlanesParts(*ops.prepack_planes(planes, scale), zero_doubled)


def _unprepack(planes: torch.Tensor, scale: torch.Tensor, zero_doubled: torch.Tensor, rows: int) -> PlanesParts:
    return PlanesParts(*ops.unprepack_planes(planes, scale, rows), zero_doubled)


def _beside(planes: torch.Tensor, scale: torch.Tensor, zero_doubled: torch.Tensor) -> PlanesParts:
    return PlanesParts(None, None, zero_doubled)


register_packing(Packing(PlanesLinear, _prepack, _unprepack, fits=planes_fit_device, beside=_beside))
