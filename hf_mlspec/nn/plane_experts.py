"""What replaces a module of experts where their weights are bit-planes, of which the first few may be read alone?"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import ops
from ..formats import FORMATS
from ..formats.planes import PlanesParts
from .experts import PackedExperts
from .switch import PrecisionSwitch, switch_for


class PlaneExperts(PackedExperts):
    """The experts of a layer in 1 to 8 bit-planes; called, like what it replaces, by the model's own routing block.

    For every projection X, out-major also where the dense module was not:

        parameter         on disk, in state_dict()           in tiles, from the first forward on (ops/planes/)
        X_planes          [experts, planes, out, in / 8]     plane_tiles of each expert
        X_scale           [experts, out, in / group]         scale_tiles of each
        X_zero_doubled    [experts, 1], all alike            the same
        X_bias            [experts, out], the very parameter of the original, where it has one

    At (b, 16) bits the first b planes are read, of the experts that were chosen. A router that picks widths, and
    planes that are streamed, are of linears: experts are whole, and read what the switch says.
    """

    format = "planes"

    def __init__(
        self,
        module: nn.Module,
        format: str = "planes",
        switch: PrecisionSwitch | None = None,
        name: str = "experts",
        **options: Any,
    ) -> None:
        """As PackedExperts; ValueError when ``switch`` is for another number of planes."""
        record = FORMATS[self.format]
        super().__init__(module, format, switch or switch_for(record, options), name, **options)
        self.num_planes = record.stored_bits(**options)
        self._zeros_doubled: dict[str, int] = {}  # read once: from a GPU that waits
        if self.switch.num_planes != self.num_planes:
            raise ValueError(
                f"{name}: the experts have {self.num_planes} bit-planes, their switch is for "
                f"{self.switch.num_planes}: make it PrecisionSwitch('planes', num_planes={self.num_planes})"
            )

    def zero_doubled(self, key: str) -> int:
        """Twice the code that means 0 in projection ``key``."""
        if key not in self._zeros_doubled:
            self._zeros_doubled[key] = int(self._parameters[f"{key}_zero_doubled"].flatten()[0])
        return self._zeros_doubled[key]

    def validate_parts(self, key: str, disk: PlanesParts, name: str) -> None:
        super().validate_parts(key, disk, name)
        if disk.planes.shape[1] != self.num_planes:
            raise ValueError(
                f"{name}.{key} of expert 0 has {disk.planes.shape[1]} bit-planes, its format says {self.num_planes}: "
                "the checkpoint is damaged"
            )
        odd = (disk.zero_doubled != disk.zero_doubled[0]).any(dim=1)
        if odd.any():
            raise ValueError(
                f"{name}.{key} of expert {int(odd.nonzero()[0])}: its zero_doubled is not that of the first expert: "
                "the checkpoint is damaged"
            )

    def _multiply_planned(self, key: str, x: Tensor, experts: Tensor, plan: Tensor) -> Tensor:
        bias = self._parameters[f"{key}_bias"].detach().contiguous() if self.has_bias else None
        tiles = PlanesParts(*self.prepack_().parts(key))
        how = self._rows(key), self.group_size, self.zero_doubled(key), self.switch.bits.weight
        return ops.plane_expert_rows(x, tiles.planes, tiles.scale, bias, experts, plan, *how)

    def _multiply(self, key: str, expert: int, x: Tensor) -> Tensor:
        dense = self._buffers[f"{key}_dense"]
        if dense is not None and self.switch.bits.weight == self.num_planes:  # materialized, of all planes
            return super()._multiply(key, expert, x)
        tiles = PlanesParts(*self._for_product(key, expert))
        return ops.bitplane_linear(
            x, tiles.planes, tiles.scale, self._rows(key),
            self._parameters[f"{key}_bias"][expert] if self.has_bias else None,
            group_size=self.group_size, zero_doubled=self.zero_doubled(key), num_planes=self.switch.bits.weight,
        )  # fmt: skip

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._zeros_doubled = {}

    def extra_repr(self) -> str:
        read = f"num_planes={self.num_planes}, weight_bits={self.switch.bits.weight}"
        return f"{super().extra_repr()}, {read}"
