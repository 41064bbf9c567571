"""What does one of the processes that share a model hold of it? A plain model with its share of the heads.

A decoder reads it like any other: linears split along their outputs are narrower, so that there are fewer heads, and
what those split along their inputs give, o and down, is a part of the sum over all processes.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..formats.mxfp4 import BLOCK
from ..nn.adapters import adapted_names
from ..nn.expert_modules import is_experts
from ..nn.experts import PackedExperts
from ..nn.packed import PackedLinear, PackedModule
from ..nn.replace import share
from ..nn.shards import EXPERTS, HEAD_STEP, group_of, local, local_experts, local_linear, style_of, whole
from ..nn.transforms import NONE
from .architecture import CPU_FIELDS, OF_ATTENTION, Description, UnknownArchitecture, described, has_experts
from .architecture.rotary import text_config
from .ranks import Ranks, identity

_OUTPUTS = ("colwise", "colwise_rep", "colwise_gather_output")
_INPUTS = ("rowwise",)
_WHOLE = ("embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce")  # every process has all of it
_SLICED = ("mxfp4", "int4", "planes")  # every part but single numbers is ``[..., out, in / some]``
_ROW_STEP = 8  # elements of a row that GPUs load at once
_SPLIT = {"q": _OUTPUTS, "k": _OUTPUTS, "v": _OUTPUTS, "gate": _OUTPUTS, "up": _OUTPUTS, "o": _INPUTS, "down": _INPUTS}


class OwnPart:
    """model: this process's part. ranks: all that share it. vocab: outputs of the whole head, of which the part's may
    have its share."""

    def __init__(self, model: nn.Module, ranks: Ranks):
        """UnknownArchitecture for a model that is shared in another way than linear by linear; ValueError where heads
        do not go round, or the processes are not alike. Every process has to call it."""
        _require_no_adapters(model)
        _require_split(model)
        self.ranks, self.vocab = ranks, 0
        self.model, self._shared, self._held = share(model), [], {}
        for path, module in list(self.model.named_modules()):
            if "forward" in vars(module):
                self._put(path, module, style_of(model, path))
        self._divide_shared_experts(model)
        _divide_heads(self.model, ranks.count)
        self._require_alike()

    def give_back(self) -> None:
        """Let the shared model read its weights where a decoder has put them."""
        with torch.no_grad():
            for module, own in self._shared:
                for name, parameter in module._parameters.items():
                    if isinstance(parameter, DTensor) and name != "bias":
                        local(parameter).data = own._parameters[name].data

    def _put(self, path: str, module: nn.Module, style: str | None) -> None:
        """A plain module in the place of one whose forward tensor parallelism replaced."""
        if style in _WHOLE:
            vars(module).pop("forward")
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(whole(parameter).detach(), requires_grad=False)
            return
        if style == EXPERTS and (is_experts(module) or isinstance(module, PackedExperts)):
            self._put_experts(path, module)
            return
        if style not in _OUTPUTS + _INPUTS or not isinstance(module, nn.Linear | PackedLinear):
            raise UnknownArchitecture(f"tensor parallelism runs its {path} as {style}, which no compiled decoder does")
        is_head = self.model.get_output_embeddings() is module
        if style in _INPUTS and isinstance(module, PackedLinear):
            _require_whole_groups(module, path, self.ranks.count)
        own = _own_linear(module, self.ranks, style in _INPUTS, is_head)
        if is_head:
            self.vocab = module.out_features
        elif isinstance(module, nn.Linear):
            self._shared.append((module, own))
        self.model.set_submodule(path, own)

    def _put_experts(self, path: str, module: nn.Module) -> None:
        """A module of the parts of experts: narrower ones, whose sums are parts of the sum over all processes."""
        if isinstance(module, PackedExperts) and module.part_of is None:
            raise UnknownArchitecture(f"its {path} was packed whole, and processes share it")
        if module.has_bias:
            raise UnknownArchitecture(f"its {path} has biases, which every process would add")
        own = local_experts(module)
        if is_experts(module):
            inner = module.down_proj.shape[1 if module.is_transposed else 2]
            if inner % self.ranks.count:
                raise ValueError(f"{path} has experts of {inner} elements, which {self.ranks.count} processes of "
                                 f"tensor parallelism do not divide: use a tensor-parallel size that divides {inner}")
            self._shared.append((module, own))
        self.model.set_submodule(path, own)

    def _divide_shared_experts(self, model: nn.Module) -> None:
        """Experts of all tokens that every process holds whole: each computes its share of their inner elements, so
        that they are added up as the others are."""
        entry = described(model)
        for index in range(text_config(model).num_hidden_layers if entry.experts is not None else 0):
            layer = f"{entry.layers}.{index}"
            if not has_experts(entry.experts, self.model.get_submodule(layer)):
                continue
            for name, place in entry.experts.shared.items():
                path = f"{layer}.{place}"
                if style_of(model, path) is None:
                    module = self.model.get_submodule(path)
                    self._held |= {f"{path}.{key}": own for key, own in module._parameters.items() if own is not None}
                    axis = 1 if _SPLIT[name] == _INPUTS else 0
                    self.model.set_submodule(path, _share_of(module, path, axis, self.ranks))

    def _require_alike(self) -> None:
        """Of what every process holds all."""
        mine = self._held | {
            f"{path}.{name}": parameter
            for path, module in self.model.named_modules()
            if not (isinstance(module, nn.Linear | PackedModule) or is_experts(module))
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        self.ranks.require_alike(identity(mine, self.ranks.device))


def _own_linear(module: nn.Module, ranks: Ranks, along_inputs: bool, is_head: bool) -> nn.Module:
    """A process's part of a linear; the bias of what is summed is the first one's. A head whose outputs do not go
    round is whole."""
    bias = module.bias
    if isinstance(module, nn.Linear):
        uneven = is_head and module.out_features % (HEAD_STEP * ranks.count)
        own = local_linear(module) if not uneven else _whole_linear(module)
        bias = None if bias is None else (whole if along_inputs or uneven else local)(bias.detach())
    else:
        own = _own_packed(module)
        bias = None if bias is None else (whole if along_inputs else local)(bias.detach())
    kept = None if bias is None or (along_inputs and ranks.index) else nn.Parameter(bias, requires_grad=False)
    own.register_parameter("bias", kept)
    return own


def _share_of(module: nn.Module, path: str, axis: int, ranks: Ranks) -> nn.Module:
    """A process's share of a linear that it holds all of: of its outputs, axis 0, or of its inputs, axis 1."""
    packed = isinstance(module, PackedLinear)
    if module.bias is not None or not (type(module) is nn.Linear or (packed and module.format in _SLICED)):
        raise UnknownArchitecture(f"its {path} has a bias, or weights of a kind that is not shared out")
    step = (getattr(module, "group_size", BLOCK) if packed else _ROW_STEP) * ranks.count
    size = module.in_features if axis else module.out_features
    if size % step:
        raise UnknownArchitecture(f"its {path} has {size} {'inputs' if axis else 'outputs'}, no multiple of {step}")
    if not packed:
        own = nn.Linear(1, 1, bias=False, device="meta")
        weight = module.weight.detach().chunk(ranks.count, axis)[ranks.index].contiguous()
        own.weight, own.in_features, own.out_features = nn.Parameter(weight, False), weight.shape[1], weight.shape[0]
        return own.train(module.training)
    weight = module.packed_weight()
    parts = [part if part.dim() < 2 else part.chunk(ranks.count, part.dim() - 2 + axis)[ranks.index].contiguous()
             for part in weight.parts]  # fmt: skip
    return type(module)(type(weight)(*parts, name=path), None, module.switch).train(module.training)


