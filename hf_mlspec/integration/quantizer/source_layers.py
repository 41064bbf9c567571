"""What stands in a model for the layers of another library's checkpoint while it loads, and what becomes of them?"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
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
from ...nn.packed import PackedLinear, PackedModule
from ...nn.packed_formats import PACKINGS
from ...nn.switch import PrecisionSwitch, switch_for
from ...nn.transforms import NONE, ORDER
from .checkpoint import Checkpoint, require_named, require_plain
from .mapped_memory import let_go
from .packing import packed_modules
from .source_experts import SourceExperts, source_experts
from .source_mixtures import SourceMixture, names_in_model, source_mixtures

_LARGE = 1 << 20  # bytes of a tensor whose mapped pages are worth letting go


class SourceLinear(nn.Module):
    """A linear layer whose tensors are as another library saved them, only while it loads. in_file: they are read from
    the file when their turn comes, and are none of transformers' business."""

    def __init__(self, plan: LayerPlan, bias: nn.Parameter | None, in_file: bool = False) -> None:
        super().__init__()
        self.plan, self.in_file = plan, in_file
        for name, stored in plan.tensors.items() if not in_file else ():
            empty = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_parameter("bias", bias)

    def read(self) -> ReadLayer:
        """The layer, read on the CPU; the tensors are let go."""
        if self.in_file:
            return self.plan.read({name: stored.load() for name, stored in self.plan.tensors.items()})
        loaded = {name: self._parameters.pop(name).detach() for name in self.plan.tensors}
        if any(tensor.is_meta for tensor in loaded.values()):
            raise ValueError(
                f"{self.plan.layer.name} was offloaded by the device map: packed layers stay in memory, give a "
                "device_map that offloads nothing"
            )
        tensors = {name: tensor.cpu() for name, tensor in loaded.items()}
        read = self.plan.read(tensors)
        parts = [read.weight] if isinstance(read.weight, torch.Tensor) else read.weight.parts
        held = {part.untyped_storage().data_ptr() for part in parts if part is not None}
        for tensor in tensors.values():
            if tensor.nbytes >= _LARGE and tensor.untyped_storage().data_ptr() not in held:
                let_go(tensor, keep_cached=True)
        return read


def plan_layers(
    model: nn.Module, reader: Reader, checkpoint: Checkpoint, required: bool = True, taken: Collection[str] = ()
) -> list[LayerPlan]:
    """A plan of every quantized linear layer of ``model``, checked. taken: names of layers in the files that others
    read. ValueError or TypeError naming what does not fit; for quantized experts of a kind that is not read; and, if
    one is required, where no layer is quantized."""
    stored = by_module(checkpoint.tensors)
    plans = []
    for name, module in model.named_modules():
        if not is_dense(module):
            continue
        layer = StoredLayer(name, module.in_features, module.out_features, tensors_of(name, stored, model))
        if reader.holds(layer):
            plans.append(reader.plan(layer))
    tables = {name for name in stored if isinstance(_module(model, name), nn.Embedding)}
    left = {name: own for name, own in stored.items() if name not in tables.union(taken)}
    _require_all_read(plans, left, reader, model)
    if required and not plans:
        raise ValueError(
            f"config.json says {reader.method!r}, but no linear layer of {type(model).__name__} in {checkpoint.place} "
            "is quantized: restore the config.json that was saved with the weights"
        )
    return plans


def put_sources(
    model: PreTrainedModel, reader: Reader, checkpoint: Checkpoint, in_file: bool = False
) -> list[LayerPlan]:
    """Replace every quantized layer of a model, still without memory, by a `SourceLinear`, `SourceExperts` or
    `SourceMixture`, after all of them are planned: as `plan_layers`. in_file: as SourceLinear."""
    require_plain(checkpoint, model)
    experts: dict[str, nn.Module] = {**_expert_sources(model, checkpoint)}
    mixtures = source_mixtures(model, reader, by_module(checkpoint.tensors))
    experts |= mixtures
    taken = {name for mixture in mixtures.values() for name in mixture.names}
    plans = plan_layers(model, reader, checkpoint, required=not experts, taken=taken)
    for name, module in experts.items():
        model.set_submodule(name, module)
    _require_untied(plans, model)
    for plan in plans:
        linear = model.get_submodule(plan.layer.name)
        model.set_submodule(plan.layer.name, SourceLinear(plan, linear.bias, in_file).train(linear.training))
    return plans


