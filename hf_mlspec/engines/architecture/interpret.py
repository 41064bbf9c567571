"""Which parts of a model does a compiled decoder take, and does it know them all?

The one reader of models: it follows the description of a model's class (known.py), for both decoders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...nn.experts import PackedExperts
from ...nn.linear import KernelLinear, is_dense
from ...nn.nested import NestedEmbedding
from ...nn.packed import PackedLinear
from ...nn.packed_formats import PACKINGS
from ...nn.transforms import HADAMARD, NONE, ORDER, TransformedLinear
from ...ops.compiled_decoder import ACTIVATIONS, MAX_HEAD_DIM, Sizes
from .description import NORMS, Description, not_served
from .known import KNOWN
from .mixture import ExpertBlock, UnreadExperts, expert_block
from .rotary import rope_tables

# Modules of a known class that are not transformers' own, beside the packed linears of registered formats.
_BLOCKS = {nn.Linear, KernelLinear, nn.Embedding, NestedEmbedding, nn.ModuleList, nn.Dropout}
_BLOCKS |= {nn.SiLU, nn.GELU, nn.ReLU, TransformedLinear}
_OF_ATTENTION = ("q", "k", "v", "qkv", "o")
DENSE = (torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


class UnknownArchitecture(ValueError):
    """The compiled decoder cannot run this model; the message says why."""


@dataclass
class Block:
    """One layer of a model: its linears by name, its norms as float32 with any +1 added, None where there is none.

    modules: q, k, v or all three as qkv; o; gate, up or both as gate_up, and down where no `experts` stand for these.
    """

    modules: dict[str, nn.Module]
    norms: list[Tensor | None]  # in the order of description.NORMS
    window: int
    rope_table: int
    experts: ExpertBlock | None = None


@dataclass
class Outline:
    """A model as a decoder sees it before it reads the linears. embedding: the table, or what reads a nested one."""

    sizes: Sizes
    dtype: torch.dtype
    embedding: Tensor | NestedEmbedding
    final_norm: Tensor
    head: nn.Module
    blocks: list[Block]
    rope_kinds: list[str | None]
    heads_together: bool  # whether the norms of q and k are over all heads


def outline(model: nn.Module, device: torch.device = CPU) -> Outline:
    """Sizes, norms and modules of a model that is whole on ``device``.

    UnknownArchitecture names the first thing that does not fit; ValueError experts that no token can go to."""
    require_known(model, device)
    config, entry = model.config, _described(model)
    table = _part(model, entry.embedding)
    if not isinstance(table, NestedEmbedding):
        require_format(table.weight, "embedding")
        table = table.weight.detach()
    kinds = _rope_kinds(entry, config)
    blocks = [
        _block(entry, layer, i, kinds.index(_kind(config, i)) if len(kinds) > 1 else 0, _window(entry, config, i))
        for i, layer in enumerate(_part(model, entry.layers)[: config.num_hidden_layers])
    ]
    sizes = _sizes(entry, model, next((block for block in blocks if block.experts is None), blocks[0]))
    for index, block in enumerate(blocks):
        _require_sizes(sizes, block, index)
        _require_head_norms(entry, sizes, block, index)
    together = entry.head_norms == "all heads" and "q" in entry.norms
    final_norm = norm_weight(_part(model, entry.final_norm), _plus(entry))
    return Outline(sizes, table.dtype, table, final_norm, _part(model, entry.head), blocks, list(kinds), together)


def linear_shape(linear: nn.Module, name: str) -> tuple[int, int]:
    """(in, out) features of a linear that a compiled decoder can read; UnknownArchitecture for another module."""
    if is_dense(linear):  # the weight's shape is what counts: pruning may have left in_features behind
        return linear.weight.shape[1], linear.weight.shape[0]
    rotated = type(linear) is TransformedLinear
    if not rotated and not _is_packed(linear):
        raise UnknownArchitecture(f"its {name} is a {type(linear).__name__}")
    if linear.transform not in ((HADAMARD,) if rotated else (NONE, ORDER, HADAMARD)):
        what = linear.transform.word
        raise UnknownArchitecture(f"its {name} transforms its inputs ({what}), which no compiled decoder does")
    return linear.in_features, linear.out_features


def _is_packed(module: nn.Module) -> bool:
    """Whether a module is the very class that its format registered; whether a decoder reads it, its slots say."""
    packing = PACKINGS.get(module.format) if isinstance(module, PackedLinear) else None
    return packing is not None and type(module) is packing.linear


def table_dtype(table: nn.Module) -> torch.dtype:
    """Of an embedding's rows."""
    return table.dtype if isinstance(table, NestedEmbedding) else table.weight.dtype


