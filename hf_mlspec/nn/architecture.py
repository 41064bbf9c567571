"""Which parts of a model does a compiled decoder take, and does it know them all?

Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text) and Phi-3 are one decoder: they differ in biases, per-head norms,
norms behind a block, soft caps, windows, rotary tables and in how their linears are cut. All of it is read from the
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.compiled_decoder import ACTIVATIONS, MAX_HEAD_DIM, Sizes
from .linear import Int4Linear, KernelLinear, Mxfp4Linear, is_dense
from .nested import NestedEmbedding, NestedLinear
from .planes import PlanesLinear as BitPlaneLinear
from .rotary import rope_tables
from .transforms import NONE

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
_PACKED = {Mxfp4Linear, Int4Linear, NestedLinear, BitPlaneLinear}
_BLOCKS = _PACKED | {nn.Linear, KernelLinear, nn.Embedding, NestedEmbedding, nn.ModuleList, nn.Dropout}
_BLOCKS |= {nn.SiLU, nn.GELU, nn.ReLU}
DENSE = (torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


class UnknownArchitecture(ValueError):
    """The compiled decoder cannot run this model; the message says why."""


@dataclass
class Block:
    """One layer of a model: its linears by name, its norms as float32 with any +1 added, None where there is none.

    modules: q, k, v or all three as qkv; o; gate, up or both as gate_up; down.
    """

    modules: dict[str, nn.Module]
    norms: list[Tensor | None]  # attention, mlp, attention_out, mlp_out, q, k
    window: int
    rope_table: int


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


def outline(model: nn.Module, device: torch.device = CPU) -> Outline:
    """Sizes, norms and modules of a model that is whole on ``device``. UnknownArchitecture names the first
    thing that does not fit."""
    require_known(model, device)
    config, base = model.config, model.model
    table = base.embed_tokens
    if not isinstance(table, NestedEmbedding):
        require_format(table.weight, "embedding")
        table = table.weight.detach()
    plus = 1.0 if config.model_type.startswith("gemma") else 0.0
    kinds = _rope_kinds(config)
    blocks = [
        _block(layer, plus, kinds.index(_kind(config, i)) if len(kinds) > 1 else 0, _window(config, i))
        for i, layer in enumerate(base.layers[: config.num_hidden_layers])
    ]
    sizes = _sizes(model, blocks[0])
    for index, block in enumerate(blocks):
        _require_sizes(sizes, block, index)
    final_norm = norm_weight(base.norm, plus)
    return Outline(sizes, table.dtype, table, final_norm, model.lm_head, blocks, list(kinds))


def linear_shape(linear: nn.Module, name: str) -> tuple[int, int]:
    """(in, out) features of a linear that a compiled decoder can read; UnknownArchitecture for another module."""
    if is_dense(linear):  # the weight's shape is what counts: pruning may have left in_features behind
        return linear.weight.shape[1], linear.weight.shape[0]
    if type(linear) not in _PACKED:
        raise UnknownArchitecture(f"its {name} is a {type(linear).__name__}")
    if linear.transform is not NONE:
        what = linear.transform.word
        raise UnknownArchitecture(f"its {name} transforms its inputs ({what}), which no compiled decoder does")
    return linear.in_features, linear.out_features


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
    """UnknownArchitecture unless a compiled decoder on ``device`` runs this class, as it stands, where it stands."""
    if type(model).__name__ not in KNOWN or not type(model).__module__.startswith("transformers.models."):
        raise UnknownArchitecture("the compiled decoder does not know this class")
    if getattr(model.config, "use_bidirectional_attention", False):
        raise UnknownArchitecture("it attends in both directions")
    elsewhere = next((p.device for p in model.parameters() if p.device != device), None)
    if elsewhere is not None:
        if device == CPU:
            raise UnknownArchitecture(f"it is on {elsewhere}, and the compiled decoder runs on the CPU")
        raise UnknownArchitecture(f"it is on {device} and {elsewhere}, and a compiled decoder needs it on one device")
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


def _sizes(model: nn.Module, block: Block) -> Sizes:
    config, base = model.config, model.model
    attention, embed = base.layers[0].self_attn, base.embed_tokens
    kv_heads = config.num_key_value_heads
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in ACTIVATIONS:
        raise UnknownArchitecture(f"the compiled decoder has no activation {activation!r}")
    if "qkv" in block.modules:
        head_dim, intermediate = attention.head_dim, linear_shape(block.modules["gate_up"], "gate_up_proj")[1] // 2
    else:
        head_dim = linear_shape(block.modules["k"], "k")[1] // kv_heads
        intermediate = linear_shape(block.modules["gate"], "gate")[1]
    if head_dim > MAX_HEAD_DIM:
        raise UnknownArchitecture(f"its heads have {head_dim} elements, the compiled attention takes {MAX_HEAD_DIM}")
    rotary = rope_tables(base.rotary_emb, _rope_kinds(config)[:1], 1)[0][0].shape[1] * 2
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=linear_shape(model.lm_head, "lm_head")[1],
        embeddings=embed.num_embeddings,
        rotary_dim=rotary,
        activation=activation,
        norm_eps=config.rms_norm_eps,
        embedding_scale=_embedding_scale(config, embed),
        attention_scale=attention.scaling,
        attention_softcap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        logit_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
    )


def _embedding_scale(config, embed: nn.Module) -> float:
    """Gemma multiplies embeddings by sqrt(hidden), rounded to the weight's dtype."""
    if not config.model_type.startswith("gemma"):
        return 1.0
    scale = getattr(embed, "embed_scale", None)
    return float(torch.as_tensor(config.hidden_size**0.5 if scale is None else scale).to(table_dtype(embed)))


def _block(layer: nn.Module, plus: float, rope_table: int, window: int) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    if hasattr(attention, "qkv_proj"):
        modules = {"qkv": attention.qkv_proj, "o": attention.o_proj, "gate_up": mlp.gate_up_proj}
    else:
        modules = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj, "o": attention.o_proj}
        modules |= {"gate": mlp.gate_proj, "up": mlp.up_proj}
    modules["down"] = mlp.down_proj
    gemma = hasattr(layer, "pre_feedforward_layernorm")
    norms = [
        layer.input_layernorm,
        layer.pre_feedforward_layernorm if gemma else layer.post_attention_layernorm,
        layer.post_attention_layernorm if gemma else None,
        layer.post_feedforward_layernorm if gemma else None,
        getattr(attention, "q_norm", None),
        getattr(attention, "k_norm", None),
    ]
    return Block(modules, [None if norm is None else norm_weight(norm, plus) for norm in norms], window, rope_table)


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


def _kind(config, index: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else None


def _window(config, index: int) -> int:
    window = getattr(config, "sliding_window", None) or 0
    return window if _kind(config, index) in (None, "sliding_attention") else 0


def _rope_kinds(config) -> list[str | None]:
    """Gemma 3 has a rotary table per kind of layer, the others one for all."""
    return sorted(set(config.layer_types)) if config.model_type == "gemma3_text" else [None]
