"""Which parameter of transformers' model is a tensor of a GGUF file, and which configuration does the file describe?

Names and sizes of dense decoders; h, f, v, q, k: hidden, intermediate, vocabulary, all heads of queries, of keys:

    token_embd.weight    model.embed_tokens.weight    [v, h]      output.weight   lm_head.weight, absent when tied
    output_norm.weight   model.norm.weight            [h]
    blk.N.attn_q ...     model.layers.N.self_attn.q_proj ...      blk.N.ffn_up ...   model.layers.N.mlp.up_proj ...

llama.cpp rotates neighbouring rows of a head in models of Llama's kind, transformers the halves of a head. Therefore
the rows of their attn_q and attn_k, and of the biases, lie in another order: row 2 j + t of a head is transformers'
row t * head_dim / 2 + j (`row_orders`). Qwen's lie as they are.

Source: ggml's docs/gguf.md and llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .gguf_file import GgufFile, GgufTensor
from .gguf_rope import rope_parameters


@dataclass(frozen=True)
class Architecture:
    """One that llama.cpp and transformers both have.

    model_type, cls: transformers' words. halves: whether rows of queries and keys lie in another order. head_norms:
    whether the heads of queries and keys have norms. biases: of the projections, by ggml's names: those that are
    always there. optional_biases: the configuration's word for what may be there, all or none.
    """

    model_type: str
    cls: str
    halves: bool = False
    head_norms: bool = False
    biases: tuple[str, ...] = ()
    optional_biases: Mapping[str, tuple[str, ...]] | None = None


_ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", halves=True,
        optional_biases={"attention_bias": _ATTENTION, "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")},
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", biases=_ATTENTION[:3]),
    "qwen3": Architecture(
        "qwen3", "Qwen3ForCausalLM", head_norms=True, optional_biases={"attention_bias": _ATTENTION}
    ),
}  # fmt: skip
# ggml's name -> transformers', and the letters of its shape.
_OUTER = {
    "token_embd": ("model.embed_tokens", "vh"), "output_norm": ("model.norm", "h"), "output": ("lm_head", "vh"),
}  # fmt: skip
_BLOCK = {
    "attn_norm": ("input_layernorm", "h"), "ffn_norm": ("post_attention_layernorm", "h"),
    "attn_q": ("self_attn.q_proj", "qh"), "attn_k": ("self_attn.k_proj", "kh"), "attn_v": ("self_attn.v_proj", "kh"),
    "attn_output": ("self_attn.o_proj", "hq"), "ffn_gate": ("mlp.gate_proj", "fh"), "ffn_up": ("mlp.up_proj", "fh"),
    "ffn_down": ("mlp.down_proj", "hf"),
}  # fmt: skip
_HEAD_NORMS = {"attn_q_norm": ("self_attn.q_norm", "d"), "attn_k_norm": ("self_attn.k_norm", "d")}
_ROTARY = re.compile(r"(rope_freqs|blk\.\d+\.(rope_freqs|attn_rot_embd))\.weight")  # no parameters
_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,5})\.)?(\w+)\.(weight|bias)")
# Metadata of an architecture that says nothing of its products, or that config_of checks; with any other key the
# file may mean another model.
_READ = {
    "context_length", "block_count", "embedding_length", "feed_forward_length", "vocab_size", "rope.dimension_count",
    "rope.freq_base", "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon",
    "attention.key_length", "attention.value_length", "tensor_data_layout", "expert_count", "expert_used_count",
}  # fmt: skip
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}


def architecture_of(file: GgufFile) -> Architecture:
    """ValueError naming the architecture, and those that are known, for another one or for no whole model."""
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"{file.path} holds a model of architecture {name!r}, known are {', '.join(ARCHITECTURES)}")
    if kind != "model":
        raise ValueError(f"{file.path} holds {kind!r}, expected a whole model")
    if (parts := file.metadata.get("split.count", 0)) not in (0, 1):
        raise ValueError(
            f"{file.path} is one of {parts} parts of a model: put them together first, with "
            "`llama-gguf-split --merge FIRST.gguf OUT.gguf`"
        )
    return ARCHITECTURES[name]


def hf_name(architecture: Architecture, name: str) -> str | None:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; None for a tensor of rotary frequencies,
    which is no parameter. ValueError for one that such a model does not have."""
    if _ROTARY.fullmatch(name):
        return None
    match = _NAME.fullmatch(name)
    block, stem, kind = match.groups() if match else (None, "", "")
    own = _places(architecture, block is not None).get(stem)
    if own is None or (kind == "bias" and stem not in _possible_biases(architecture)):
        raise ValueError(f"a {architecture.model_type} model has no tensor {name}")
    return f"model.layers.{block}.{own[0]}.{kind}" if block is not None else f"{own[0]}.{kind}"


