"""Which modules of a model will be 4-bit, and what stands in their place until their tensors are read?"""

from __future__ import annotations

import difflib
import re
import warnings
from collections import Counter
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from ..formats import int4, mxfp4
from ..nn.expert_modules import ExpertModule, is_experts
from ..nn.experts import PackedExperts
from ..nn.linear import Int4Linear, Mxfp4Linear, is_dense
from ..nn.packed import PackedLinear, PackedModule
from ..nn.switch import PrecisionSwitch
from .mlspec_config import MLSpecConfig

_LINEARS: dict[str, type[PackedLinear]] = {"mxfp4": Mxfp4Linear, "int4": Int4Linear}


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Name and module of every 4-bit module, each once."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, PackedModule))


def packed_parameters(model: nn.Module) -> set[str]:
    """Names of the 4-bit parameters (codes, scales, zero points) in ``model.state_dict()``, under every path."""
    return {
        f"{path}.{name}_{part}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedModule)
        for name in module.names
        for part in module.packing.parts
        if getattr(module, f"{name}_{part}") is not None
    }


def _packable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every path of every module that has a 4-bit counterpart."""
    for name, module in model.named_modules(remove_duplicate=False):
        if is_dense(module) or ExpertModule.obstacle(module) is None:
            yield name, module


def choose_kept(model: PreTrainedModel, patterns: list[str], defaults: list[str]) -> set[str]:
    """Full names of the modules that could be packed and are to stay wide: what the user's ``patterns`` or
    transformers' ``defaults`` fit.

    ValueError for a pattern that is no regular expression or fits no module of the model.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in patterns:
        _require_fitting(pattern, names, type(model).__name__)
    return {name for name, _ in _packable(model) if not should_convert_module(name, [*patterns, *defaults])}


def _require_fitting(pattern: str, names: list[str], model: str) -> None:
    try:
        fits = any(not should_convert_module(name, [pattern]) for name in names)
    except re.error as error:
        raise ValueError(f"skip_modules: {pattern!r} is no regular expression ({error})") from error
    if not fits:
        last = sorted({name.rpartition(".")[2] for name in names})
        near = difflib.get_close_matches(pattern.rpartition(".")[2], last, 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"skip_modules: {pattern!r} fits no module of {model}{hint}")


def require_groups_fit(model: PreTrainedModel, config: MLSpecConfig, kept: set[str]) -> None:
    """ValueError naming the first layer whose in_features the format's groups do not divide, and the remedy."""
    group = config.group_size if config.format == "int4" else mxfp4.BLOCK
    unfit = {name: n for name, n in _inputs(model, kept) if n % group}
    if not unfit:
        return
    name, inputs = next(iter(unfit.items()))
    sizes = [size for size in int4.GROUP_SIZES if not any(n % size for _, n in _inputs(model, kept))]
    ends = sorted({".".join(path.split(".")[-2:]) for path in unfit})
    keep = f"keep them wide with skip_modules={ends[:4]}"
    remedy = f"use group_size={sizes[-1]}, or {keep}" if sizes and config.format == "int4" else keep
    what = f"int4 with group_size={group}" if config.format == "int4" else f"mxfp4, in blocks of {group},"
    raise ValueError(
        f"{what} does not divide the in_features of {len(unfit)} layers of {type(model).__name__}, the first is "
        f"{name} with in_features {inputs} = {inputs // group} x {group} + {inputs % group}: {remedy}"
    )


def _inputs(model: nn.Module, kept: set[str]) -> Iterator[tuple[str, int]]:
    for name, module in _packable(model):
        if name in kept:
            continue
        if is_dense(module):
            yield name, module.in_features
        else:
            sizes = ExpertModule.of(module, name).sizes
            yield from ((f"{name}.{key}", in_features) for key, (_, in_features) in sizes.items())


def put_packed(model: PreTrainedModel, config: MLSpecConfig, kept: set[str], with_sources: bool) -> None:
    """Replace every packable module that is not in ``kept`` (names as in the model, or with or without its base
    model's prefix) by a packed one on the same device, all called by one switch. ValueError when none is left.

    with_sources: the packed module also holds the wide parameters it will be quantized from, because transformers
    collects only tensors that the model has; quantizing a tensor removes its parameter again.
    """
    switch = PrecisionSwitch(config.format, config.activation_bits)
    prefix = f"{model.base_model_prefix}."
    done: dict[int, PackedModule] = {}
    for name, module in list(_packable(model)):
        own = [name, *(f"{name}.{key}" for key in module._parameters)]  # earlier versions named experts' parameters
        if kept.intersection(path for n in own for path in (n, prefix + n, n.removeprefix(prefix))):
            continue
        if id(module) not in done:
            done[id(module)] = packed = _empty(module, name, switch, config)
            for source in packed.names if with_sources else ():
                packed.register_parameter(source, getattr(module, source))
        model.set_submodule(name, done[id(module)])
    if not done:
        raise ValueError(
            f"{type(model).__name__} holds no layer that can be packed: nn.Linear modules there are "
            f"{sum(isinstance(m, nn.Linear) for m in model.modules())}, kept were {sorted(kept)[:4]}"
        )


def _empty(module: nn.Module, name: str, switch: PrecisionSwitch, config: MLSpecConfig) -> PackedModule:
    settings = config.format_settings if config.format == "int4" else {}  # the rounding rule leaves no trace
    if is_dense(module):
        packed = _LINEARS[config.format].empty(module, name=name, switch=switch, **settings)
    else:
        packed = PackedExperts.empty(module, config.format, switch, name, **settings)
    packed._hf_quantized_needs_local_tp = True  # transformers' tensor parallelism: forward sees its own shard
    return packed.train(module.training)


def source_parameters(model: nn.Module) -> set[str]:
    """Names, in ``model.state_dict()`` and under every path, of the wide parameters that wait to be quantized."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedModule)
        for name in module.names
        if name in module._parameters
    }


def warn_of_unpackable(model: PreTrainedModel, kept: set[str]) -> None:
    """One warning with the kinds of weights that stay wide because no packed module computes them."""
    kinds: Counter[str] = Counter()
    for name, module in model.named_modules():
        other_linear = isinstance(module, nn.Linear | Conv1D) and not is_dense(module)
        if name not in kept and (other_linear or (is_experts(module) and ExpertModule.obstacle(module) is not None)):
            kinds[type(module).__name__] += 1
    if kinds:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        warnings.warn(f"{type(model).__name__}: these modules are not packed and stay wide: {found}", stacklevel=2)
