"""Which weights of a model can be cast to fewer bits or nested, and why can the others not?"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator

import torch
from torch import nn

from ..formats import mxfp4
from .adapters import adapted_names, of_adapters
from .expert_modules import ExpertModule, is_experts
from .hooks import offloads, own_tensor, without_memory
from .linear import is_dense
from .nested_experts import NestedExperts
from .packed import PackedLinear, PackedModule
from .settings import own_settings, packs_weights
from .shards import is_sharded, local, local_experts, shards
from .transforms import NONE, TransformedLinear

_SHOWN = 8  # layers in a message


def is_nested(module: nn.Module) -> bool:
    """Whether a module is a linear whose exact BF16 weight holds its own draft."""
    return isinstance(module, PackedLinear) and module.format == "nested"


def holds_draft(module: nn.Module) -> bool:
    """Whether a module is a nested linear, or holds nested experts."""
    return is_nested(module) or isinstance(module, NestedExperts)


def has_dense_weight(module: nn.Module) -> bool:
    """Whether a module multiplies its inputs, as they are or transformed, by a weight that can be cast."""
    return is_dense(module) or isinstance(module, TransformedLinear)


def dense_weight(linear: nn.Module) -> torch.Tensor:
    """``[out, in]``: an nn.Linear's own weight, or the exact BF16 weight of a nested one, joined."""
    return linear.dequantized(torch.bfloat16) if is_nested(linear) else own_tensor(linear, "weight").detach()


def require_dense(
    model: nn.Module, action: str = "direct_cast", *,
    adapters: bool = False, or_sharded: bool = False, or_offloaded: bool = False,
) -> None:  # fmt: skip
    """ValueError for a quantized model (a nested one is as good as dense), one with adapters unless ``adapters``, or
    one whose weights are not in this process's memory. ``action`` opens the message. or_sharded: processes may share
    them. or_offloaded: accelerate may bring them for every call."""
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    quantization = getattr(model.config, "quantization_config", None)
    quantized = quantization is not None or getattr(model, "hf_quantizer", None) is not None
    own = own_settings(model)
    quantized &= packs_weights(own) or not own
    if (quantized or packed) and not (packed and all(map(holds_draft, packed))):
        method = getattr(quantization, "quant_method", None) or type(getattr(model, "hf_quantizer", None)).__name__
        raise ValueError(
            f"{action}: the model is already quantized ({method}); load the original floating-point checkpoint"
        )
    require_plain_inputs(model, action)
    adapted = adapted_names(model)
    if adapted and not adapters:
        raise ValueError(
            f"{action}: {len(adapted)} layers carry adapters, the first is {adapted[0]}: merge them first "
            "(peft: model.merge_and_unload())"
        )
    everywhere = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    offloaded = without_memory(model) if or_offloaded else everywhere
    if offloaded:
        raise ValueError(
            f"{action}: {len(offloaded)} parameters are on the meta device (offloaded or not loaded), the first is "
            f"{offloaded[0]}: load the model whole, without disk or CPU offload"
        )
    sharded = [] if or_sharded else shards(model)
    if sharded:
        raise ValueError(
            f"{action}: {len(sharded)} parameters are sharded over processes (DTensor), the first is {sharded[0]}: "
            "load the model without tp_plan"
        )


def require_plain_inputs(model: nn.Module, action: str, *, or_dense: bool = False) -> None:
    """ValueError naming a packed layer that transforms its inputs: its weight alone is not what it computes.

    or_dense: one passes that a dense weight can do without.
    """
    for name, module in model.named_modules():
        if not isinstance(module, PackedLinear) or module.transform is NONE:
            continue
        if not or_dense or module.transform.plain is None:
            raise ValueError(
                f"{action}: {name} transforms its inputs ({module.transform.word}), which other weight formats "
                "cannot represent: start from the original model"
            )


