"""What replaces nn.Linear where a weight is a dense low part and a sparse high part, and a draft skips the second?"""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..formats import Parts
from ..formats.zipper import HEADER, HIGH_PARTS, LOW, WHOLE, Split
from ..ops.zipper import high_part, split_of, zipper_fit_device
from .packed import PackedLinear
from .packed_formats import Packing, register_packing
from .zipper_host import HostRows, begun, to_host, zipper_host_linear


class ZipperLinear(PackedLinear):
    """``y = x W^T + b`` with W of 4 to 8 bits and one scale a row, split in two (formats/zipper/codes.py).

        parameter        dtype     on disk, in state_dict()    in tiles, from the first forward on (ops/zipper.py)
        weight_planes    uint8     [K, out, in / 8]            the low part's, in tiles of int4 codes or bit-planes
        weight_scale     float16   [out, 1]                    the low part's, in the same tiles
        weight_split     int32     [4]                         behind these four the high part in cells

    With high_part "host" a layer on a GPU keeps the high part in the host's memory, where the CPU adds it
    (zipper_host.py). At (6, 16) bits, whatever K is, x meets both parts, at (4, 16) the low part alone. x is rounded
    to bfloat16. With 8 or 4 bits of activations the low part meets integers, the high part x as it does with 16.
    Options: ``bits``, ``low_bits``, ``mode``, ``high_part``.
    """

    format = "zipper"
    _how: Split | None = None  # read once: from a GPU that waits
    _host: HostRows | None = None  # in tiles on a GPU with high_part "host": all but the four integers of weight_split

    @property
    def how(self) -> Split:
        """K, k1 and the mode."""
        if self._how is None:
            self._how = split_of(self.weight_split)
        return self._how

    @property
    def reads_dense(self) -> bool:
        """A materialized weight stands for both parts; the low one and integers of inputs need the codes."""
        return self.switch.bits == WHOLE

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        held = self._for_product()
        bits = self.switch.bits
        low_only = bits.weight == LOW.weight
        if self._host is not None and not low_only:
            return self._with_host(x, held, bits.activation)
        return ops.zipper_linear(
            x, held, self._rows, self.bias, how=self.how, low_only=low_only, activation_bits=bits.activation
        )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._how = None

    def _with_host(self, x: torch.Tensor, held: Parts, activation_bits: int) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        pending = begun(rows, [self._host])
        how = {"how": self.how, "activation_bits": activation_bits}
        low = ops.zipper_low_sums(rows, held.planes, held.scale, self._rows, **how)
        return zipper_host_linear(rows, low, pending, self.bias).reshape(*x.shape[:-1], self._rows)

    @property
    def high_part(self) -> str:
        """Where the high part is multiplied: "device" or "host". Reads the tensor."""
        return HIGH_PARTS[int(self.weight_split[HEADER - 1])]

    def high_on_host(self) -> HostRows | None:
        """The high part where the CPU multiplies it for a GPU, of a weight in tiles; None where the device does."""
        return self._host

    def _in_tiles(self, name: str) -> Parts:
        split = self.parts(name).split
        self._how, on_host = split_of(split), split.is_cuda and bool(split[HEADER - 1])
        self._host = None
        tiles = super()._in_tiles(name)
        return self._without_high(tiles) if on_host else tiles

    def _without_high(self, tiles: Parts) -> Parts:
        self._host = to_host(tiles.split, self._rows, self.in_features)
        return tiles._replace(split=tiles.split[:HEADER].clone())

    def _on_disk(self, name: str) -> Parts:
        parts, in_tiles = self._in_one_layout(name)
        if self._host is None or not in_tiles:
            return super()._on_disk(name)
        whole = parts._replace(split=self._host.in_tiles(parts.split.device))
        return self.packing.unprepack(*whole, self._rows)

    def hold_tiles_(self, tiles: Parts) -> None:
        """As `PackedLinear.hold_tiles_`; a high part of the host's goes there."""
        self._rows = self.out_features
        parts = type(self.parts("weight"))(*tiles)
        on_host = parts.split.is_cuda and bool(parts.split[HEADER - 1])
        super().hold_tiles_(self._without_high(parts) if on_host else parts)

    def extra_repr(self) -> str:
        how = "" if self.weight_split.is_meta else ", bits={}, low_bits={}, mode={!r}".format(*self.how)
        return f"{super().extra_repr()}{how}, weight_bits={self.switch.bits.weight}"


register_packing(
    Packing(
        ZipperLinear, ops.prepack_zipper, ops.unprepack_zipper, fits=zipper_fit_device,
        beside=lambda *parts: (None, None, high_part(*parts)),
    )
)  # fmt: skip
