"""Which modules of a model will be packed, and what replaces them until their tensors are read?"""

from __future__ import annotations

import difflib
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from ...nn.castable import has_dense_weight
from ...nn.expert_kinds import experts_in
from ...nn.expert_modules import ExpertModule, is_experts
from ...nn.packed import PackedLinear, PackedModule
from ...nn.packed_formats import PACKINGS
from ...nn.switch import PrecisionSwitch, switch_for
from ...nn.transforms import NONE, transform_named
from ...nn.zipper_embedding import ZipperEmbedding
from .config import MLSpecConfig


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Name and module of every packed module, each once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedModule))


def packed_weights(module: PackedModule) -> int:
    """How many weights a packed module stands for; two of experts share a byte."""
    if isinstance(module, PackedLinear | ZipperEmbedding):
        return module.in_features * module.out_features
    return sum(module.held(name)[0].numel() * 2 for name in module.names)


def packed_parameters(model: nn.Module) -> set[str]:
    """Names of the packed parameters (codes, planes, scales ...) and of the transforms' tensors in
    ``model.state_dict()``, under every path."""
    transforms = {
        f"{path}.transform_{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedLinear)
        for name in module.transform_tensors()
    }
    return transforms | {
        f"{path}.{name}_{part}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedModule)
        for name in module.names
        for part, tensor in zip(module.record.parts, module.held(name), strict=True)
        if tensor is not None
    }


def _packable(model: nn.Module, config: MLSpecConfig) -> Iterator[tuple[str, nn.Module]]:
    """Every path of every module that has a counterpart in the format."""
    experts = config.record.experts
    for name, module in model.named_modules(remove_duplicate=False):
        if has_dense_weight(module) or (experts and ExpertModule.obstacle(module) is None):
            yield name, module


def choose_kept(model: PreTrainedModel, config: MLSpecConfig, defaults: list[str]) -> set[str]:
    """Full names of the packable modules that are not to be packed: matches of the user's patterns or of transformers'
    ``defaults``.

    Raises ValueError for a pattern that is not a regular expression or matches no module of the model.
    """
    patterns = [*(config.skip_modules or ()), *config.modules_to_not_convert]
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in patterns:
        _require_fitting(pattern, names, type(model).__name__)
    return {name for name, _ in _packable(model, config) if not should_convert_module(name, [*patterns, *defaults])}


def _require_fitting(pattern: str, names: list[str], model: str) -> None:
    try:
        fits = any(not should_convert_module(name, [pattern]) for name in names)
    except re.error as error:
        raise ValueError(f"skip_modules: {pattern!r} is not a regular expression ({error})") from error
    if not fits:
        last = sorted({name.rpartition(".")[2] for name in names})
        near = difflib.get_close_matches(pattern.rpartition(".")[2], last, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"skip_modules: {pattern!r} matches no module of {model}{hint}")


def require_groups_fit(
    model: PreTrainedModel, config: MLSpecConfig, kept: set[str], bound: Mapping[str, str] | None = None
) -> None:
    """ValueError naming the first layer whose in_features the format's groups do not divide, and the remedy. bound:
    what comes before skipping a layer that cannot be skipped as it is, by its name."""
    group = config.record.group(**config.format_settings)
    choices = next((option.choices for option in config.record.options if option.name == "group_size"), ())
    unfit = {name: n for name, n in _inputs(model, config, kept) if n % group}
    if not unfit:
        for name, inputs in _inputs(model, config, kept):
            config.record.require_fit(inputs, name, **config.format_settings)
        return
    name, inputs = next(iter(unfit.items()))
    sizes = [size for size in choices if not any(n % size for _, n in _inputs(model, config, kept))]
    ends = sorted({".".join(path.split(".")[-2:]) for path in unfit})
    first = next((how for path, how in (bound or {}).items() if path in unfit), None)
    keep = f"leave them unpacked with skip_modules={ends[:4]}"
    keep = keep if first is None else f"{first}; only then {keep}"
    remedy = f"use group_size={sizes[-1]}, or {keep}" if sizes else keep
    what = f"{config.format} with group_size={group}" if choices else f"{config.format}, in blocks of {group},"
    raise ValueError(
        f"{what} does not divide the in_features of {len(unfit)} layers of {type(model).__name__}, the first is "
        f"{name} with in_features {inputs} = {inputs // group} x {group} + {inputs % group}: {remedy}"
    )