def norm_weight(norm: nn.Module, plus: float) -> Tensor:
    """float32, with ``plus`` added: 1 where the architecture stores the difference from 1."""
    return (norm.weight.detach().float() + plus).contiguous()


def require_format(weight: Tensor, name: str) -> None:
    """UnknownArchitecture unless a dense weight can be read in place."""
    if weight.dtype not in DENSE:
        raise UnknownArchitecture(f"its {name} is {weight.dtype}; the compiled decoder takes bfloat16 and float32")
    if not weight.is_contiguous():
        raise UnknownArchitecture(f"its {name} is not contiguous in memory")


def require_known(model: nn.Module, device: torch.device = CPU) -> None:
    """Raise UnknownArchitecture unless a decoder runs this class in its present state and place, which is ``device``.
    """
    entry = _described(model)
    asked = not_served(entry)
    if asked is not None:
        raise UnknownArchitecture(f"its description says {asked}")
    for name in entry.unset:
        if getattr(model.config, name, None) is not None:
            said = getattr(model.config, name)
            raise UnknownArchitecture(f"its config says {name}={said!r}, and the compiled decoder has none")
    if getattr(model.config, "use_bidirectional_attention", False):
        raise UnknownArchitecture("it attends in both directions")
    elsewhere = next((p.device for p in model.parameters() if p.device != device), None)
    if elsewhere is not None:
        if device == CPU:
            raise UnknownArchitecture(f"it is on {elsewhere}, and the compiled decoder runs on the CPU")
        raise UnknownArchitecture(f"it is on {device} and {elsewhere}, and a compiled decoder needs it on one device")
    altered = next(_altered(model, entry), None)
    if altered is not None:
        raise UnknownArchitecture(f"it {altered}")


def _described(model: nn.Module) -> Description:
    entry = KNOWN.get(type(model).__name__)
    if entry is None or not type(model).__module__.startswith(entry.package):
        raise UnknownArchitecture("the compiled decoder does not know this class")
    return entry


def _altered(model: nn.Module, entry: Description) -> Iterator[str]:
    """Why what a module computes may not be what its class says."""
    origins = "transformers.", entry.package
    for path, module in model.named_modules():
        place = f"its module {path}" if path else "the model"
        if module.training and not isinstance(module, nn.ModuleList):  # a slice of a list starts in training mode
            yield f"is in training mode ({place}): call model.eval()"
        if module._forward_hooks or module._forward_pre_hooks:
            yield f"has forward hooks ({place})"
        if "forward" in vars(module):
            yield f"has a replaced forward ({place})"
        known = type(module) in _BLOCKS or type(module) is PackedExperts or _is_packed(module)
        known = known or type(module).__module__.startswith(origins)
        if not known:
            yield f"has a {type(module).__module__}.{type(module).__name__} ({place})"


def _sizes(entry: Description, model: nn.Module, block: Block) -> Sizes:
    config, layer = model.config, _part(model, entry.layers)[0]
    attention, embed = _part(layer, entry.attention), _part(model, entry.embedding)
    kv_heads = config.num_key_value_heads
    activation = _named(config, entry, "activation")
    if activation not in ACTIVATIONS:
        raise UnknownArchitecture(f"the compiled decoder has no activation {activation!r}")
    head_dim = attention.head_dim if "qkv" in block.modules else linear_shape(block.modules["k"], "k")[1] // kv_heads
    if block.experts is not None:
        intermediate = block.experts.inner  # no layer has an MLP
    elif "gate_up" in block.modules:
        intermediate = linear_shape(block.modules["gate_up"], "gate_up_proj")[1] // 2
    else:
        intermediate = linear_shape(block.modules["gate"], "gate")[1]
    if head_dim > MAX_HEAD_DIM:
        raise UnknownArchitecture(f"its heads have {head_dim} elements, the compiled attention takes {MAX_HEAD_DIM}")
    rotary = _part(model, entry.rotary_embedding)
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=linear_shape(_part(model, entry.head), "lm_head")[1],
        embeddings=embed.num_embeddings,
        rotary_dim=rope_tables(rotary, _rope_kinds(entry, config)[:1], 1)[0][0].shape[1] * 2,
        activation=activation,
        norm_eps=_named(config, entry, "norm_eps"),
        embedding_scale=_embedding_scale(entry, config, embed),
        attention_scale=_named(attention, entry, "attention_scale"),
        attention_softcap=_named(attention, entry, "attention_softcap") or 0.0,
        logit_softcap=_named(config, entry, "logit_softcap") or 0.0,
    )


