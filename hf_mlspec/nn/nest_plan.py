"""What of a model can be nested, and why does the rest stay as it is?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from ..formats.nested import BLOCK
from ..ops.nested.tiles_cuda import LARGEST_SCALE
from .adapters import of_adapters
from .castable import listed, part_of_experts, unfit, unfit_linear
from .coded_embedding import is_table
from .expert_modules import ExpertModule, is_experts
from .linear import is_dense
from .shards import is_sharded, local, unfit_part
from .transforms import TransformedLinear

TOO_LARGE = 2.0 ** (LARGEST_SCALE + 1 - 127)  # the least magnitude whose block the tiles of a GPU refuse: 2^32


@dataclass
class Plan:
    """What will be nested: every path of every linear, by the first; tables: of an embedding tied to one, its paths by
    that linear's first path. experts: every path of modules of experts, by the first. kept: what stays as it is, and
    why."""

    paths: dict[str, list[str]] = field(default_factory=dict)
    experts: dict[str, list[str]] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def plan_of(model: nn.Module, kept: Iterable[str] = ()) -> Plan:
    """What of ``model`` can be nested; ``kept``: paths that are to stay as they are."""
    plan = Plan(kept=dict(unfit(model, BLOCK)))
    chosen, first = set(kept), {}
    owners, left_out = _owners(model), of_adapters(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TransformedLinear):
            plan.kept[path] = "it transforms its inputs"
        if id(module) in left_out or path in chosen:
            continue
        if is_experts(module) and path not in plan.kept:
            if why := _unfit_experts(module, path, owners):
                plan.kept[path] = why
            else:
                plan.experts.setdefault(first.setdefault(id(module), path), []).append(path)
        if not is_dense(module) or unfit_linear(module, BLOCK):
            continue
        if why := _unfit(module, owners) or unfit_part(model, path, module, BLOCK):
            plan.kept[path] = why
            continue
        name = first.setdefault(id(module), path)
        plan.paths.setdefault(name, []).append(path)
        if tables := _tables(model, module.weight):
            plan.tables[name] = tables
    return plan


def _unfit_experts(experts: nn.Module, path: str, owners: dict[int, list[nn.Module]]) -> str | None:
    """Why experts that blocks of 32 divide are not nested."""
    for key in ExpertModule.of(part_of_experts(experts), path).sizes:
        weight = getattr(experts, key)
        if weight.dtype != torch.bfloat16:
            return f"its {key} is {weight.dtype}"
        if not weight.is_meta and TOO_LARGE <= _largest(weight.detach()) < float("inf"):
            return f"its {key} holds a value of 2^32 or larger, which the kernels of GPUs do not take"
        others = [module for module in owners.get(id(weight), ()) if module is not experts]
        if others:
            return f"its {key} is shared with a {type(others[0]).__name__}"
    return None


def _tables(model: nn.Module, weight: nn.Parameter) -> list[str]:
    modules = model.named_modules(remove_duplicate=False)
    return [path for path, module in modules if is_table(module) and module.weight is weight]


def nothing_to_nest(model: nn.Module, plan: Plan) -> str:
    """What an error says of a model without any weight that can be nested."""
    dtypes = {module.weight.dtype for module in model.modules() if is_dense(module)}
    if dtypes == {torch.float16}:
        why = (
            "its weights are torch.float16, whose 5-bit exponent leaves two bits to tell a draft's magnitudes apart; "
            "convert it with model.to(torch.bfloat16), which rounds its weights"
        )
    elif dtypes and torch.bfloat16 not in dtypes:
        why = f"its weights are {', '.join(map(str, dtypes))}; load it with dtype=torch.bfloat16"
    else:
        why = f"what there is stays as it is: {listed(plan.kept) or 'no nn.Linear at all'}"
    return f"nest: {type(model).__name__} holds no bfloat16 nn.Linear that can be nested: {why}"


def _unfit(linear: nn.Module, owners: dict[int, list[nn.Module]]) -> str | None:
    """Why a linear that blocks of 32 divide is not nested."""
    if id(linear.weight) not in owners:
        return "its weight is computed from other parameters"  # pruned or parametrized
    if linear.weight.dtype != torch.bfloat16:
        return f"its weight is {linear.weight.dtype}"
    if not linear.weight.is_meta and TOO_LARGE <= _largest(linear.weight.detach()) < float("inf"):
        return "it holds a value of 2^32 or larger, which the kernels of GPUs do not take"
    others = [module for module in owners[id(linear.weight)] if module is not linear]
    if others and is_sharded(linear):
        return "it is tied to a table, and processes share it"
    odd = [module for module in others if not is_table(module)] or others[1:]
    return f"its weight is shared with a {type(odd[0]).__name__}" if odd else None


def _largest(weight: torch.Tensor) -> float:
    weight = local(weight)
    return max(abs(float(end)) for end in torch.aminmax(weight))


def _owners(model: nn.Module) -> dict[int, list[nn.Module]]:
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(module)
    return found