def _inputs(model: nn.Module, config: MLSpecConfig, kept: set[str]) -> Iterator[tuple[str, int]]:
    for name, module in _packable(model, config):
        if name in kept:
            continue
        if has_dense_weight(module):
            yield name, module.in_features
        else:
            sizes = ExpertModule.of(module, name).sizes
            yield from ((f"{name}.{key}", in_features) for key, (_, in_features) in sizes.items())


def put_packed(
    model: PreTrainedModel,
    config: MLSpecConfig,
    kept: set[str],
    with_sources: bool,
    escapes: dict[str, int] | None = None,
) -> None:
    """Replace every packable module that is not in ``kept`` (names as in the model, or with or without its base
    model's prefix) by a packed one on the same device; all share one switch. ValueError if there is none to replace.

    with_sources: the packed module also holds the unpacked parameters it will be quantized from, because transformers
    collects only tensors that the model has; quantizing a tensor removes its parameter again. escapes: the number of
    escapes of a nested weight on disk, by the weight's name.
    """
    switch = switch_of(config)
    prefix = f"{model.base_model_prefix}."
    done: dict[int, PackedModule] = {}
    for name, module in list(_packable(model, config)):
        own = [name, *(f"{name}.{key}" for key in module._parameters)]  # earlier versions named experts' parameters
        if kept.intersection(path for n in own for path in (n, prefix + n, n.removeprefix(prefix))):
            continue
        if id(module) not in done:
            found = _room_for(module, (name, prefix + name), escapes) if escapes else {}
            done[id(module)] = packed = _empty(module, name, switch, config, **found)
            for source in packed.names if with_sources else ():
                packed.register_parameter(source, getattr(module, source))
        model.set_submodule(name, done[id(module)])
    if not done:
        raise ValueError(
            f"{type(model).__name__} holds no layer that can be packed: nn.Linear modules there are "
            f"{sum(isinstance(m, nn.Linear) for m in model.modules())}, kept were {sorted(kept)[:4]}"
        )


def _room_for(module: nn.Module, paths: tuple[str, str], escapes: Mapping[str, int]) -> dict[str, Any]:
    """Of the module at one of ``paths``: the number of escapes, or of experts of each projection."""
    own = {key: next((escapes[f"{path}.{key}"] for path in paths if f"{path}.{key}" in escapes), 0)
           for key in (("weight",) if has_dense_weight(module) else ExpertModule.of(module, paths[0]).sizes)}
    return {"escapes": own["weight"] if has_dense_weight(module) else own}


def switch_of(config: MLSpecConfig) -> PrecisionSwitch:
    """A new switch for layers of the config's format."""
    clip = 1.0 if config.activation_clip is None else config.activation_clip
    return switch_for(config.record, config.format_settings, config.activation_bits, clip)


def _empty(
    module: nn.Module, name: str, switch: PrecisionSwitch, config: MLSpecConfig, **settings: Any
) -> PackedModule:
    settings |= config.record.shaping(config.format_settings)
    if has_dense_weight(module):
        packed = PACKINGS[config.weights].linear.empty(module, name=name, switch=switch, **settings)
        if config.transform != NONE.word:
            packed.transform_(transform_named(config.transform))
    else:
        packed = experts_in(config.weights).empty(module, config.weights, switch, name, **settings)
    packed._hf_quantized_needs_local_tp = True  # transformers' tensor parallelism: forward sees its own shard
    return packed.train(module.training)


def source_parameters(model: nn.Module) -> set[str]:
    """Names, in ``model.state_dict()`` and under every path, of the unpacked parameters that are still to be
    quantized.
    """
    return {
        f"{path}.{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedModule)
        for name in module.names
        if name in module._parameters
    }


def warn_of_unpackable(model: PreTrainedModel, config: MLSpecConfig, kept: set[str]) -> None:
    """One warning with the kinds of weights that stay unpacked because there is no packed module for them."""
    kinds: Counter[str] = Counter()
    for name, module in model.named_modules():
        other_linear = isinstance(module, nn.Linear | Conv1D) and not has_dense_weight(module)
        unknown = not config.record.experts or ExpertModule.obstacle(module) is not None
        if name not in kept and (other_linear or (is_experts(module) and unknown)):
            kinds[type(module).__name__] += 1
    if kinds:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        warnings.warn(f"{type(model).__name__}: modules that are not packed: {found}", stacklevel=2)
