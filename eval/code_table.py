"""What does an embedding take whose rows are codes?"""

from __future__ import annotations

import torch
from torch import nn

from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import to_codes


class CodeTable(nn.Module):
    """An embedding whose rows are looked up in the codes of a weight and one scale a row, without planes that are 0 in
    all of them: those of mode "paper" lack the last. For measuring: no decoder of the package reads it."""

    def __init__(self, table: nn.Embedding, mode: str):
        super().__init__()
        weight = ZipperWeight.from_dense(table.weight.detach(), mode=mode)
        self.bits, self.dtype = len(weight.weight_planes), table.weight.dtype
        kept = self.bits - int(not weight.weight_planes[-1].any())
        self.planes = nn.Parameter(weight.weight_planes[:kept].transpose(0, 1).contiguous(), requires_grad=False)
        self.scale = nn.Parameter(weight.weight_scale, requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Integers of any shape -> ``[..., width]``."""
        planes = self.planes[ids.flatten()].transpose(0, 1)
        absent = planes.new_zeros(self.bits - len(planes), *planes.shape[1:])
        codes = to_codes(torch.cat([planes, absent]))
        return (codes * self.scale[ids.flatten()].float()).to(self.dtype).view(*ids.shape, -1)
