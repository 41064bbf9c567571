"""What stands in a model for the layers of another library's checkpoint while it loads, and what becomes of them?"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ...checkpoints.layer import LayerPlan, Reader, ReadLayer, StoredLayer
from ...checkpoints.safetensors_file import StoredTensor
from ...formats import FORMATS, PackedWeight
from ...nn.expert_modules import is_experts
from ...nn.linear import is_dense
from ...nn.packed import PackedLinear
from ...nn.packed_formats import PACKINGS
from ...nn.switch import PrecisionSwitch
from ...nn.transforms import NONE, transform_named
from .checkpoint import Checkpoint, require_named, require_plain
from .packing import packed_modules

_ORDER = "order"  # the transform of layers whose inputs are permuted


class SourceLinear(nn.Module):
    """A linear layer whose tensors are as another library saved them, only while it loads."""

    def __init__(self, plan: LayerPlan, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.plan = plan
        for name, stored in plan.tensors.items():
            empty = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", bias)

    def read(self) -> ReadLayer:
        """The layer, read on the CPU; the tensors are let go."""
        tensors = {name: self._parameters.pop(name).detach().cpu() for name in self.plan.tensors}
        return self.plan.read(tensors)


def plan_layers(model: nn.Module, reader: Reader, checkpoint: Checkpoint) -> list[LayerPlan]:
    """A plan of every quantized linear layer of ``model``, checked. ValueError or TypeError naming what does not fit;
    for quantized experts, which are not read; and where no layer is quantized."""
    stored = by_module(checkpoint.tensors)
    plans = []
    for name, module in model.named_modules():
        if is_experts(module):
            _require_plain_experts(name, stored, reader)
        if not is_dense(module):
            continue
        layer = StoredLayer(name, module.in_features, module.out_features, tensors_of(name, stored, model))
        if reader.holds(layer):
            plans.append(reader.plan(layer))
    if not plans:
        raise ValueError(
            f"config.json says {reader.method!r}, but no linear layer of {type(model).__name__} in {checkpoint.place} "
            "is quantized: restore the config.json that was saved with the weights"
        )
    return plans


def put_sources(model: PreTrainedModel, reader: Reader, checkpoint: Checkpoint) -> None:
    """Replace every quantized layer of a model, still without memory, by a `SourceLinear`, after all of them are
    planned: as `plan_layers`; and warn once of layers that become dense."""
    require_plain(checkpoint, model)
    with torch.device("cpu"):  # transformers builds the model in a context of the meta device
        plans = plan_layers(model, reader, checkpoint)
    put_plans(model, plans)
    dense = Counter(f"{plan.stored_as}: {plan.why_dense}" for plan in plans if not plan.format)
    if dense:
        told = "; ".join(f"{count} of {what}" for what, count in dense.most_common(3))
        warnings.warn(
            f"{sum(dense.values())} of {len(plans)} quantized layers of {type(model).__name__} become dense, because "
            f"no packed format here holds their values exactly ({told})",
            stacklevel=2,
        )


def put_plans(model: nn.Module, plans: Iterable[LayerPlan]) -> None:
    """Replace the layers that are planned by a `SourceLinear` each."""
    for plan in plans:
        linear = model.get_submodule(plan.layer.name)
        model.set_submodule(plan.layer.name, SourceLinear(plan, linear.bias).train(linear.training))


def require_sources_fit(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Nothing that the model needs is missing from the files, and they hold nothing else; ValueError naming it. What a
    reader has no use for, such as the shape beside codes, and biases of zeros that the model has none of, pass."""
    unused = set()
    for name, module in model.named_modules():
        if isinstance(module, SourceLinear):
            used = {f"{name}.{own}" for own in module._parameters}
            unused |= {f"{name}.{own}" for own in module.plan.layer.tensors} - used
            _require_no_bias(f"{name}.bias", module, checkpoint)
            unused |= {f"{name}.bias"} if module.bias is None else set()
    require_named(checkpoint, model, ignored=unused)
    patterns = sorted(unused & checkpoint.tensors.keys())
    known = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*known, *(rf"^{name.replace('.', '[.]')}$" for name in patterns)}