def _require_whole_groups(module: PackedLinear, path: str, count: int) -> None:
    """ValueError for a packed weight whose parts would begin inside of a group."""
    if module.transform is not NONE:
        raise UnknownArchitecture(f"its {path} transforms its inputs, of which each process has a part")
    group = getattr(module, "group_size", BLOCK)
    if module.in_features % (group * count):
        raise ValueError(
            f"{path} has {module.in_features} inputs, {module.in_features / count:g} on each of {count} processes, "
            f"which groups of {group} do not divide: use a tensor-parallel size that divides "
            f"{module.in_features // group}, or smaller groups"
        )


def _whole_linear(linear: nn.Linear) -> nn.Linear:
    weight = whole(linear.weight.detach())
    own = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    own.weight = nn.Parameter(weight, requires_grad=False)
    return own.train(linear.training)


def _own_packed(module: PackedLinear) -> PackedLinear:
    """The packed layer without what tensor parallelism put around it, over the same parameters where they are its
    own: a change of their layout is then one for both."""
    own = copy.copy(module)
    vars(own).pop("forward", None)
    own._parameters = {
        name: nn.Parameter(local(p.detach()), requires_grad=False) if isinstance(p, DTensor) else p
        for name, p in module._parameters.items()
    }
    own._buffers = dict(module._buffers)
    weight = own.packed_weight()
    own.in_features, own.out_features, own._rows = weight.in_features, weight.out_features, weight.out_features
    return own