def warn_of_dense(plans: Sequence[LayerPlan], model: nn.Module) -> None:
    """One warning of the layers, and modules of experts, that become dense, and why."""
    dense = Counter(f"{plan.stored_as}: {plan.why_dense}" for plan in plans if not plan.format)
    mixtures = [module for module in model.modules() if isinstance(module, SourceMixture)]
    dense += Counter(f"{one.stored_as}: {one.choice.why}" for one in mixtures if not one.choice.format)
    if dense:
        told = "; ".join(f"{some} of {what}" for what, some in dense.most_common(3))
        count = len(plans) + len(mixtures)
        warnings.warn(
            f"{sum(dense.values())} of {count} quantized layers of {type(model).__name__} become dense, because "
            f"no packed format here holds their values exactly ({told})",
            stacklevel=2,
        )


def _require_untied(plans: list[LayerPlan], model: PreTrainedModel) -> None:
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    name = next((plan.layer.name for plan in plans if f"{plan.layer.name}.weight" in tied), None)
    if name is not None:
        raise ValueError(
            f"config.json ties the weight of {name} to another, but the files hold it quantized, by itself: set "
            "tie_word_embeddings to false there"
        )


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
    unused |= _cache_scales(checkpoint)
    mixtures = [module for module in model.modules() if isinstance(module, SourceMixture)]
    own = {path for mixture in mixtures for path in mixture.names}
    taken = {name for name in checkpoint.tensors if name.rpartition(".")[0] in own}
    rest = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in taken}
    require_named(replace(checkpoint, tensors=rest), model, ignored=unused)
    renamed = names_in_model(taken, model)  # under which transformers does not expect them
    patterns = sorted(unused & rest.keys() | renamed)
    known = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*known, *(rf"^{name.replace('.', '[.]')}$" for name in patterns)}


def _cache_scales(checkpoint: Checkpoint) -> set[str]:
    """Scales of a KV cache in fewer bits, which is kept in the model's dtype here; one warning says so."""
    found = {name for name in checkpoint.tensors if name.endswith((".k_scale", ".v_scale", ".q_scale"))}
    if found:
        warnings.warn(
            f"{checkpoint.place} has {len(found)} scales of a KV cache in fewer bits: they are not used, keys and "
            "values keep the model's dtype",
            stacklevel=2,
        )
    return found


def _require_no_bias(name: str, module: SourceLinear, checkpoint: Checkpoint) -> None:
    stored = checkpoint.tensors.get(name)
    if module.bias is None and stored is not None and bool(stored.load().any()):
        raise ValueError(f"{stored.place} is not zero, and config.json makes a layer without bias of it")


