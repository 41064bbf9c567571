"""Which weights of a model can be cast to 4 bits, and why can the others not?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..formats import mxfp4
from .expert_modules import ExpertModule, is_experts
from .linear import is_dense


def require_dense(model: nn.Module) -> None:
    """ValueError for a quantized model, one with adapters, or one whose weights are not in memory."""
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None or getattr(model, "hf_quantizer", None) is not None:
        method = getattr(quantization, "quant_method", None) or type(model.hf_quantizer).__name__
        raise ValueError(
            f"direct_cast: the model is already quantized ({method}); load the original floating-point checkpoint"
        )
    adapted = [name for name, module in model.named_modules() if hasattr(module, "base_layer")]
    if adapted:
        raise ValueError(
            f"direct_cast: {len(adapted)} layers carry adapters, the first is {adapted[0]}: merge them first "
            "(peft: model.merge_and_unload())"
        )
    offloaded = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if offloaded:
        raise ValueError(
            f"direct_cast: {len(offloaded)} parameters are on the meta device (offloaded or not loaded), the first is "
            f"{offloaded[0]}: load the model whole, without disk or CPU offload"
        )


def linears_and_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every path of every plain nn.Linear (a subclass computes something else and stays) and module of experts."""
    for name, module in model.named_modules(remove_duplicate=False):
        if is_dense(module) or is_experts(module):
            yield name, module


def unfit(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Paths of the weights that cannot be cast, and why."""
    understood = []
    for name, module in model.named_modules(remove_duplicate=False):
        why = _unfit_experts(module) if is_experts(module) else _unfit_linear(module)
        if why:
            yield name, why
        if is_experts(module):
            understood.append(name)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "expert" in name and name.rpartition(".")[0] not in understood:
            yield name, "fused expert weights"


def _unfit_linear(module: nn.Module) -> str | None:
    if is_dense(module):
        odd = module.in_features % mxfp4.BLOCK
        return f"in_features {module.in_features} is no multiple of {mxfp4.BLOCK}" if odd else None
    return type(module).__name__ if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" else None


def _unfit_experts(module: nn.Module) -> str | None:
    why = ExpertModule.obstacle(module)
    if why is not None:
        return f"fused expert weights: {why}"
    for key, (_, in_features) in ExpertModule.of(module, "").sizes.items():
        if in_features % mxfp4.BLOCK:
            return f"in_features {in_features} of its {key} is no multiple of {mxfp4.BLOCK}"
    return None


def require_finite_floats(model: nn.Module, kept: dict[str, str]) -> None:
    """TypeError for a weight whose dtype cannot be cast, ValueError for NaN or Inf; weights in ``kept`` are left out.
    """
    for name, module in linears_and_experts(model):
        if name in kept:
            continue
        keys = ExpertModule.of(module, name).sizes if is_experts(module) else ("weight",)
        for key in keys:
            _require_finite_float(f"{name}.{key}", getattr(module, key).detach())


def _require_finite_float(name: str, weight: torch.Tensor) -> None:
    if weight.dtype not in mxfp4.INPUT_DTYPES:
        raise TypeError(f"direct_cast: {name} is {weight.dtype}, only float32, bfloat16 and float16 can be cast")
    low, high = torch.aminmax(weight)  # NaN propagates into both
    if not (torch.isfinite(low) and torch.isfinite(high)):
        bad = int((~torch.isfinite(weight)).sum())
        raise ValueError(
            f"direct_cast: {name} holds {bad} NaN or Inf among {weight.numel()} values; repair the checkpoint"
        )
