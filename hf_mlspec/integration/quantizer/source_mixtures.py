"""What stands in a model for experts that a checkpoint holds matrix by matrix, and what becomes of them?

Files have a layer for every projection of every expert (``experts.3.gate_proj``, Mixtral's ``experts.3.w1``);
transformers' module has one tensor for all. Which layer is which part of it is what transformers' own conversion of
unquantized files says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import rename_source_key

from ...checkpoints.layer import LayerPlan, Reader, ReadLayer, Stored, StoredLayer, require_tensor
from ...formats import FORMATS, Parts
from ...formats.weight import INPUT_DTYPES
from ...nn.expert_kinds import experts_in
from ...nn.expert_modules import ExpertModule, is_experts
from ...nn.experts import PackedExperts
from ...nn.switch import PrecisionSwitch
from .checkpoint import conversions_of

# The conversions that stack experts, and put gate in front of up: other ones do more than a matrix for itself knows.
_STACKING = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
_EXPERT = re.compile(r"\.(\d+)\.")
_Layers = dict[str, dict[str, Stored]]  # tensors by the layer's name in the files, then by their own


@dataclass(frozen=True)
class ExpertLayer:
    """One projection of one expert in the files: planned where it is quantized, else a dense ``weight``."""

    layer: StoredLayer
    plan: LayerPlan | None

    def read(self) -> ReadLayer:
        """The layer, read on the CPU."""
        if self.plan is None:
            return ReadLayer(self.layer.tensors["weight"].load())
        return self.plan.read({name: stored.load() for name, stored in self.plan.tensors.items()})

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """``[out, in]``, rounded to the dtype of its scales, as those who wrote it compute it, then to ``dtype``."""
        read = self.read()
        if isinstance(read.weight, torch.Tensor):
            return read.weight.to(dtype)
        kinds = {stored.dtype for stored in self.layer.tensors.values()} & set(INPUT_DTYPES)
        wide = read.weight.dequantize(torch.float32).to(kinds.pop() if len(kinds) == 1 else torch.float32).to(dtype)
        return wide if read.order is None else wide[:, torch.argsort(read.order)]


@dataclass(frozen=True)
class Choice:
    """What a module of experts becomes. format: a word of FORMATS, "" for dense, then ``why`` says why."""

    format: str
    options: Mapping[str, Any]
    why: str = ""


class SourceMixture(nn.Module):
    """The experts of a layer whose matrices are in the files one by one, only while they load. They are read from the
    files when their turn comes, and are none of transformers' business.

    layers: of each projection, by expert, those whose outputs it has, one behind the other.
    """

    def __init__(self, module: nn.Module, name: str, layers: dict[str, list[list[ExpertLayer]]]) -> None:
        super().__init__()
        self.dense = (module,)  # without memory; no submodule, because its tensors are not what the files have
        self.name, self.layers = name, layers
        self.choice = _choose(list(self.each()))
        self.train(module.training)

    @property
    def names(self) -> list[str]:
        """Of its layers in the files."""
        return [layer.layer.name for layer in self.each()]

    def each(self) -> Iterator[ExpertLayer]:
        """All of its layers."""
        return (layer for experts in self.layers.values() for parts in experts for layer in parts)

    @property
    def stored_as(self) -> str:
        """For people: as the first of its quantized layers."""
        return next(layer.plan.stored_as for layer in self.each() if layer.plan is not None) + ", experts"

    @property
    def stored_bytes(self) -> int:
        """Of all its layers."""
        return sum(layer.layer.stored_bytes for layer in self.each())

    @property
    def read_as(self) -> str:
        """What it becomes, for people."""
        options = ", ".join(f"{name} {value}" for name, value in self.choice.options.items())
        title = FORMATS[self.choice.format].title if self.choice.format else "dense"
        return title + (f" ({options})" if options else "")

    def empty(self) -> nn.Module:
        """What it becomes, without memory."""
        (module,) = self.dense
        if not self.choice.format:
            return module
        return experts_in(self.choice.format).empty(module, self.choice.format, None, self.name, **self.choice.options)

    def packed(self, switch: PrecisionSwitch) -> PackedExperts:
        """The packed module, read layer by layer on the CPU. Where it has a format."""
        kind = experts_in(self.choice.format)
        experts = kind(*self.dense, self.choice.format, switch, self.name, **self.choice.options)
        for key in experts.names:
            whole = experts._zeros(key, torch.device("cpu"))
            for expert, first, layer in self._places(key):
                rows = slice(first, first + layer.layer.out_features)
                for stack, part in zip(whole, self._parts(layer), strict=True):
                    if stack is not None:  # all but a zero point have a row for every output, the last axis but one
                        (stack[expert] if stack.ndim == 2 else stack[expert][..., rows, :]).copy_(part)
            experts._register_parts(key, whole)
        return experts.train(self.training)

    def filled(self, dtype: torch.dtype) -> nn.Module:
        """The dense module with its values in ``dtype``, read layer by layer on the CPU."""
        (module,) = self.dense
        for key in self.layers:
            whole = torch.empty(getattr(module, key).shape, dtype=dtype)
            for expert, first, layer in self._places(key):
                whole[expert, first : first + layer.layer.out_features] = layer.values(dtype)
            module.register_parameter(key, nn.Parameter(whole, requires_grad=False))
        return module.train(self.training)

    def _places(self, key: str) -> Iterator[tuple[int, int, ExpertLayer]]:
        """Expert, first row and layer of all that projection ``key`` is made of."""
        for expert, parts in enumerate(self.layers[key]):
            first = 0
            for layer in parts:
                yield expert, first, layer
                first += layer.layer.out_features

    def _parts(self, layer: ExpertLayer) -> Parts:
        """As the module has them: int4 in its groups, with zero points where another expert needs some."""
        weight = layer.read().weight
        if self.choice.format != "int4":
            return weight.parts
        packed, scale, zero = weight.parts
        times = weight.group_size // self.choice.options["group_size"]
        if not self.choice.options["symmetric"] and zero is None:
            zero = torch.full(scale.shape, 8, dtype=torch.uint8)
        return tuple(
            part if part is None or part is packed else part.repeat_interleave(times, dim=-1)
            for part in (packed, scale, zero)
        )


def _choose(layers: list[ExpertLayer]) -> Choice:
    """One format for all layers, with the smallest of their groups, and zero points if one has them; dense, naming
    the first layer that does not fit, where there is none."""
    plans = [layer.plan for layer in layers]
    first = next(plan for plan in plans if plan is not None)
    for layer, plan in zip(layers, plans, strict=True):
        name = layer.layer.name
        if plan is None:
            return Choice("", {}, f"{name} is not quantized, other experts are")
        if plan.ordered:
            return Choice("", {}, f"{name} takes its inputs in an order of its own")
        if not plan.format:
            return Choice("", {}, f"{name} has {plan.why_dense}")
        if plan.format != first.format:
            return Choice("", {}, f"{name} is {plan.read_as}, {first.layer.name} {first.read_as}")
        if not FORMATS[plan.format].experts:
            return Choice("", {}, f"{FORMATS[plan.format].title} hold no experts, as {name} would be")
        if plan.format == "planes" and plan.options != first.options:
            return Choice("", {}, f"{name} is {plan.read_as}, {first.layer.name} {first.read_as}")
    if first.format != "int4":
        return Choice(first.format, first.options)
    sizes = min(plan.options["group_size"] for plan in plans)
    return Choice("int4", {"group_size": sizes, "symmetric": all(plan.options["symmetric"] for plan in plans)})


def source_mixtures(model: PreTrainedModel, reader: Reader, stored: _Layers) -> dict[str, SourceMixture]:
    """What stands for each module of experts, by name, some of whose matrices are quantized. stored: the tensors of
    the files by module. ValueError or TypeError naming layer and expert for what is missing, unknown or does not
    fit."""
    modules = {
        name: module for name, module in model.named_modules()
        if is_experts(module) and ExpertModule.obstacle(module) is None
    }  # fmt: skip
    found: dict[str, dict[tuple[str, int, int], StoredLayer]] = {name: {} for name in modules}
    words: dict[str, list[str]] = {}
    for name, key, place, path, pieces in _conversions(model, stored) if modules else ():
        if name in modules:
            expert = int(_EXPERT.findall(path)[-1])
            layer = _stored_layer(ExpertModule.of(modules[name], name), key, len(pieces), path, stored[path])
            found[name][key, expert, place] = layer
            words[key] = pieces
    return {
        name: SourceMixture(modules[name], name, _planned(name, modules[name], reader, own, words))
        for name, own in found.items()
        if any(reader.holds(layer) for layer in own.values())
    }


def _conversions(model: PreTrainedModel, stored: _Layers) -> Iterator[tuple[str, str, int, str, list[str]]]:
    """Of every layer in the files that becomes a part of one tensor: the module and the tensor, the layer's place
    among the parts, its own name, and what parts of that kind are called."""
    renamings, converters = conversions_of(model)
    expected = model.state_dict()
    for path in stored:
        target, pattern = rename_source_key(
            f"{path}.weight", renamings, converters, model.base_model_prefix, expected
        )
        converter = next((one for one in converters if pattern in one.source_patterns), None)
        if pattern is None or converter is None or not _EXPERT.search(path):
            continue
        if [type(operation).__name__ for operation in converter.operations] in _STACKING:
            name, _, key = target.rpartition(".")
            pieces = [source.split(".")[-2] for source in converter.source_patterns]
            yield name, key, converter.source_patterns.index(pattern), path, pieces


def _stored_layer(
    original: ExpertModule, key: str, parts: int, path: str, tensors: Mapping[str, Stored]
) -> StoredLayer:
    out, inputs = original.sizes[key]
    bias = tensors.get("bias")
    if bias is not None and bool(bias.load().any()):
        raise ValueError(f"{bias.place} is not zero, and experts of {original.kind.__name__} have none")
    return StoredLayer(path, inputs, out // parts, {own: one for own, one in tensors.items() if own != "bias"})


def _planned(
    name: str, module: nn.Module, reader: Reader, found: Mapping[tuple[str, int, int], StoredLayer],
    words: Mapping[str, list[str]],
) -> dict[str, list[list[ExpertLayer]]]:  # fmt: skip
    original = ExpertModule.of(module, name)
    if original.transposed or module.has_bias:
        raise ValueError(
            f"{len(found)} matrices of {name} are quantized one by one, {original.kind.__name__} has transposed ones "
            "or biases: load the original model and quantize it with MLSpecConfig"
        )
    beyond = next((layer for (_, expert, _), layer in found.items() if expert >= original.num_experts), None)
    if beyond is not None:
        raise ValueError(
            f"the files hold {beyond.name}, config.json has {original.num_experts} experts: restore the config.json "
            "that was saved with them"
        )
    missing = [
        f"{word} of expert {expert}"
        for key in original.sizes
        for expert in range(original.num_experts)
        for place, word in enumerate(words.get(key, [key]))
        if (key, expert, place) not in found
    ]
    if missing:
        raise ValueError(
            f"{name}: {len(missing)} matrices are missing from the files, the first is {missing[0]}; download or "
            "write the checkpoint again"
        )
    return {
        key: [
            [_planned_layer(reader, found[key, expert, place]) for place in range(len(words[key]))]
            for expert in range(original.num_experts)
        ]
        for key in original.sizes
    }


def _planned_layer(reader: Reader, layer: StoredLayer) -> ExpertLayer:
    if reader.holds(layer):
        return ExpertLayer(layer, reader.plan(layer))
    require_tensor(layer, "weight", INPUT_DTYPES, (layer.out_features, layer.in_features))
    return ExpertLayer(layer, None)


def names_in_model(names: Iterable[str], model: PreTrainedModel) -> set[str]:
    """Names of tensors in files -> those that transformers gives them in ``model``."""
    conversions, expected = conversions_of(model), model.state_dict()
    return {rename_source_key(name, *conversions, model.base_model_prefix, expected)[0] for name in names}
