"""What stands in a model for the experts of a gpt-oss checkpoint while it loads, and what becomes of them?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...checkpoints.gpt_oss import expert_tensors, read_experts
from ...checkpoints.layer import Stored, StoredLayer
from ...nn.expert_modules import ExpertModule
from ...nn.experts import PackedExperts
from ...nn.switch import PrecisionSwitch

MXFP4 = "mxfp4"
ENDS = ("blocks", "scales")


class SourceExperts(nn.Module):
    """The experts of a layer whose projections are as the files have them, only while they load. Everything else is
    the module's that it stands for."""

    def __init__(self, module: nn.Module, name: str, tensors: Mapping[str, Mapping[str, Stored]]) -> None:
        super().__init__()
        self.original = ExpertModule.of(module, name)
        self.original.carry_over(module, self)
        for tensor_name, stored in (entry for own in tensors.values() for entry in own.items()):
            empty = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            self.register_parameter(tensor_name, nn.Parameter(empty, requires_grad=False))
        self.train(module.training)

    def packed(self, name: str, switch: PrecisionSwitch) -> PackedExperts:
        """The packed module of what was loaded: the same memory."""
        loaded = {}
        for key in self.original.sizes:
            loaded[key] = read_experts(*(self._parameters.pop(f"{key}_{end}").detach() for end in ENDS))
        module = self.original.kind.__new__(self.original.kind)
        nn.Module.__init__(module)
        self.original.carry_over(self, module)
        for key, (out, inputs) in self.original.sizes.items():
            shape = (inputs, out) if self.original.transposed else (out, inputs)
            wide = torch.empty(self.original.num_experts, *shape, device="meta")
            module.register_parameter(key, nn.Parameter(wide, requires_grad=False))
        experts = PackedExperts(module.train(self.training), MXFP4, switch, name)
        for key, parts in loaded.items():
            experts._register_parts(key, parts)
        return experts


def source_experts(name: str, module: nn.Module, tensors: Mapping[str, Stored]) -> SourceExperts | None:
    """What stands for a module of experts, still without memory; None where the files have its own projections.
    ValueError or TypeError naming what does not fit."""
    if ExpertModule.obstacle(module) is not None:
        return None
    original = ExpertModule.of(module, name)
    found = {
        key: expert_tensors(StoredLayer(name, inputs, out, tensors), key, original.num_experts)
        for key, (out, inputs) in original.sizes.items()
    }
    return SourceExperts(module, name, found) if all(found.values()) else None
