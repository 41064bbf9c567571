"""How does a second view of a model come about that shares whatever it does not replace?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from .adapters import adapted_names, remove_adapters, without_wrapper
from .cast import Cast
from .castable import linears_and_experts, listed, require_dense, require_finite_floats, unfit
from .hooks import keep_hook, offloads
from .nested import NestedEmbedding
from .packed import PackedLinear, PackedModule
from .settings import cache_settings
from .shards import (
    EXPERTS,
    is_sharded,
    local_experts,
    local_linear,
    mesh_of,
    require_castable_shards,
    split_as,
    split_experts,
    style_of,
    without_bias,
)
from .transforms import NONE, Transform

_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# What a past generate() left on a model: a compiled call bound to it and a static KV cache.
_HELD_BY_GENERATE = ("_compiled_call", "_last_compile_config", "_cache")
_HEAD = "the output head"  # why it is kept, where the caller said so
_CAPTURE_MARK = "_output_capturing_hooks_installed"  # transformers installs its hooks again where this is missing


def direct_cast(
    model: PreTrainedModel, format: str = "mxfp4", *, rule: str = "ocp_floor", cast_head: bool = True,
    materialize: bool = False, activation_bits: int | None = None,
) -> PreTrainedModel:
    """A draft of ``model`` with its linear weights rounded to ``format``, all else shared (ML-SpecQD, section 3).

    format: "mxfp4": every ``nn.Linear`` becomes an ``Mxfp4Linear``, every module of experts a ``PackedExperts`` (4.25
        bits per weight). "int3", "int2", "ternary": ``PlanesLinear`` and ``PlaneExperts`` (3.25, 2.25, 2.25 bits,
        formats/planes/codes.py). Of a nested model the exact weights are cast.
    rule: of MXFP4 (formats/mxfp4.py).
    cast_head: False keeps the output head; a cast head is no longer tied to the embedding.
    materialize: also keep the rounded weights in the model's dtype, for machines without kernels.
    activation_bits: 8 quantizes the inputs of MXFP4 layers to int8, one scale per row and block of 32 (the paper's CPU
        kernel), 16 rounds them to bfloat16; None is 8 for MXFP4 on a CPU, else 16. All layers share one switch.

    Of a model with adapters (PEFT) the plain base is cast. Embeddings, norms and biases are shared; ``model`` is
    unchanged. Layers that cannot be cast (in_features not a multiple of the group, Conv1D, unknown experts) are
    shared, with one warning. Of weights that tensor parallelism shares between processes each casts its part; any
    other result can be saved. TypeError for other objects or dtypes that cannot be cast; ValueError for an
    unknown format, rule or activation_bits, a quantized or offloaded model, NaN or Inf weights, or no layer to cast.
    """
    model = without_wrapper(model, "direct_cast")
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"direct_cast takes a transformers PreTrainedModel, not {type(model).__name__}")
    cast = Cast.of(format, rule, activation_bits, model.device)
    model = _plain_base(model)
    head, kept = model.get_output_embeddings(), dict(unfit(model, cast.group_size, cast.experts))
    kept |= {} if cast_head else {name: _HEAD for name, module in model.named_modules() if module is head}
    paths = [name for name, _ in linears_and_experts(model) if name not in kept]
    require_castable_shards(model, cast.group_size, paths)
    require_finite_floats(model, kept)
    draft = share(model)
    if not _replace(draft, cast, kept, model.dtype if materialize else None):
        raise ValueError(_nothing_to_cast(model, kept))
    if _is_cast(draft.get_output_embeddings(), cast):
        untie_head(draft)
    kind = transform_alike(draft)
    attach_quantizer(draft, {**cast.settings, "modules_to_not_convert": sorted(kept), "transform": kind.word})
    _tell_kept(model, {name: why for name, why in kept.items() if why != _HEAD})
    return draft


def _plain_base(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose weights can be cast, or a view of it without its adapters."""
    require_dense(model, adapters=True, or_sharded=True, or_offloaded=True)
    return remove_adapters(share(model)) if adapted_names(model) else model


