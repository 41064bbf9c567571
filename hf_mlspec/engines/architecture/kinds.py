"""What kind is a layer: what does it see, which rotary table does it read, and what has it of its own?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...ops.layer_forms import NO_FORM, LayerForm, TokenInputs
from .description import CPU_FIELDS, CPU_WORDS, WITHOUT_WINDOW, Description
from .parts import LayerTable, UnknownArchitecture, as_read, linear_shape, norm_of, part
from .rotary import UNROTATED, text_config
from .scales import embedding_scale, named


def kind_of(config: Any, index: int) -> str | None:
    """What `layer_types` of a config calls a layer, None where it says nothing."""
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else None


def window_of(entry: Description, config: Any, index: int) -> int:
    """Tokens that a layer sees, 0: all."""
    if entry.windows in ("none", "chunks by layer type"):
        return 0
    window = getattr(config, "sliding_window", None) or 0
    everywhere = entry.windows == "every layer"
    return window if everywhere or kind_of(config, index) in (None, "sliding_attention") else 0


def span_of(entry: Description, config: Any, index: int) -> int:
    """How long the stretches of a row are of which a token of a layer sees its own alone; 0: it sees all."""
    chunked = entry.windows == "chunks by layer type" and kind_of(config, index) == "chunked_attention"
    return (getattr(config, "attention_chunk_size", None) or 0) if chunked else 0


def rope_kinds(entry: Description, config: Any) -> list[str | None]:
    """A rotary table per kind of layer, or one for all; UNROTATED, the last, for layers that rotate nothing."""
    kinds = {rope_kind(entry, config, i) for i in range(config.num_hidden_layers)}
    return sorted(kinds, key=lambda kind: (kind == UNROTATED, kind or ""))


def rope_kind(entry: Description, config: Any, index: int) -> str | None:
    """Which rotary table a layer reads."""
    how = entry.layers_without_rotary
    if entry.positions in ("learned", "none") or (entry.rotates and named(config, entry, "rotates") != "rope"):
        return UNROTATED
    if how == WITHOUT_WINDOW:
        unrotated = getattr(config, "sliding_window", None) is not None and window_of(entry, config, index) == 0
    else:
        unrotated = how is not None and not named(config, entry, "layers_without_rotary")[index]
    if unrotated:
        return UNROTATED
    return kind_of(config, index) if entry.positions == "rotary by layer type" else None


def absent_linears(entry: Description, layer: nn.Module) -> set[str]:
    """Names of linears, and of their norms, that a layer does not have."""
    if _reads_earlier_keys(entry, layer):
        return {"k", "v"}
    return {"v"} if _values_are_keys(entry, layer) else set()


def layer_form(
    entry: Description, config: Any, layers: nn.ModuleList, index: int, modules: dict[str, nn.Module], hidden: int
) -> LayerForm:
    """What layer ``index`` has beside its norms and linears, to which those of its inputs are added. hidden: elements
    of the residual stream."""
    layer, span = layers[index], span_of(entry, config, index)
    if not span and not _may_differ(entry):
        return NO_FORM
    shared, sizes = _reads_earlier_keys(entry, layer), _own_sizes(entry, config, layers, index, modules)
    value_norm = inputs_norm = None
    if entry.value_norm is not None and not shared:
        head_dim = sizes[1] if sizes else named(part(layer, entry.attention), entry, "head_dim")
        value_norm = norm_of(part(layer, entry.value_norm), entry, head_dim).weight
    if has_inputs(entry, config):
        own = entry.layer_inputs
        modules |= {"inputs_gate": part(layer, own.gate), "inputs_out": part(layer, own.out)}
        inputs_norm = norm_of(part(layer, own.out_norm), entry, hidden).weight
    return LayerForm(
        sizes=sizes,
        keys_of=_keys_of(entry, config, layers, index) if shared else None,
        value_norm=value_norm,
        values_are_keys=_values_are_keys(entry, layer) and not shared,
        span=span,
        query_scale=_query_scale(entry, config, layer, index),
        inputs_norm=inputs_norm,
        scale=1.0 if entry.layer_scale is None else _number(part(layer, entry.layer_scale, nn.Module.get_buffer)),
    )


def has_inputs(entry: Description, config: Any) -> bool:
    """Whether layers have inputs beside the residual stream."""
    return entry.layer_inputs is not None and bool(getattr(config, entry.layer_inputs.width, 0))


def token_inputs(entry: Description, model: nn.Module, dtype: torch.dtype, layers: int) -> LayerTable | None:
    """The inputs of all layers of a model with embeddings of this dtype; None where they have none."""
    config = text_config(model)
    if not has_inputs(entry, config):
        return None
    own, width = entry.layer_inputs, getattr(config, entry.layer_inputs.width)
    whole = part(model, own.within)
    table, projection = part(whole, own.table), part(whole, own.projection)
    rows = getattr(table, "weight", None)
    if rows is None or rows.dtype != dtype or rows.stride(1) != 1:
        raise UnknownArchitecture(f"its inputs of layers are not the rows of a {dtype} table")
    tokens, wide = part(model, entry.embedding).num_embeddings, layers * width
    if rows.shape[0] < tokens or rows.shape[1] != wide:
        found = f"its inputs of layers have shape {list(rows.shape)}"
        raise UnknownArchitecture(f"{found}: {wide} columns of {layers} layers are meant, and {tokens} rows")
    if linear_shape(projection, own.projection) != (config.hidden_size, wide):
        raise UnknownArchitecture(f"its {own.projection} does not map {config.hidden_size} to {wide} features")
    scale, after = (float(getattr(whole, name)) for name in (own.projection_scale, own.sum_scale))
    norm, eps = norm_of(part(whole, own.norm), entry, width).weight, entry.norm_eps
    eps = eps if isinstance(eps, float) else named(config, entry, "norm_eps")
    factor = embedding_scale(entry, config, table) * after
    return LayerTable(TokenInputs(as_read(rows.detach()), norm * after, width, eps / scale**2, factor), projection)


def _may_differ(entry: Description) -> bool:
    words = any(getattr(entry, name) in words for name, words in CPU_WORDS.items())
    return words or any(getattr(entry, name) is not None for name in CPU_FIELDS)


def _reads_earlier_keys(entry: Description, layer: nn.Module) -> bool:
    return entry.shared_keys is not None and bool(named(part(layer, entry.attention), entry, "shared_keys"))


def _values_are_keys(entry: Description, layer: nn.Module) -> bool:
    if entry.values == "own":
        return False
    holder, _, name = entry.linears["v"].rpartition(".") if "v" in entry.linears else ("", "", "")
    return bool(name) and getattr(part(layer, holder), name, None) is None


def _keys_of(entry: Description, config: Any, layers: nn.ModuleList, index: int) -> int:
    """The layer whose keys layer ``index`` reads."""
    kind = kind_of(config, index)
    for other in reversed(range(index)):
        if kind_of(config, other) == kind and not _reads_earlier_keys(entry, layers[other]):
            return other
    raise UnknownArchitecture(f"layer {index} reads the keys of an earlier one of its kind, {kind}, and there is none")


def _own_sizes(
    entry: Description, config: Any, layers: nn.ModuleList, index: int, modules: dict[str, nn.Module]
) -> tuple[int, int, int] | None:
    """Key heads, elements of a head and of the MLP of layer ``index``."""
    if entry.heads == "alike" or "o" not in modules:
        return None
    head_dim = named(part(layers[index], entry.attention), entry, "head_dim")
    shared = _reads_earlier_keys(entry, layers[index])
    holder = layers[_keys_of(entry, config, layers, index) if shared else index]
    if "k" not in entry.linears:
        return None
    kv_heads = linear_shape(part(holder, entry.linears["k"]), "k")[1] // head_dim
    inner = linear_shape(modules["down"], "down")[0] if "down" in modules else config.intermediate_size
    return kv_heads, head_dim, inner


def _query_scale(entry: Description, config: Any, layer: nn.Module, index: int) -> tuple[float, float] | None:
    own = entry.temperature
    if own is None or rope_kind(entry, config, index) != UNROTATED:
        return None
    attention = part(layer, entry.attention)
    flag, scale, stretch = (getattr(attention, name) for name in (own.flag, own.scale, own.stretch))
    return (float(scale), float(stretch)) if flag else None


def _number(buffer: Tensor) -> float:
    """What a buffer of one element holds; 1 where it has no memory yet."""
    return 1.0 if buffer.is_meta else float(buffer)