def _require_no_bias(name: str, module: SourceLinear, checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors.get(name)
    if module.bias is None and stored is not None and bool(stored.load().any()):
        raise ValueError(f"{stored.place} is not zero, and config.json makes a layer without bias of it")


def convert_layers(model: PreTrainedModel) -> None:
    """Make a packed or dense layer of every `SourceLinear`, one at a time; layers of one format share a switch."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, SourceLinear)]
    switches: dict[tuple, PrecisionSwitch] = {}
    ordered = any(module.plan.ordered for _, module in found)
    bar = logging.tqdm(total=len(found), desc="Reading packed layers", unit="layer", leave=False)
    for name, module in found:
        device = next(module.parameters()).device
        read = module.read()
        model.set_submodule(name, _layer(read, module, model.dtype, switches, ordered).to(device))
        bar.update()
    bar.close()


def _layer(
    read: ReadLayer, source: SourceLinear, dtype: torch.dtype, switches: dict[tuple, PrecisionSwitch], ordered: bool
) -> nn.Module:
    plan, training = source.plan, source.training
    if not isinstance(read.weight, PackedWeight):
        wide = nn.Linear(plan.layer.in_features, plan.layer.out_features, bias=False, device="meta")
        wide.weight, wide.bias = nn.Parameter(read.weight.to(dtype), requires_grad=False), source.bias
        return wide.train(training)
    record = FORMATS[plan.format]
    stored = record.stored_bits(**plan.options)
    switch = switches.setdefault((plan.format, stored), PrecisionSwitch(plan.format, num_planes=stored))
    packed: PackedLinear = PACKINGS[plan.format].linear(read.weight, source.bias, switch)
    if ordered:
        order = torch.arange(plan.layer.in_features) if read.order is None else read.order
        packed.transform_(transform_named(_ORDER), {_ORDER: order.to(torch.int32)})
    return packed.train(training)


def settings_of(model: PreTrainedModel) -> dict[str, Any] | None:
    """The settings of the MLSpecConfig that describes a model's packed layers; None where they differ, or there are
    none: such a model runs, and cannot be saved."""
    kinds = {layer_settings(module) for _, module in packed_modules(model)}
    if len(kinds) != 1:
        return None
    kept = sorted(name for name, module in model.named_modules(remove_duplicate=False) if is_dense(module))
    return {**dict(kinds.pop()), "modules_to_not_convert": kept}


def layer_settings(module: PackedLinear) -> tuple[tuple[str, Any], ...]:
    """Names and values of the settings of the MLSpecConfig that describes one packed layer."""
    names = {"int4": ("group_size", "symmetric"), "planes": ("group_size", "num_planes")}
    own = {name: getattr(module, name) for name in names.get(module.format, ())}
    own |= {} if module.transform is NONE else {"transform": module.transform.word}
    return ("format", module.record.written), *own.items()


def by_module(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Stored tensors by the module's name, then by the tensor's own."""
    found: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, own = name.rpartition(".")
        found[module][own] = tensor
    return found


def _names(path: str, model: nn.Module) -> Iterator[str]:
    """A module's possible names in the files: a base model has no prefix there, or the model has none here."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    yield from dict.fromkeys((path, prefix + path, path.removeprefix(prefix)))


def tensors_of(path: str, stored: Mapping[str, Mapping[str, StoredTensor]], model: nn.Module) -> dict[str, Any]:
    """Of `by_module`, what belongs to the module at ``path`` of ``model``, without its bias."""
    found = next((stored[name] for name in _names(path, model) if name in stored), {})
    return {name: tensor for name, tensor in found.items() if name != "bias"}


def _require_plain_experts(
    name: str, stored: Mapping[str, Mapping[str, StoredTensor]], reader: Reader
) -> None:
    inside = {path: tensors for path, tensors in stored.items() if path.startswith(f"{name}.")}
    quantized = [path for path, own in inside.items() if reader.holds(StoredLayer(path, 0, 0, own))]
    if quantized:
        raise ValueError(
            f"{len(quantized)} experts of {name} are quantized ({reader.title}), which is not read yet, the first is "
            f"{quantized[0]}: load the original model and quantize it with MLSpecConfig"
        )