def convert_layers(model: PreTrainedModel) -> None:
    """Make a packed or dense layer of every `SourceLinear`, one at a time; layers of one format share a switch."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, SourceLinear)]
    switches: dict[tuple, PrecisionSwitch] = {}
    ordered = any(module.plan.ordered for _, module in found)
    for name, module in [(name, one) for name, one in model.named_modules() if isinstance(one, SourceExperts)]:
        model.set_submodule(name, module.packed(name, shared_switch(switches, "mxfp4", {})))
    for name, module in [(name, one) for name, one in model.named_modules() if isinstance(one, SourceMixture)]:
        model.set_submodule(name, _mixture(module, model, switches))
    bar = logging.tqdm(total=len(found), desc="Reading packed layers", unit="layer", leave=False)
    for name, module in found:
        device = next((parameter.device for parameter in module.parameters()), model.device)
        read = module.read()
        model.set_submodule(name, _layer(read, module, model.dtype, switches, ordered).to(device))
        bar.update()
    bar.close()


def _mixture(source: SourceMixture, model: PreTrainedModel, switches: dict[tuple, PrecisionSwitch]) -> nn.Module:
    """On the device of what routes to it."""
    device = next((one.device for one in model.get_submodule(source.name.rpartition(".")[0]).parameters()), "meta")
    if torch.device(device).type == "meta":
        raise ValueError(
            f"{source.name} was offloaded by the device map: packed layers stay in memory, give a device_map that "
            "offloads nothing"
        )
    choice = source.choice
    if not choice.format:
        return source.filled(model.dtype).to(device)
    return source.packed(shared_switch(switches, choice.format, choice.options)).to(device)


def _layer(
    read: ReadLayer, source: SourceLinear, dtype: torch.dtype, switches: dict[tuple, PrecisionSwitch], ordered: bool
) -> nn.Module:
    plan, training = source.plan, source.training
    if not isinstance(read.weight, PackedWeight):
        wide = nn.Linear(plan.layer.in_features, plan.layer.out_features, bias=False, device="meta")
        wide.weight, wide.bias = nn.Parameter(read.weight.to(dtype), requires_grad=False), source.bias
        return wide.train(training)
    switch = shared_switch(switches, plan.format, plan.options)
    packed: PackedLinear = PACKINGS[plan.format].linear(read.weight, source.bias, switch)
    if ordered:
        order = torch.arange(plan.layer.in_features) if read.order is None else read.order
        packed.transform_(ORDER, {ORDER.word: order.to(torch.int32)})
    return packed.train(training)


def shared_switch(switches: dict[tuple, PrecisionSwitch], format: str, options: Mapping[str, Any]) -> PrecisionSwitch:
    """That of ``switches`` for layers of a format with these options; a new one is added."""
    made = switch_for(FORMATS[format], options)
    return switches.setdefault((format, made.bit_choices), made)


def _expert_sources(model: nn.Module, checkpoint: Checkpoint) -> dict[str, SourceExperts]:
    stored, found = by_module(checkpoint.tensors), {}
    for name, module in model.named_modules():
        if is_experts(module):
            own = next((stored[path] for path in _names(name, model) if path in stored), {})
            source = source_experts(name, module, own)
            found |= {} if source is None else {name: source}
    return found


def settings_of(model: PreTrainedModel) -> dict[str, Any] | None:
    """The settings of the MLSpecConfig that describes a model's packed layers; None where they differ, or there are
    none: such a model runs, and cannot be saved."""
    kinds = {layer_settings(module) for _, module in packed_modules(model)}
    if len(kinds) != 1:
        return None
    modules = model.named_modules(remove_duplicate=False)
    kept = sorted(name for name, module in modules if is_dense(module) or is_experts(module))
    return {**dict(kinds.pop()), "modules_to_not_convert": kept}


def layer_settings(module: PackedModule) -> tuple[tuple[str, Any], ...]:
    """Names and values of the settings of the MLSpecConfig that describes one packed module."""
    names = {"int4": ("group_size", "symmetric"), "planes": ("group_size", "num_planes"),
             "lut": ("num_planes", "least_planes")}  # fmt: skip
    own = {name: getattr(module, name) for name in names.get(module.format, ())}
    own |= {} if getattr(module, "transform", NONE) is NONE else {"transform": module.transform.word}
    return ("format", module.record.written), *own.items()


def by_module(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Stored tensors by the module's name, then by the tensor's own."""
    found: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        module, _, own = name.rpartition(".")
        found[module][own] = tensor
    return found


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _names(path: str, model: nn.Module) -> Iterator[str]:
    """A module's possible names in the files: a base model has no prefix there, or the model has none here."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    yield from dict.fromkeys((path, prefix + path, path.removeprefix(prefix)))


def tensors_of(path: str, stored: Mapping[str, Mapping[str, StoredTensor]], model: nn.Module) -> dict[str, Any]:
    """Of `by_module`, what belongs to the module at ``path`` of ``model``, without its bias."""
    found = next((stored[name] for name in _names(path, model) if name in stored), {})
    return {name: tensor for name, tensor in found.items() if name != "bias"}


def _require_all_read(
    plans: list[LayerPlan], stored: Mapping[str, Mapping[str, StoredTensor]], reader: Reader, model: nn.Module
) -> None:
    read = {name for plan in plans for name in _names(plan.layer.name, model)}
    left = [name for name, own in stored.items() if name not in read and reader.holds(StoredLayer(name, 1, 1, own))]
    experts = [name for name in left if ".experts." in f"{name}."]
    if experts:
        raise ValueError(
            f"{len(experts)} experts of {type(model).__name__} are quantized ({reader.title}) in a way that is not "
            f"read, the first is {experts[0]}: load the original model and quantize it with MLSpecConfig"
        )
    other = next((name for name in left if _module(model, name) is not None), None)
    if other is not None:
        raise ValueError(
            f"{other} is quantized ({reader.title}), and {type(_module(model, other)).__name__} is no linear layer: "
            "load the original model and quantize it with MLSpecConfig"
        )
    if left:
        raise ValueError(
            f"{len(left)} quantized layers belong to no linear layer of {type(model).__name__} as config.json "
            f"describes it, the first is {left[0]}: restore the config.json that was saved with them"
        )
