"""How does a loss reach the choice of a width? Every weight is the mean of its prefixes, weighted by the softmax.

W(q) = sum_b p_b(q) W^(b), of QAQ, section 3. The prefixes are dequantized for one layer at a time, forward and again
backward; nothing of the size of the dense model is kept. Where every step chooses, each token has a mixture of its
own: the outputs of all prefixes are weighted. A mixture errs less than the one prefix that it becomes, so a pass may
read the likeliest prefix instead, with the mixture's gradient (straight-through).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..nn.planes import PlanesLinear
from ..nn.transforms import NONE
from .blocks import Block
from .features import moved, pooled
from .passes import in_blocks
from .router import STEP, Router

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


def likeliest(p: Tensor) -> Tensor:
    """Probabilities ``[..., widths]`` -> 1 for the largest, the narrower of equal ones; the gradient is that of p."""
    return torch.zeros_like(p).scatter_(-1, p.argmax(-1, keepdim=True), 1.0) + (p - p.detach())


class Mixture:
    """One pass of a batch, softly routed: every block's probabilities ``[rows, widths]`` afterwards, or ``[rows,
    tokens, widths]`` where every step chooses. hard: 1 for the likeliest width, with their gradient."""

    hard = False

    def __init__(self, router: Router, blocks: Sequence[Block], prefixes: Prefixes):
        self.router, self.blocks, self.prefixes = router, list(blocks), prefixes
        self.probabilities: dict[int, Tensor] = {}

    @contextmanager
    def over(self, model: nn.Module, lengths: list[int]) -> Iterator[Mixture]:
        """The pass inside multiplies by mixtures; lengths: tokens of each row's query."""
        self.probabilities = {}

        def product(place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
            if place not in self.probabilities:
                p = self.router.probabilities(place, self.features(place, x, lengths))
                self.probabilities[place] = likeliest(p) if self.hard else p
            return self.product(place, linear, x)

        with in_blocks(model, self.blocks, product):
            yield self

    def features(self, place: int, x: Tensor, lengths: list[int]) -> Tensor:
        """What the router sees of ``[rows, tokens, features]``: of each row, or of each token, of a query's alike."""
        x, name = x.detach(), self.blocks[place].name
        means = pooled(x, lengths, name)
        if self.router.every != STEP:
            return means
        rows = [
            torch.cat([mean.expand(length, -1), moved(mean, own[length:], self.router.step_share, name)])
            for mean, own, length in zip(means, x, lengths, strict=True)
        ]
        return torch.stack(rows)

    def product(self, place: int, linear: PlanesLinear, x: Tensor) -> Tensor:
        """``[rows, tokens, in]`` times the mixture of a layer of block ``place`` -> ``[rows, tokens, out]``."""
        if linear.transform is not NONE:
            x = linear.transform.apply(x, linear.transform_tensors())
        p = self.probabilities[place]
        if p.dim() == 2:
            y = _Mixed.apply(x.float(), p, linear, self.prefixes)
        else:
            y = sum(p[..., at, None] * (x.float() @ own.T) for at, own in enumerate(self.prefixes.of(linear)))
        return (y if linear.bias is None else y + linear.bias).to(x.dtype)

    def bits(self) -> Tensor:
        """float32 ``[rows]``: expected bits of a weight."""
        widths = torch.tensor(self.router.widths, dtype=torch.float32, device=self.probabilities[0].device)
        total = sum(block.weights for block in self.blocks)
        each = {place: p if p.dim() == 2 else p.mean(1) for place, p in self.probabilities.items()}
        return sum((p @ widths) * (self.blocks[place].weights / total) for place, p in each.items())