def _divide_heads(model: nn.Module, count: int) -> None:
    config = text_config(model)
    for name, what in (("num_attention_heads", "heads"), ("num_key_value_heads", "key heads")):
        heads = getattr(config, name, None)
        if heads is None:
            continue
        if heads % count:
            raise ValueError(
                f"{type(model).__name__} has {heads} {what}, which {count} processes of tensor parallelism do not "
                f"divide: use a tensor-parallel size that divides {heads}"
            )
        setattr(config, name, heads // count)


def _require_no_adapters(model: nn.Module) -> None:
    """UnknownArchitecture for LoRA beside linears of which each process has a part."""
    adapted = adapted_names(model)
    if adapted:
        raise UnknownArchitecture(f"processes share it and its {adapted[0]} carries adapters")


def _require_split(model: nn.Module) -> None:
    """UnknownArchitecture unless all linears of all layers are shared, each along the side that is meant."""
    entry = described(model)
    if entry.delta is not None or entry.sinks is not None:
        raise UnknownArchitecture("tensor parallelism shares delta nets or sinks of it")
    if entry.heads != "alike" or any(getattr(entry, name) is not None for name in CPU_FIELDS):
        raise UnknownArchitecture("tensor parallelism shares layers whose heads, keys or inputs differ of it")
    for index in range(text_config(model).num_hidden_layers):
        layer = f"{entry.layers}.{index}"
        whole_on_each = set() if entry.experts is None else set(entry.experts.shared.values())
        for place, styles in _styles(entry, model.get_submodule(layer)).items():
            style = style_of(model, f"{layer}.{place}")
            if style not in styles and not (style is None and place in whole_on_each):
                raise UnknownArchitecture(f"tensor parallelism runs its {layer}.{place} as {style}, which no compiled "
                                          "decoder does")


def _styles(entry: Description, layer: nn.Module) -> dict[str, tuple[str, ...]]:
    """What is shared of a layer, by its place, and how."""
    found = {place: _SPLIT.get(name, ()) for name, place in entry.linears.items()}
    mixture = entry.experts
    if mixture is None or not has_experts(mixture, layer):
        return found
    found = {place: found[place] for name, place in entry.linears.items() if name in OF_ATTENTION}
    found |= {place: _SPLIT[name] for name, place in mixture.shared.items()}
    return {**found, mixture.experts: (EXPERTS,)}


def own_part(model: nn.Module) -> OwnPart:
    """This process's part of a model that several share."""
    return OwnPart(model, Ranks(group_of(model), local(next(model.parameters())).device))
