"""What replaces nn.Linear where a weight is a dense low part and a sparse high part, and a draft skips the second?"""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..formats import Parts
from ..formats.zipper import LOW, WHOLE, Split
from ..ops.planes import planes_fit_device
from ..ops.zipper import split_of
from .packed import PackedLinear
from .packed_formats import Packing, register_packing


class ZipperLinear(PackedLinear):
    """``y = x W^T + b`` with W of 4 to 8 bits and one scale a row, split in two (formats/zipper/codes.py).

        parameter        dtype     on disk, in state_dict()    in tiles, from the first forward on (ops/zipper.py)
        weight_planes    uint8     [K, out, in / 8]            the low part's, in tiles of bit-planes
        weight_scale     float16   [out, 1]                    the low part's, in tiles of bit-planes
        weight_split     int32     [4]                         [4 + 2 out + 1 + terms]: behind it the high part

    At (6, 16) bits, whatever K is, x meets both parts, at (4, 16) the low part alone. x is rounded to bfloat16. With 8
    or 4 bits of activations the low part meets integers, the high part x as it does with 16.
    Options: ``bits``, ``low_bits``, ``mode``, ``high_part``.
    """

    format = "zipper"
    _how: Split | None = None  # read once: from a GPU that waits

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
        return ops.zipper_linear(
            x, held, self._rows, self.bias, how=self.how, low_only=low_only, activation_bits=bits.activation
        )

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._how = None

    def _in_tiles(self, name: str) -> Parts:
        split = self.parts(name).split
        if split.is_cuda and split[-1].item():
            raise ValueError(
                "zipper: high_part='host' on a GPU is not built yet, only the CPU multiplies such a layer: load the "
                "model on the CPU, or quantize it with high_part='device'"
            )
        self._how = split_of(split)
        return super()._in_tiles(name)

    def extra_repr(self) -> str:
        how = "" if self.weight_split.is_meta else ", bits={}, low_bits={}, mode={!r}".format(*self.how)
        return f"{super().extra_repr()}{how}, weight_bits={self.switch.bits.weight}"


register_packing(Packing(ZipperLinear, ops.prepack_zipper, ops.unprepack_zipper, fits=planes_fit_device))
