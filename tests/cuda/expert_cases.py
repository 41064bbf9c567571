"""Experts of every format on a GPU, and what their rows multiply to in float64."""

from __future__ import annotations

import torch
from linear_cases import DEVICE, Format
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.formats import activations, int4, mxfp4
from hf_mlspec.ops.expert_plans import plan_of

FORMATS = (
    Format("bf16"),
    Format("mxfp4-a16", 16, mxfp4.BLOCK, mxfp4=True),
    Format("mxfp4-a8", 8, mxfp4.BLOCK, mxfp4=True),
    *(Format(f"int4-g{size}{'z' if zeros else ''}-a{bits}", bits, size, zeros)
      for size in (32, 64, 128) for zeros, bits in ((False, 16), (True, 8), (True, 16), (False, 4))),
)  # fmt: skip


class ExpertCase:
    """Weights ``[count, out, in]`` of a format: the op that multiplies with them, and the exact products."""

    def __init__(self, form: Format, count: int, out: int, size: int, rows: int):
        draw = torch.Generator(DEVICE).manual_seed(out * size + count)
        self.format, self.out, self.count = form, out, count
        weight = torch.randn(count, out, size, generator=draw, device=DEVICE) / size**0.5
        weight *= torch.logspace(-2, 2, count, device=DEVICE)[:, None, None]  # each expert its own scales
        self.x = torch.randn(rows, size, generator=draw, device=DEVICE).bfloat16()
        if not form.group_size:
            self.dense, self.tiles = weight.bfloat16(), None
            return
        dense, tiles = [], []
        for own in weight:
            if form.mxfp4:
                packed, scale = mxfp4.quantize(own)
                dense.append(mxfp4.dequantize(packed, scale, torch.float32))
                tiles.append(ops.prepack_mxfp4(packed, scale))
            else:
                parts = int4.quantize(own, form.group_size, symmetric=not form.zeros)
                dense.append(int4.dequantize(*parts))
                tiles.append(ops.prepack_int4(*parts))
        self.dense = torch.stack(dense)
        self.tiles = [None if parts[0] is None else torch.stack(parts) for parts in zip(*tiles, strict=True)]

    def multiply(
        self, x: Tensor, experts: Tensor, plan: Tensor | None = None, bias: Tensor | None = None,
        clamp: tuple[float, ...] = (),
    ) -> Tensor:  # fmt: skip
        """plan None: that of plain torch. bias ``[count, out]``, float32 or bfloat16. clamp: slope and limit."""
        form, plan = self.format, plan_of(experts, self.count) if plan is None else plan
        if self.tiles is None:
            return ops.dense_expert_rows(x, self.dense, bias, experts, plan, *clamp)
        if form.mxfp4:
            return ops.mxfp4_expert_rows(x, *self.tiles, bias, experts, plan, self.out, form.bits, *clamp)
        how = self.out, form.group_size, form.bits, 1.0, *clamp
        return ops.int4_expert_rows(x, *self.tiles, bias, experts, plan, *how)

    def exact(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """float64 ``[pairs, out]``: the products, and the sums of the magnitudes that they are made of."""
        wide = x.double()
        if self.format.bits != 16:
            size = self.format.group_size
            wide = activations.dequantize_rows(*activations.quantize_rows(x, size, self.format.bits), size).double()
        pairs = experts.flatten().long()
        wide = wide.repeat_interleave(len(pairs) // len(x), dim=0)
        products, magnitudes = wide.new_empty(len(pairs), self.out), wide.new_empty(len(pairs), self.out)
        for expert in pairs.unique().tolist():
            own, weight = pairs == expert, self.dense[expert].double()
            products[own], magnitudes[own] = wide[own] @ weight.T, wide[own].abs() @ weight.abs().T
        return products, magnitudes


def some_experts(tokens: int, count: int, chosen: int, seed: int = 3) -> Tensor:
    """int32 ``[tokens, chosen]``, of each token different ones."""
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=draw)[:chosen] for _ in range(tokens)]).int().to(DEVICE)