def ggml_name(architecture: Architecture, name: str) -> str:
    """The inverse of `hf_name`; ValueError for a name that such a model does not have."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)", module)
    places = _places(architecture, match is not None)
    own = match[2] if match else module
    stem = next((stem for stem, (place, _) in places.items() if place == own), None)
    kinds = ("weight", "bias") if stem in _possible_biases(architecture) else ("weight",)
    if stem is None or kind not in kinds:
        raise ValueError(f"a {architecture.model_type} model has no parameter {name}")
    return f"blk.{match[1]}.{stem}.{kind}" if match else f"{stem}.{kind}"


def _places(architecture: Architecture, block: bool) -> dict[str, tuple[str, str]]:
    if not block:
        return _OUTER
    return {**_BLOCK, **_HEAD_NORMS} if architecture.head_norms else _BLOCK


def _possible_biases(architecture: Architecture) -> tuple[str, ...]:
    optional = (architecture.optional_biases or {}).values()
    return architecture.biases + tuple(stem for stems in optional for stem in stems)


def config_of(file: GgufFile) -> dict[str, Any]:
    """What config.json of the model would say, as a dictionary for transformers' ``AutoConfig.for_model``.

    ValueError naming the key for a number that is missing or no such number, and for metadata or tensors of rotary
    frequencies that transformers' model of this kind does not compute with.
    """
    architecture, read = architecture_of(file), _Metadata(file)
    read.require_known()
    hidden, heads = read.size("embedding_length"), read.size("attention.head_count")
    head_dim = read.head_dim(hidden, heads)
    vocab = _vocab_size(file)
    config = {
        "architectures": [architecture.cls],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": read.size("feed_forward_length"),
        "num_hidden_layers": read.num_blocks(),
        "num_attention_heads": heads,
        "num_key_value_heads": read.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": read.size("context_length"),
        "rms_norm_eps": read.positive("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(file, read.prefix, head_dim),
        "vocab_size": vocab,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_bias_words(file, architecture),
    }
    for key, own in _TOKENS.items():
        token = file.metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token, int) and 0 <= token < vocab:
            config[own] = token
    return config


class _Metadata:
    """The numbers of a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.prefix = file, f"{file.metadata['general.architecture']}."

    def require_known(self) -> None:
        for key, value in self.file.metadata.items():
            own = key.removeprefix(self.prefix)
            if own != key and own not in _READ and not own.startswith("rope.scaling."):
                raise ValueError(f"{self.file.path}: {key} is {value!r:.100}, which this package does not know")
        if self.file.metadata.get(self.prefix + "expert_count"):
            raise ValueError(f"{self.file.path}: the model has experts, this package reads dense models from GGUF")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.file.metadata.get(self.prefix + key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise ValueError(f"{self.file.path}: {self.prefix}{key} is {value!r:.100}, expected a size")
        return value

    def num_blocks(self) -> int:
        count, tensors = self.size("block_count"), len(self.file.tensors)
        if count > tensors:
            raise ValueError(f"{self.file.path}: {count} blocks of {tensors} tensors are no whole model")
        return count

    def positive(self, key: str) -> float:
        value = self.file.metadata.get(self.prefix + key)
        if not isinstance(value, float) or not 0 < value < 1:
            raise ValueError(f"{self.file.path}: {self.prefix}{key} is {value!r:.100}, expected a small number")
        return _shortest(value)

    def head_dim(self, hidden: int, heads: int) -> int:
        own = self.size("attention.key_length", hidden // heads or None)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.size(key, own) != own:
                raise ValueError(
                    f"{self.file.path}: {self.prefix}{key} is {self.size(key)}, heads of queries have {own} "
                    "elements: transformers' model has one size"
                )
        if own % 2:
            raise ValueError(f"{self.file.path}: heads have {own} elements, rotary positions need an even number")
        return own


def _shortest(value: float) -> float:
    """1e-05, for the float32 nearest to it, which is how files hold it."""
    return float(f"{value:.6g}") if torch.tensor(float(f"{value:.6g}")) == torch.tensor(value) else value


def _vocab_size(file: GgufFile) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.values_shape) != 2:
        raise ValueError(f"{file.path} has no matrix token_embd.weight, or no tensors: it is no whole model")
    return table.values_shape[0]


def _bias_words(file: GgufFile, architecture: Architecture) -> dict[str, bool]:
    """By those of the first block; that the others are there, too, `parameters` checks."""
    optional = (architecture.optional_biases or {}).items()
    return {word: any(f"blk.0.{stem}.bias" in file.tensors for stem in stems) for word, stems in optional}


def parameters(file: GgufFile) -> dict[str, GgufTensor]:
    """Every parameter of transformers' model, by its name there: ``{"model.norm.weight": ...}``, and of ``lm_head``
    only where it is not tied.

    ValueError naming the tensor for one that is missing, that such a model does not have, or of another shape than
    `config_of` has.
    """
    architecture, config = architecture_of(file), config_of(file)
    found = {}
    for name, tensor in file.tensors.items():
        own = hf_name(architecture, name)
        if own is not None:
            found[own] = tensor
    expected = _shapes(architecture, config)
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{file.path} has no tensor {ggml_name(architecture, name)}: it is no whole model")
        if found[name].values_shape != shape:
            raise ValueError(
                f"{found[name].place} has shape {list(found[name].values_shape)}, its metadata says {list(shape)}: "
                "the file is damaged"
            )
    extra = next((tensor for name, tensor in found.items() if name not in expected), None)
    if extra is not None:
        raise ValueError(f"{extra.place} is no part of the model that its metadata describes")
    return found


def _shapes(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    letters = {
        "h": config["hidden_size"], "f": config["intermediate_size"], "v": config["vocab_size"],
        "d": config["head_dim"], "q": config["num_attention_heads"] * config["head_dim"],
        "k": config["num_key_value_heads"] * config["head_dim"],
    }  # fmt: skip
    optional = (architecture.optional_biases or {}).items()
    biases = architecture.biases + tuple(stem for word, stems in optional if config[word] for stem in stems)
    inside = {}
    for stem, (place, shape) in _places(architecture, block=True).items():
        inside[f"{place}.weight"] = tuple(letters[letter] for letter in shape)
        if stem in biases:
            inside[f"{place}.bias"] = (letters[shape[0]],)
    outer = [own for stem, own in _OUTER.items() if stem != "output" or not config["tie_word_embeddings"]]
    shapes = {f"{place}.weight": tuple(letters[letter] for letter in shape) for place, shape in outer}
    for block in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{block}.{place}": shape for place, shape in inside.items()})
    return shapes


def row_orders(file: GgufFile) -> dict[str, Tensor]:
    """Layer name -> int64 ``[out]``: row i of the layer, and element i of its bias, is the stored one ``order[i]``.
    Only layers whose rows lie in another order. ValueError as `parameters`."""
    architecture, config = architecture_of(file), config_of(file)
    parameters(file)  # sizes that the metadata names are those of tensors
    if not architecture.halves:
        return {}
    orders = {
        "q_proj": _order(config["num_attention_heads"], config["head_dim"]),
        "k_proj": _order(config["num_key_value_heads"], config["head_dim"]),
    }
    blocks = range(config["num_hidden_layers"])
    return {f"model.layers.{n}.self_attn.{name}": order for n in blocks for name, order in orders.items()}


def _order(heads: int, head_dim: int) -> Tensor:
    return torch.arange(heads * head_dim).view(heads, head_dim // 2, 2).transpose(1, 2).reshape(-1)
