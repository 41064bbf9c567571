"""What does one of transformers' modules of experts hold, and is it one that can be packed?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..formats import FORMATS

_PROJECTIONS = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})
# What transformers' use_experts_implementation sets on every module that keeps its contract: project up, gate, project
# down, weight by the routing, sum.
_CONTRACT = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
# Not carried over: the state of nn.Module itself, accelerate's hook, which is bound to one module, and packing's own.
_NOT_CARRIED = {
    *vars(nn.Module()),
    *("forward", "_old_forward", "_hf_hook"),
    "_hf_quantized_needs_local_tp",
    *("switch", "format", "names", "original", "options"),
}


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds its experts as 3-D parameters, gate_up_proj or up_proj, and down_proj."""
    return set(_three_axes(module)) in _PROJECTIONS


@dataclass(frozen=True)
class ExpertModule:
    """What a module of experts is, whatever its weights are held in."""

    kind: type[nn.Module]
    num_experts: int
    transposed: bool  # [experts, in, out] where others have [experts, out, in]
    sizes: dict[str, tuple[int, int]]  # (out, in) of each projection, the one upwards first

    @classmethod
    def of(cls, module: nn.Module, name: str) -> ExpertModule:
        """ValueError naming ``name`` and the reason when the module is not understood."""
        why = cls.obstacle(module)
        if why is not None:
            raise ValueError(
                f"{name}: {type(module).__name__} is no module of experts that can be packed ({why}); keep it in 16 "
                "bits"
            )
        sizes = _sizes(module)
        return cls(type(module), module.down_proj.shape[0], module.is_transposed, sizes)

    @staticmethod
    def obstacle(module: nn.Module) -> str | None:
        """Why a module is not understood; None where it is."""
        shapes = _three_axes(module)
        if set(shapes) not in _PROJECTIONS:
            return f"its 3-D parameters are {shapes or 'none'}"
        missing = [key for key in _CONTRACT if not hasattr(module, key)]
        if missing:
            return f"it has no {', '.join(missing)}, which use_experts_implementation would set"
        if "forward" in vars(module) and "_hf_hook" not in vars(module):
            return "its forward was replaced"
        keys = _projections(module)
        known = {*keys, *((f"{key}_bias" for key in keys) if module.has_bias else ())}
        held = {key for key, parameter in module._parameters.items() if parameter is not None}
        if held != known:
            return f"it holds {sorted(held)}, expected {sorted(known)}"
        (up, hidden), (out, inner) = _sizes(module).values()
        if out != hidden or up != (2 * inner if module.has_gate else inner):
            return f"the shapes of its projections, {shapes}, do not fit together"
        return None

    def carry_over(self, source: nn.Module, target: nn.Module) -> None:
        """Give ``target`` what ``source`` has beside its projections: biases, norms, the gating, every attribute."""
        parts = {f"_{part}" for record in FORMATS.values() if record.experts for part in record.parts}
        own = {f"{key}{tensor}" for key in self.sizes for tensor in {"", "_dense", *parts}}
        vars(target).update({key: value for key, value in vars(source).items() if key not in _NOT_CARRIED})
        for key, module in source._modules.items():
            target.add_module(key, module)
        for key, parameter in source._parameters.items():
            if key not in own:
                target.register_parameter(key, parameter)
        for key, buffer in source._buffers.items():
            if key not in own:
                target.register_buffer(key, buffer, persistent=key not in source._non_persistent_buffers_set)


@torch.no_grad()
def out_major(weight: nn.Parameter) -> torch.Tensor:
    """``[experts, out, in]`` of a parameter ``[experts, in, out]``, which is a view of it from then on."""
    whole = weight.detach().transpose(1, 2)
    if not whole.is_contiguous():
        with torch.inference_mode(False):
            whole = whole.contiguous()
            weight.data = whole.transpose(1, 2)
    return whole


def _three_axes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(p.shape) for key, p in module._parameters.items() if p is not None and p.ndim == 3}


def _projections(module: nn.Module) -> tuple[str, str]:
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def _sizes(module: nn.Module) -> dict[str, tuple[int, int]]:
    shapes = {key: tuple(getattr(module, key).shape[1:]) for key in _projections(module)}
    return {key: shape[::-1] if module.is_transposed else shape for key, shape in shapes.items()}
