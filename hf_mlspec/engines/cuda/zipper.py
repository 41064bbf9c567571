"""How does the CUDA decoder multiply weights in two parts that were put in tiles together?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ... import ops
from ...formats import Parts
from ...formats.zipper import HEADER, LOW
from ...nn.switch import filled
from ...nn.zipper import ZipperLinear
from ...nn.zipper_host import HostRows, begun, to_host, zipper_host_linear
from ...precision import Bits
from .neighbours import make_views, neighbours


class ZipperTilesLinear:
    """Tiles of ``ops.prepack_zipper``: both parts, or the low one alone.

    high: the sparse parts of all modules, one behind the other, and of each its outputs and where it begins. hosts:
    those of weights whose high parts the CPU adds.
    """

    __slots__ = ("bias", "extra_bytes", "high", "hosts", "how", "out_features", "own", "rows", "tiles")

    def __init__(self, module: ZipperLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        self.tiles, self.out_features, self.bias, self.extra_bytes = tiles[:2], out_features, bias, 0
        self.high, self.rows = tiles[2], {"outputs": [out_features], "begins": [0]}
        self.how = module.how
        self.own = module.switch.bits
        self.hosts: list[HostRows] = []
        if tiles[2].is_cuda and bool(tiles[2][HEADER - 1]) and len(tiles[2]) > HEADER:
            self.hosts, self.high = [to_host(tiles[2], out_features, module.in_features)], None

    def share_high(self, modules: Sequence[ZipperLinear]) -> None:
        """Let the modules' sparse parts, which they hold beside their tiles, lie behind each other, and read those."""
        hosts = [module.high_on_host() for module in modules]
        if all(host is not None for host in hosts):
            self.hosts, self.high = hosts, None
            return
        splits = [module.weight_split for module in modules]
        self.high = neighbours([split.data for split in splits])
        if self.high is None:
            self.high = torch.cat([split.data for split in splits])
            make_views(splits, self.high)
        ends = list(accumulate(map(len, splits)))
        self.rows = {"outputs": [module.out_features for module in modules], "begins": [0, *ends[:-1]]}

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` with both parts, or at LOW bits of weights with the low one, 0: the switch's."""
        asked = filled(bits, self.own)
        how = {"how": self.how, "activation_bits": asked.activation}
        if asked.weight == LOW.weight:
            return ops.zipper_low_linear(x, *self.tiles, self.out_features, self.bias, **how)
        pending = begun(x, self.hosts) if self.hosts else None
        low = ops.zipper_low_sums(x, *self.tiles, self.out_features, **how)
        if self.hosts:
            return zipper_host_linear(x, low, pending, self.bias)
        return ops.zipper_high_joined(x, low, self.high, self.bias, **self.rows)