def transform_alike(model: nn.Module) -> Transform:
    """Give the packed layers of a model the kind of transform that one of them has, where they have none: so a
    checkpoint has one word for all. -> the kind. ValueError where they have several."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    kinds = {module.transform.word: module.transform for module in packed if module.transform is not NONE}
    if len(kinds) > 1:
        raise ValueError(f"{type(model).__name__}: its packed layers transform their inputs as {sorted(kinds)}")
    (kind,) = kinds.values() or (NONE,)
    for module in packed:
        if module.transform is NONE and kind is not NONE:
            module.transform_(kind)
    return kind


def _nothing_to_cast(model: PreTrainedModel, kept: dict[str, str]) -> str:
    return f"{type(model).__name__} holds no nn.Linear that can be cast: {listed(kept) or 'none at all'}"


def early_exit(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A draft of ``model`` with its first ``num_layers`` decoder layers, its final norm and its head; all tensors are
    shared.

    Its config is a copy with ``num_hidden_layers`` and the per-layer lists cut to length. Raises ValueError unless
    ``1 <= num_layers < config.num_hidden_layers``, or if the decoder's list of layers is not found.
    """
    model = without_wrapper(model, "early_exit")
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    if not isinstance(num_layers, int) or not 1 <= num_layers < total:
        raise ValueError(
            f"early_exit: num_layers is {num_layers!r}, {type(model).__name__} has {total}: choose 1 to {total - 1}"
        )
    name = layer_list_name(model, total, "early_exit")
    view = share(model)
    view.set_submodule(name, view.get_submodule(name)[:num_layers])
    config = view.config.get_text_config(decoder=True)
    for key, value in list(vars(config).items()):
        if "layer" in key and isinstance(value, list) and len(value) == total:
            setattr(config, key, value[:num_layers])
    config.num_hidden_layers = num_layers
    if shared := getattr(config, "num_kv_shared_layers", None):  # the last ones read keys and values of those before
        config.num_kv_shared_layers = max(0, shared - (total - num_layers))
    _cut_inputs_of_layers(view, num_layers / total)
    return view


def _cut_inputs_of_layers(view: PreTrainedModel, share_of_layers: float) -> None:
    """Where a table holds inputs of all layers side by side (Gemma 3n, Gemma 4): those of the first ones, as views."""
    for name, module in view.named_modules():
        cut = {"embed_tokens_per_layer": (1, "embedding_dim"), "per_layer_model_projection": (0, "out_features")}
        axis, size = cut.get(name.rpartition(".")[2], (0, None))
        if size is None:
            continue
        weight = module._parameters.get("weight")
        if weight is None:
            raise ValueError(f"early_exit: {name} is a {type(module).__name__}, of which no part can be shared")
        width = round(weight.shape[axis] * share_of_layers)
        module.weight = nn.Parameter(weight.detach().narrow(axis, 0, width), requires_grad=False)
        setattr(module, size, width)


def resident_bytes(model: nn.Module, shared_with: nn.Module | None = None) -> int:
    """Bytes of the distinct storages behind ``model``'s parameters and buffers (and the head that a nested embedding
    reads), without those that ``shared_with`` holds too.
    """
    own = dict(_storages(model))
    for key, _ in _storages(shared_with) if shared_with is not None else ():
        own.pop(key, None)
    return sum(own.values())


def _storages(model: nn.Module) -> Iterator[tuple[tuple[torch.device, int], int]]:
    tables = (module for module in model.modules() if isinstance(module, NestedEmbedding))
    read = (tensor for table in tables for tensor in table.head.parameters())  # which a cast has nowhere else
    for tensor in (*model.parameters(), *model.buffers(), *read):
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            yield (tensor.device, storage.data_ptr()), storage.nbytes()


