"""How does the CUDA decoder multiply planes that are streamed? Top ones where they stay, others as they come.

A product that reads top planes alone only enqueues, over tiles that stay where they are, so that a graph can hold it.
One that reads low planes, too, asks their source for them, module by module, with the bits of one joined weight; where
those lie in pinned memory, a graph that is captured holds the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ...nn.planes import PlanesLinear
from ...precision import Bits


class StreamedPlanesLinear:
    """Modules that read the same inputs, all planes from one `PlaneSource`. resident: planes that are always there.

    tops: their top planes, joined where tiles allow it, else of each: (plane_tiles, scale_tiles, outputs, bias).
    """

    __slots__ = ("biases", "how", "modules", "out_features", "own", "resident", "source", "tops")
    extra_bytes = 0

    def __init__(self, modules: Sequence[PlanesLinear], bias: Tensor | None):
        first, self.modules = modules[0], modules
        outputs = [module.out_features for module in modules]
        self.out_features, self.own = sum(outputs), first.switch.bits
        self.biases = [None] * len(modules) if bias is None else list(bias.split(outputs))
        self.how = {"group_size": first.group_size, "zero_doubled": first.zero_doubled}
        self.how |= {"total_planes": first.num_planes, "outputs_of_weight": self.out_features}
        self.source, self.resident = first.source, first.source.top
        pieces = self.source.resident(modules)
        biases = [bias] if len(pieces) == 1 else self.biases
        self.tops = [(*piece, own) for piece, own in zip(pieces, biases, strict=True)]

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` with as many planes as bits.weight says, 0: the switch's. PlaneError where one
        cannot be had."""
        count = bits.weight or self.own.weight
        if count <= self.resident:
            parts = [ops.bitplane_linear(x, *top, **self.how, num_planes=count) for top in self.tops]
        else:
            parts = [self._fetched(x, *which, count) for which in zip(self.modules, self.biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def chosen(self, x: Tensor, widths: Tensor, likely: int) -> Tensor:
        """The same with as many planes as int32 ``widths`` on the device says, ``likely`` at most: where it says more,
        the outputs have no meaning. PlaneError as above."""
        if likely <= self.resident:
            parts = [ops.bitplane_chosen(x, *own[:2], widths, *own[2:], **self.how) for own in self.tops]
        else:
            pairs = zip(self.modules, self.biases, strict=True)
            parts = [self._fetched_chosen(x, widths, *which, likely) for which in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _fetched_chosen(
        self, x: Tensor, widths: Tensor, module: PlanesLinear, bias: Tensor | None, count: int
    ) -> Tensor:
        with self.source.reading(module, count) as tiles:
            how = {**self.how, "apart": tiles[2:]}
            return ops.bitplane_chosen(x, *tiles[:2], widths, module.out_features, bias, **how)

    def _fetched(self, x: Tensor, module: PlanesLinear, bias: Tensor | None, count: int) -> Tensor:
        with self.source.reading(module, count) as tiles:
            apart = tiles[2:]
            return ops.bitplane_linear(
                x, *tiles[:2], module.out_features, bias, **self.how, num_planes=count, apart=apart
            )
