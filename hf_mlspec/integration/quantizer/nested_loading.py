"""What is special about loading and saving nested BF16?

Nothing is rounded, so that a model can be nested after it was loaded, its output head and the table tied to it
included; on disk that pair is the plain tensor it was.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...nn.castable import holds_draft, is_nested
from ...nn.expert_modules import is_experts
from ...nn.nest import kept_linears, nest_planned, tell_kept
from ...nn.nest_plan import nothing_to_nest, plan_of
from ...nn.nested import NestedEmbedding
from ...nn.nested_experts import NestedExperts
from .checkpoint import Checkpoint
from .config import MLSpecConfig
from .packing import choose_kept, switch_of

_INDEX, _VALUE = "_escape_index", "_escape_value"


def require_nestable(model: PreTrainedModel, config: MLSpecConfig) -> None:
    """Before a tensor is read: ValueError for another dtype than bfloat16, or patterns that fit no module."""
    if model.dtype != torch.bfloat16:
        raise ValueError(
            f"MLSpecConfig: format {config.format!r} nests bfloat16 weights, {type(model).__name__} is to be loaded "
            f"in {model.dtype}: load it with dtype=torch.bfloat16 (--dtype bfloat16), which rounds its weights"
        )
    choose_kept(model, config, [])


def nest_loaded(model: PreTrainedModel, config: MLSpecConfig) -> None:
    """Nest a model that was loaded; the config gets the names of what stays. ValueError for NaN or Inf (naming the
    tensor), for offloaded weights, or where nothing can be nested."""
    asked = choose_kept(model, config, [])
    plan = plan_of(model, asked)
    if asked and not plan.paths and not plan.experts and not plan.kept:
        raise ValueError(
            f"MLSpecConfig: skip_modules={config.skip_modules} keeps every nn.Linear of {type(model).__name__} plain, "
            f"all {len(asked)}: leave some to be nested, or load it without quantization_config"
        )
    nest_planned(model, plan, config.codebook, switch_of(config))
    if not any(map(holds_draft, model.modules())):
        raise ValueError(nothing_to_nest(model, plan))
    config.modules_to_not_convert = sorted({*asked, *kept_linears(model, plan)})
    tell_kept(model, plan)


def nest_tied(model: PreTrainedModel, config: MLSpecConfig) -> None:
    """Nest the output head of a loaded model together with the table it is tied to."""
    plan = plan_of(model, config.modules_to_not_convert)
    if plan.tables:
        plan.paths = {name: paths for name, paths in plan.paths.items() if name in plan.tables}
        plan.experts = {}
        switch = next((module.switch for module in model.modules() if holds_draft(module)), None)
        nest_planned(model, plan, config.codebook, switch or switch_of(config))


def tied_to_tables(model: PreTrainedModel) -> set[str]:
    """Names of the linears that are tied to an embedding."""
    tied = model.all_tied_weights_keys
    names = {name.removesuffix(".weight") for name in (*tied, *tied.values()) if name.endswith(".weight")}
    return {name for name in names if isinstance(model.get_submodule(name), nn.Linear)}


def plain_experts(model: PreTrainedModel, checkpoint: Checkpoint, part: str = "low") -> set[str]:
    """Names of the modules of experts that a checkpoint holds as they are, not nested. part: of other formats, one
    that experts in it have."""
    prefix = f"{model.base_model_prefix}."
    found = set()
    for name, module in model.named_modules():
        if is_experts(module):
            paths = name, prefix + name, name.removeprefix(prefix)
            keys = [f"{path}.{key}_{part}" for path in paths for key in ("gate_up_proj", "up_proj", "down_proj")]
            found |= set() if any(key in checkpoint.tensors for key in keys) else {name}
    return found


def escapes_of(checkpoint: Checkpoint) -> dict[str, int]:
    """How many escapes each nested weight has, by the weight's name (those of experts: by the projection's);
    ValueError where places and values differ in number or one of them is missing."""
    found = {}
    for name, index in checkpoint.tensors.items():
        end = next((end for end in (_INDEX, _VALUE) if name.endswith(end)), None)
        if end is None:
            continue
        weight = name.removesuffix(end)
        module, _, own = weight.rpartition(".")
        places, values = (checkpoint.tensors.get(f"{weight}{end}") for end in (_INDEX, _VALUE))
        shapes = [None if tensor is None else list(tensor.shape) for tensor in (places, values)]
        if None in shapes or shapes[0] != shapes[1] or len(shapes[0]) != 1:
            raise ValueError(
                f"{module}: {own}_escape_index has shape {shapes[0]} and {own}_escape_value {shapes[1]} in "
                f"{index.file}, both must be [n], or both absent: the checkpoint is damaged"
            )
        found[weight] = shapes[0][0]
    return found


def with_plain_tables(
    model: PreTrainedModel, state: dict[str, torch.Tensor], config: MLSpecConfig
) -> dict[str, torch.Tensor]:
    """``state`` with the exact BF16 weight in place of nested ones that are not loaded as such: tables, what is tied
    to them, and all that a draft in another format shares with a nested target."""
    tables = [(path, module) for path, module in model.named_modules() if isinstance(module, NestedEmbedding)]
    for path, table in tables:
        _put_plain(state, path, table.head.dequantized())
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, NestedExperts) and config.weights != module.format:
            dense = module.dequantized_module(torch.bfloat16)
            for key in module.names:
                for part in module.record.parts:
                    state.pop(f"{path}.{key}_{part}", None)
                state[f"{path}.{key}"] = getattr(dense, key).detach()
        if not is_nested(module):
            continue
        if any(table.shares(module) for _, table in tables):
            _drop(state, path)
        elif config.weights != module.format:
            _put_plain(state, path, module.dequantized(torch.bfloat16))
    return state


def _put_plain(state: dict[str, torch.Tensor], path: str, weight: torch.Tensor) -> None:
    _drop(state, path)
    state[f"{path}.weight"] = weight


def _drop(state: dict[str, torch.Tensor], path: str) -> None:
    for name in [name for name in state if name.startswith(f"{path}.weight_")]:
        del state[name]


def require_unshared(model: PreTrainedModel, config: MLSpecConfig) -> None:
    """ValueError where processes are to share layers of this format: before they read a file, and on all of them
    alike, as some would else fail at a shape, and others when all is loaded."""
    asked = getattr(model.config, "distributed_config", None)
    if (processes := getattr(asked, "tp_size", None) or 1) > 1:
        raise ValueError(
            f"{processes} processes are to share the model: {config.format} layers stay whole in memory, load the "
            "model without tp_plan, or the dense model with it"
        )


def require_here(model: PreTrainedModel, config: MLSpecConfig) -> None:
    """ValueError where layers of this format were offloaded or sharded: codebooks, planes and outliers have no axis to
    cut."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or isinstance(parameter, DTensor):
            what = "was offloaded by the device map" if parameter.is_meta else "is sharded over processes (DTensor)"
            raise ValueError(
                f"{name} {what}: {config.format} layers stay whole in memory, load the model without tp_plan and with "
                "a device_map that offloads nothing"
            )