def share(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module tree, of the configs, and of nothing else: no tensor, no hook, no state of a past
    generate()."""
    memo: dict[int, object] = {id(vars(model)[name]): None for name in _HELD_BY_GENERATE if vars(model).get(name)}
    for module in model.modules():
        tables = (vars(module), module._parameters, module._buffers)
        memo.update((id(t), t) for table in tables for t in table.values() if isinstance(t, torch.Tensor))
        memo.update((id(vars(module)[name]), type(vars(module)[name])()) for name in _HOOK_TABLES)
        if offloads(module):  # what it brings may be all of the model's weights
            memo[id(module._hf_hook)] = module._hf_hook
    view = copy.deepcopy(model, memo)
    for module in view.modules():
        for name in (*_HELD_BY_GENERATE, _CAPTURE_MARK):
            vars(module).pop(name, None)
    return view


def _replace(draft: nn.Module, cast: Cast, kept: dict[str, str], dense: torch.dtype | None) -> int:
    done: dict[int, nn.Module] = {}
    for name, module in list(linears_and_experts(draft)):
        if name in kept:
            continue
        if id(module) not in done:
            layer = _cast_part(draft, module, name, cast) if is_sharded(module) else cast.layer(module, name)
            layer = keep_hook(module, layer)
            done[id(module)] = layer if dense is None else layer.materialize(dense)
        draft.set_submodule(name, done[id(module)])
    return len(done)


def _cast_part(model: nn.Module, module: nn.Module, name: str, cast: Cast) -> nn.Module:
    """Of this process's part of a linear, dense or nested, or of experts."""
    mesh = mesh_of(model)
    if style_of(model, name) == EXPERTS:
        return split_experts(cast.layer(local_experts(module), name), mesh)
    own = local_linear(module) if isinstance(module, nn.Linear) else without_bias(module)
    return split_as(cast.layer(own, name), module, style_of(model, name), mesh)


def _is_cast(head: nn.Module | None, cast: Cast) -> bool:
    return isinstance(head, PackedLinear) and head.format == cast.switch.weights


def untie_head(draft: PreTrainedModel) -> None:
    """Say that a model's head has a weight of its own, in its configs and to what saves it."""
    for config in (draft.config, draft.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    for module in draft.modules():
        if isinstance(module, PreTrainedModel) and getattr(module, "all_tied_weights_keys", None):
            module.all_tied_weights_keys = module.get_expanded_tied_weights_keys(all_submodels=True)


def attach_quantizer(model: PreTrainedModel, settings: dict) -> None:
    """What from_pretrained sets: save_pretrained then writes quantization_config, and dtype casts are refused.

    settings: of an MLSpecConfig. The format of keys and values stays what it was.
    """
    settings = {**cache_settings(model), **settings}
    quantizer = AutoHfQuantizer.from_config({"quant_method": "mlspec", **settings}, pre_quantized=True)
    model.hf_quantizer, model.is_quantized = quantizer, True
    model.quantization_method = quantizer.quantization_config.quant_method
    model.config.quantization_config = quantizer.quantization_config


def detach_quantizer(model: PreTrainedModel) -> None:
    """Undo ``attach_quantizer``, or what from_pretrained did."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def layer_list_name(model: nn.Module, total: int, action: str) -> str:
    """The path of a model's list of so many decoder layers; ValueError, which begins with ``action``, without one."""
    lists = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    found = [name for name, layers in lists if len(layers) == total]
    if not found:
        raise ValueError(f"{action}: {type(model).__name__} has no nn.ModuleList of its {total} decoder layers")
    return min(found, key=lambda name: name.count("."))


def _tell_kept(model: PreTrainedModel, kept: dict[str, str]) -> None:
    if kept:
        warnings.warn(
            f"direct_cast: {len(kept)} weights of {type(model).__name__} stay as they are, shared: {listed(kept)}",
            UserWarning,
            stacklevel=3,
        )


def is_view(level: nn.Module, target: nn.Module) -> bool:
    """Whether a level is a direct cast or an early exit of the target: whatever is not packed is the target's own."""
    if not isinstance(level, type(target)) or level is target:
        return False
    rows, own = (getattr(model.get_input_embeddings(), "weight", None) for model in (level, target))
    if rows is not own and not isinstance(level.get_input_embeddings(), PackedModule):
        return False  # as of most models, which spares looking at the rest
    known = {id(parameter) for parameter in target.parameters()}
    for module in level.modules():
        if isinstance(module, PackedModule):
            known |= {id(part) for name in module.names for part in module.held(name) if part is not None}
    return all(id(parameter) in known for parameter in level.parameters())