def linears_and_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every path of every plain nn.Linear (a subclass computes something else and stays), nested linear, linear that
    transforms its inputs, and module of experts; not those of adapters."""
    left_out = of_adapters(model)
    for name, module in model.named_modules(remove_duplicate=False):
        fits = has_dense_weight(module) or holds_draft(module) or is_experts(module)
        if fits and id(module) not in left_out:
            yield name, module


def unfit(model: nn.Module, divisor: int = mxfp4.BLOCK, experts: bool = True) -> Iterator[tuple[str, str]]:
    """Paths of the weights that cannot be cast, and why: ``divisor`` does not divide their in_features, or nothing
    computes them. experts False: no module of experts can be cast."""
    understood, left_out = [], of_adapters(model)
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in left_out:
            continue
        if is_experts(module):
            why = _unfit_experts(module, divisor) if experts else "fused expert weights"
            understood.append(name)
        elif isinstance(module, NestedExperts):
            odd = [size for _, size in module.original.sizes.values() if size % divisor]
            why = None if experts and not odd else "nested experts"
            understood.append(name)
        else:
            why = unfit_linear(module, divisor)
            understood += [name] if is_nested(module) else []  # whose tiles have three axes, too
        why = why or _read_directly(model, name, module)
        if why:
            yield name, why
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "expert" in name and name.rpartition(".")[0] not in understood:
            yield name, "fused expert weights"


def _read_directly(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """Why a linear stays: recurrent layers read the weights of some, and models that keep a state that of their head,
    where others call the layer; a router asks its linear's weight for its dtype (HunYuan)."""
    parent, _, own = name.rpartition(".")
    if not isinstance(module, nn.Linear):
        return None
    reader, stateful = type(model.get_submodule(parent)), getattr(model, "_is_stateful", False)
    read = own in _weights_read(reader, "" if stateful else r"\.dtype")
    return f"{reader.__name__} reads its weight itself" if read else None


@functools.lru_cache(maxsize=256)
def _weights_read(kind: type[nn.Module], what: str) -> frozenset[str]:
    """Children whose weight the forward of a module, or a method with forward in its name, reads where it is not in
    training. what: a pattern, of the weight, "" for the weight."""
    try:
        bodies = [textwrap.dedent(inspect.getsource(body)) for name, body in vars(kind).items() if "forward" in name]
    except (OSError, TypeError):  # no source: nothing is known
        return frozenset()
    read = "".join(ast.unparse(_InInference().visit(ast.parse(body))) for body in bodies)
    return frozenset(re.findall(rf"self\.(\w+)\.weight\b{what}", read))


class _InInference(ast.NodeTransformer):
    """Code without what runs in training alone, which packed weights have no part in."""

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        test = node.test
        needed = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        if any(ast.unparse(one) == "self.training" for one in needed):
            node.body = [ast.Pass()]
        return node


def unfit_linear(module: nn.Module, divisor: int = mxfp4.BLOCK) -> str | None:
    """Why a linear layer cannot be cast; None for one that can, and for what is no linear layer."""
    if has_dense_weight(module) or is_nested(module):
        if not module.in_features or not module.out_features:
            return "it has no weights"
        odd = module.in_features % divisor
        return f"in_features {module.in_features} is no multiple of {divisor}" if odd else None
    return type(module).__name__ if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" else None


def part_of_experts(module: nn.Module) -> nn.Module:
    """What this process has of experts."""
    return local_experts(module) if is_sharded(module) else module


def _unfit_experts(module: nn.Module, divisor: int) -> str | None:
    module = part_of_experts(module)
    why = "they are offloaded" if offloads(module) else ExpertModule.obstacle(module)
    if why is not None:
        return f"fused expert weights: {why}"
    for key, (_, in_features) in ExpertModule.of(module, "").sizes.items():
        if in_features % divisor:
            return f"in_features {in_features} of its {key} is no multiple of {divisor}"
    return None


def require_finite_floats(model: nn.Module, kept: dict[str, str], action: str = "direct_cast") -> None:
    """TypeError for a weight whose dtype cannot be cast, ValueError for NaN or Inf; weights in ``kept`` and nested
    ones (which hold neither) are left out."""
    for name, module in linears_and_experts(model):
        if name in kept or holds_draft(module):
            continue
        own = part_of_experts(module) if is_experts(module) else module
        for key in ExpertModule.of(own, name).sizes if is_experts(module) else ("weight",):
            require_finite_float(f"{name}.{key}", local(own_tensor(module, key).detach()), action)


def require_finite_float(name: str, weight: torch.Tensor, action: str) -> None:
    """TypeError for integers and float64, ValueError for NaN or Inf, naming the tensor, and the expert of one of three
    axes."""
    if weight.dtype not in mxfp4.INPUT_DTYPES:
        raise TypeError(f"{action}: {name} is {weight.dtype}, only float32, bfloat16 and float16 can be cast")
    low, high = torch.aminmax(weight)  # NaN propagates into both
    if not (torch.isfinite(low) and torch.isfinite(high)):
        if weight.ndim == 3:
            expert = int((~torch.isfinite(weight.flatten(1)).all(dim=1)).nonzero()[0])
            return require_finite_float(f"{name} of expert {expert}", weight[expert], action)
        bad = int((~torch.isfinite(weight)).sum())
        raise ValueError(
            f"{action}: {name} holds {bad} NaN or Inf among {weight.numel()} values; repair the checkpoint"
        )


def listed(kept: dict[str, str]) -> str:
    """Names with the reasons why they were kept, as many as a message holds."""
    shown = [f"{name} ({why})" for name, why in list(kept.items())[:_SHOWN]]
    return ", ".join(shown) + (f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else "")
