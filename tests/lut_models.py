"""What is a tiny model whose linears are lookup-table planes? One whose tables hold means of its own weights."""

from __future__ import annotations

import torch
from anyprecision_files import nested_codes
from torch import nn

from hf_mlspec.formats import LutWeight
from hf_mlspec.nn.lut import LutLinear
from hf_mlspec.nn.switch import PrecisionSwitch


def lut_packed(model: nn.Module, stored: int, least: int, keep_head: bool = True) -> nn.Module:
    """The model itself, its linears with tables of ``least`` to ``stored`` bits, called by one switch."""
    switch = PrecisionSwitch("lut", num_planes=stored, least_planes=least)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not (keep_head and module is head):
            weight = lut_of(module.weight.detach(), stored, least)
            model.set_submodule(name, LutLinear(weight, module.bias, switch).eval())
    return model


def lut_of(weight: torch.Tensor, stored: int, least: int) -> LutWeight:
    codes, tables = nested_codes(weight, stored, least)
    places = torch.arange(8)
    planes = [((codes >> stored - 1 - p & 1).unflatten(1, (-1, 8)) << places).sum(-1) for p in range(stored)]
    return LutWeight(torch.stack(planes).to(torch.uint8), torch.cat([tables[bits] for bits in sorted(tables)], 1))