def _part(whole: nn.Module, place: str) -> nn.Module:
    """The module of a model or a layer at a place that its description names."""
    try:
        return whole.get_submodule(place)
    except AttributeError:
        name = type(whole).__name__
        raise UnknownArchitecture(f"its description names {place}, which its {name} does not have") from None


def _named(holder, entry: Description, field: str):
    """What the attribute says that a field names, of a config or an attention; None where the field is None."""
    name = getattr(entry, field)
    if name is None:
        return None
    if not hasattr(holder, name):
        owner = type(holder).__name__
        raise UnknownArchitecture(f"its description names {name} as {field}, which its {owner} does not have")
    return getattr(holder, name)


def _plus(entry: Description) -> float:
    return 1.0 if entry.norm == "rms plus one" else 0.0


def _embedding_scale(entry: Description, config, embed: nn.Module) -> float:
    """Rounded to the weight's dtype, as the embedding of a model does it."""
    if entry.embedding_scale == "none":
        return 1.0
    scale = getattr(embed, "embed_scale", None)
    return float(torch.as_tensor(config.hidden_size**0.5 if scale is None else scale).to(table_dtype(embed)))


def _block(entry: Description, layer: nn.Module, index: int, rope_table: int, window: int) -> Block:
    try:
        experts = None if entry.experts is None else expert_block(entry.experts, layer, index)
    except UnreadExperts as error:
        raise UnknownArchitecture(str(error)) from None
    places = {name: place for name, place in entry.linears.items() if experts is None or name in _OF_ATTENTION}
    modules = {name: _part(layer, place) for name, place in places.items()}
    found = {name: norm_weight(_part(layer, place), _plus(entry)) for name, place in entry.norms.items()}
    return Block(modules, [found.get(name) for name in NORMS], window, rope_table, experts)


def _require_sizes(sizes: Sizes, block: Block, index: int) -> None:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    outputs = {"q": queries, "k": keys, "v": keys, "gate": sizes.intermediate, "up": sizes.intermediate}
    outputs |= {"qkv": queries + 2 * keys, "gate_up": 2 * sizes.intermediate}
    expected = {name: (sizes.hidden, out) for name, out in outputs.items()}
    expected |= {"o": (queries, sizes.hidden), "down": (sizes.intermediate, sizes.hidden)}
    for name, module in block.modules.items():
        inputs, out = linear_shape(module, name)
        if (inputs, out) != expected[name]:
            found = f"{inputs} to {out} features"
            raise UnknownArchitecture(f"{name} of layer {index} maps {found}, {expected[name]} are those of the model")


def _require_head_norms(entry: Description, sizes: Sizes, block: Block, index: int) -> None:
    together = entry.head_norms == "all heads"
    for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads)):
        norm = block.norms[NORMS.index(name)]
        expected = sizes.head_dim * (heads if together else 1)
        if norm is not None and norm.numel() != expected:
            found = f"has {norm.numel()} elements, {expected} are those of {entry.head_norms}"
            raise UnknownArchitecture(f"the {name} norm of layer {index} {found}")


def _kind(config, index: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else None


def _window(entry: Description, config, index: int) -> int:
    if entry.windows == "none":
        return 0
    window = getattr(config, "sliding_window", None) or 0
    everywhere = entry.windows == "every layer"
    return window if everywhere or _kind(config, index) in (None, "sliding_attention") else 0


def _rope_kinds(entry: Description, config) -> list[str | None]:
    """A rotary table per kind of layer, or one for all."""
    return sorted(set(config.layer_types)) if entry.positions == "rotary by layer type" else [None]
