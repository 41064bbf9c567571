"""How does a loss reach the choice of a width? Every weight is the mean of its prefixes, weighted by the softmax.

W(q) = sum_b p_b(q) W^(b), of QAQ, section 3. The prefixes are dequantized for one layer at a time, forward and again
backward; nothing of the size of the dense model is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..nn.planes import PlanesLinear
from ..nn.transforms import NONE
from .blocks import Block
from .features import pooled
from .passes import in_blocks
from .router import Router

KEPT_BYTES = 1 << 30  # prefixes of models up to this stay dequantized


class Prefixes:
    """The dequantized prefixes of linears, float32 ``[widths, out, in]``; of small models they are kept."""

    def __init__(self, blocks: Sequence[Block], widths: Sequence[int]):
        self.widths = widths
        self.keeps = sum(block.weights for block in blocks) * len(widths) * 4 <= KEPT_BYTES
        self._kept: dict[PlanesLinear, Tensor] = {}

    @torch.no_grad()
    def of(self, linear: PlanesLinear) -> Tensor:
        found = self._kept.get(linear)
        if found is None:
            weight = linear.packed_weight()
            found = torch.stack([weight.dequantize(torch.float32, width) for width in self.widths])
            if self.keeps:
                self._kept[linear] = found
        return found


class _Mixed(torch.autograd.Function):
    """float32 x ``[rows, tokens, in]``, p ``[rows, widths]`` -> ``[rows, tokens, out]``."""

    @staticmethod
    def forward(ctx, x: Tensor, p: Tensor, linear: PlanesLinear, prefixes: Prefixes) -> Tensor:
        ctx.save_for_backward(x, p)
        ctx.linear, ctx.prefixes = linear, prefixes
        return torch.bmm(x, _mean(prefixes.of(linear), p).mT)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, p = ctx.saved_tensors
        prefixes = ctx.prefixes.of(ctx.linear)
        of_mean = torch.bmm(grad.mT, x)  # [rows, out, in]
        of_p = of_mean.flatten(1) @ prefixes.flatten(1).T
        return torch.bmm(grad, _mean(prefixes, p)), of_p, None, None


def _mean(prefixes: Tensor, p: Tensor) -> Tensor:
    return (p @ prefixes.flatten(1)).unflatten(1, prefixes.shape[1:])


class Mixture:
    """One pass of a batch, softly routed: every block's probabilities ``[rows, widths]`` afterwards."""

    def __init__(self, router: Router, blocks: Sequence[Block], prefixes: Prefixes):
        self.router, self.blocks, self.prefixes = router, list(blocks), prefixes
        self.probabilities: dict[int, Tensor] = {}

    @contextmanager
    def over(self, model: nn.Module, lengths: list[int]) -> Iterator[Mixture]:
        """The pass inside multiplies by mixtures; lengths: tokens of each row's query."""
        self.probabilities = {}

        def product(place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
            if place not in self.probabilities:
                features = pooled(x.detach(), lengths, self.blocks[place].name)
                self.probabilities[place] = self.router.probabilities(place, features)
            return self.product(place, linear, x)

        with in_blocks(model, self.blocks, product):
            yield self

    def product(self, place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
        """``[rows, tokens, in]`` times the mixture of a layer of block ``place`` -> ``[rows, tokens, out]``."""
        if linear.transform is not NONE:
            x = linear.transform.apply(x, linear.transform_tensors())
        y = _Mixed.apply(x.float(), self.probabilities[place], linear, self.prefixes)
        return (y if linear.bias is None else y + linear.bias).to(x.dtype)

    def bits(self) -> Tensor:
        """float32 ``[rows]``: expected bits of a weight."""
        widths = torch.tensor(self.router.widths, dtype=torch.float32, device=self.probabilities[0].device)
        total = sum(block.weights for block in self.blocks)
        return sum((p @ widths) * (self.blocks[place].weights / total) for place, p in self.probabilities.items())
