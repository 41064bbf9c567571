"""Which parts of a model does the compiled decoder take, and does it know them all?

Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and Phi-3 are one decoder: they differ in biases, per-head norms,
norms behind a block, soft caps, windows, rotary tables and in how their linears are cut. All of it is read from the
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..ops.compiled_decoder import ACTIVATIONS, MAX_HEAD_DIM, Sizes, Weight
from .compiled_weights import UnknownArchitecture, cut_weight, norm_weight, read_weight, require_format
from .linear import Int4Linear, KernelLinear, Mxfp4Linear

KNOWN = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
}
# Modules of a known class that are not transformers' own.
_BLOCKS = {nn.Linear, KernelLinear, Mxfp4Linear, Int4Linear, nn.Embedding, nn.ModuleList, nn.Dropout}
_BLOCKS |= {nn.SiLU, nn.GELU, nn.ReLU}


@dataclass
class Layer:
    """Linears by name (q, k, v, o, gate, up, down), norms as float32 with any +1 added, None where there is none."""

    linears: dict[str, Weight]
    norms: list[Tensor | None]  # attention, mlp, attention_out, mlp_out, q, k
    window: int
    rope_table: int


@dataclass
class Architecture:
    """Everything the compiled decoder needs of a model but its rotary tables."""

    sizes: Sizes
    dtype: torch.dtype
    embedding: Tensor
    final_norm: Tensor
    head: Weight
    layers: list[Layer]
    rope_kinds: list[str | None] = field(default_factory=list)


def read(model: nn.Module) -> Architecture:
    """The architecture of a model, its weights shared. UnknownArchitecture names the first thing that does not fit."""
    require_known(model)
    config, base = model.config, model.model
    dtype = base.embed_tokens.weight.dtype
    require_format(base.embed_tokens.weight, "embedding")
    plus = 1.0 if config.model_type.startswith("gemma") else 0.0
    kinds = _rope_kinds(config)
    layers = [
        _layer(layer, plus, kinds.index(_kind(config, i)) if len(kinds) > 1 else 0, _window(config, i))
        for i, layer in enumerate(base.layers[: config.num_hidden_layers])
    ]
    head = read_weight(model.lm_head, "lm_head")
    sizes = _sizes(model, layers[0], head)
    for index, layer in enumerate(layers):
        _require_sizes(sizes, layer, index)
    return Architecture(
        sizes, dtype, base.embed_tokens.weight, norm_weight(base.norm, plus), head, layers, list(kinds)
    )


def rope_tables(rotary: nn.Module, kinds: list[str | None], positions: int) -> list[tuple[Tensor, Tensor]]:
    """cos and sin float32 ``[positions, rotary_dim / 2]`` of every kind, from a model's own rotary embedding."""
    ids = torch.arange(positions)[None]
    like = torch.zeros(1, 1, 1)  # float32: the tables are not rounded to the model's dtype
    tables = []
    for kind in kinds:
        cos, sin = rotary(like, ids) if kind is None else rotary(like, ids, kind)
        half = cos.shape[-1] // 2
        tables.append((cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()))
    return tables


def require_known(model: nn.Module) -> None:
    """UnknownArchitecture unless the compiled decoder runs this class, as it stands, where it stands."""
    if type(model).__name__ not in KNOWN or not type(model).__module__.startswith("transformers.models."):
        raise UnknownArchitecture("the compiled decoder does not know this class")
    if getattr(model.config, "use_bidirectional_attention", False):
        raise UnknownArchitecture("it attends in both directions")
    elsewhere = next((p.device for p in model.parameters() if not p.is_cpu), None)
    if elsewhere is not None:
        raise UnknownArchitecture(f"it is on {elsewhere}, and the compiled decoder runs on the CPU")
    altered = next(_altered(model), None)
    if altered is not None:
        raise UnknownArchitecture(f"it {altered}")


def _altered(model: nn.Module) -> Iterator[str]:
    """Why what a module computes may not be what its class says."""
    for path, module in model.named_modules():
        place = f"its module {path}" if path else "the model"
        if module.training and not isinstance(module, nn.ModuleList):  # a slice of a list starts in training mode
            yield f"is in training mode ({place}): call model.eval()"
        if module._forward_hooks or module._forward_pre_hooks:
            yield f"has forward hooks ({place})"
        if "forward" in vars(module):
            yield f"has a replaced forward ({place})"
        if type(module) not in _BLOCKS and not type(module).__module__.startswith("transformers."):
            yield f"has a {type(module).__module__}.{type(module).__name__} ({place})"


def _sizes(model: nn.Module, layer: Layer, head: Weight) -> Sizes:
    config, base = model.config, model.model
    attention, embed = base.layers[0].self_attn, base.embed_tokens
    kv_heads = config.num_key_value_heads
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise UnknownArchitecture(f"the compiled decoder has no activation {activation!r}")
    head_dim = layer.linears["k"].out_features // kv_heads
    if head_dim > MAX_HEAD_DIM:
        raise UnknownArchitecture(f"its heads have {head_dim} elements, the compiled attention takes {MAX_HEAD_DIM}")
    rotary = rope_tables(base.rotary_emb, _rope_kinds(config)[:1], 1)[0][0].shape[1] * 2
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=layer.linears["gate"].out_features,
        vocab=head.out_features,
        embeddings=embed.num_embeddings,
        rotary_dim=rotary,
        activation=activation,
        norm_eps=config.rms_norm_eps,
        embedding_scale=_embedding_scale(config, embed),
        attention_scale=attention.scaling,
        attention_softcap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


def _embedding_scale(config, embed: nn.Embedding) -> float:
    """Gemma multiplies embeddings by sqrt(hidden), rounded to the weight's dtype."""
    if not config.model_type.startswith("gemma"):
        return 1.0
    scale = getattr(embed, "embed_scale", None)
    return float(torch.as_tensor(config.hidden_size**0.5 if scale is None else scale).to(embed.weight.dtype))


def _layer(layer: nn.Module, plus: float, rope_table: int, window: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):
        dim, heads = attention.head_dim, attention.config.num_attention_heads
        cuts = [heads * dim, attention.num_key_value_heads * dim, attention.num_key_value_heads * dim]
        q, k, v = cut_weight(attention.qkv_proj, cuts, "qkv_proj")
        half = mlp.gate_up_proj.out_features // 2
        gate, up = cut_weight(mlp.gate_up_proj, [half, half], "gate_up_proj")
    else:
        q, k, v = (read_weight(getattr(attention, f"{name}_proj"), name) for name in "qkv")
        gate, up = read_weight(mlp.gate_proj, "gate"), read_weight(mlp.up_proj, "up")
    linears = {"q": q, "k": k, "v": v, "o": read_weight(attention.o_proj, "o"), "gate": gate, "up": up}
    linears["down"] = read_weight(mlp.down_proj, "down")
    for group in (("q", "k", "v"), ("gate", "up")):
        if len({(linears[n].format, linears[n].group_size, linears[n].activation_bits) for n in group}) > 1:
            raise UnknownArchitecture(f"its {', '.join(group)} projections have weights of different formats")
    gemma = hasattr(layer, "pre_feedforward_layernorm")
    norms = [
        layer.input_layernorm,
        layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm,
        layer.post_attention_layernorm if gemma else None,
        layer.post_feedforward_layernorm if gemma else None,
        getattr(attention, "q_norm", None),
        getattr(attention, "k_norm", None),
    ]
    return Layer(linears, [None if norm is None else norm_weight(norm, plus) for norm in norms], window, rope_table)


def _require_sizes(sizes: Sizes, layer: Layer, index: int) -> None:
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    outputs = {"q": queries, "k": keys, "v": keys, "gate": sizes.intermediate, "up": sizes.intermediate}
    expected = {name: (sizes.hidden, out) for name, out in outputs.items()}
    expected |= {"o": (queries, sizes.hidden), "down": (sizes.intermediate, sizes.hidden)}
    for name, weight in layer.linears.items():
        if (weight.in_features, weight.out_features) != expected[name]:
            found = f"{weight.in_features} to {weight.out_features} features"
            raise UnknownArchitecture(f"{name} of layer {index} maps {found}, {expected[name]} are those of the model")


def _kind(config, index: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else None


def _window(config, index: int) -> int:
    window = getattr(config, "sliding_window", None) or 0
    return window if _kind(config, index) in (None, "sliding_attention") else 0


def _rope_kinds(config) -> list[str | None]:
    """Gemma 3 has a rotary table per kind of layer, the others one for all."""
    return sorted(set(config.layer_types)) if config.model_type == "gemma3_text" else [None]
