"""What is a gpt-oss checkpoint in its original layout, in transformers' words? Names, a fused qkv, and a config.json
of its own:

    embedding.weight, norm.scale, unembedding.weight
    block.N.attn.norm.scale, .sinks, .out.weight, .out.bias     block.N.attn.qkv.weight, .bias: rows of q, of k, of v
    block.N.mlp.norm.scale, .gate.weight, .gate.bias, .mlp1_bias, .mlp2_bias
    block.N.mlp.mlp1_weight.blocks, .scales                     as gate_up_proj of gpt_oss.py; mlp2_weight: down_proj

Experts, and the order of gate and up, are as in transformers' layout, and rotary positions turn the same halves.

Source: the repository openai/gpt-oss, gpt_oss/torch/model.py and weights.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .layer import Stored

_OUTER = {"embedding.weight": "model.embed_tokens.weight", "norm.scale": "model.norm.weight",
          "unembedding.weight": "lm_head.weight"}  # fmt: skip
_BLOCK = {
    "attn.norm.scale": "input_layernorm.weight", "attn.sinks": "self_attn.sinks",
    "attn.out.weight": "self_attn.o_proj.weight", "attn.out.bias": "self_attn.o_proj.bias",
    "mlp.norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight", "mlp.gate.bias": "mlp.router.bias",
    "mlp.mlp1_weight.blocks": "mlp.experts.gate_up_proj_blocks",
    "mlp.mlp1_weight.scales": "mlp.experts.gate_up_proj_scales", "mlp.mlp1_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.mlp2_weight.blocks": "mlp.experts.down_proj_blocks",
    "mlp.mlp2_weight.scales": "mlp.experts.down_proj_scales", "mlp.mlp2_bias": "mlp.experts.down_proj_bias",
}  # fmt: skip
_FUSED = ("weight", "bias")
# Words of its config.json -> transformers'. Those of rotary positions are put together.
_SIZES = {
    "num_hidden_layers": "num_hidden_layers", "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok", "vocab_size": "vocab_size", "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size", "head_dim": "head_dim", "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads", "sliding_window": "sliding_window",
}  # fmt: skip
_ROPE = ("initial_context_length", "rope_theta", "rope_scaling_factor", "rope_ntk_alpha", "rope_ntk_beta")
_LIMIT = "swiglu_limit"
_TOLD_BY = ("num_experts", "experts_per_token", "rope_ntk_alpha")  # no other config.json has these three


def is_original(config: object) -> bool:
    """Whether a config.json is of this layout."""
    return isinstance(config, Mapping) and "model_type" not in config and all(word in config for word in _TOLD_BY)


def config_of(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What transformers' config.json would say, for ``AutoConfig.for_model``. ValueError, which begins with ``place``,
    naming a word that is missing, not known, or no number above 0."""
    known = {*_SIZES, *_ROPE, _LIMIT}
    for word in [*config, *known]:
        value, whole = config.get(word), word in _SIZES or word == "initial_context_length"
        if word not in known:
            raise ValueError(f"{place}: {word} is {value!r:.100}, which this package does not know")
        good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not good or not 0 < value < 1 << 31:
            raise ValueError(f"{place}: {word} is {value!r:.100}, expected a number above 0")
    trained, theta, factor, alpha, beta = (config[word] for word in _ROPE)
    rope = {
        "rope_type": "yarn", "rope_theta": float(theta), "factor": float(factor), "beta_fast": float(beta),
        "beta_slow": float(alpha), "truncate": False, "original_max_position_embeddings": trained,
    }  # fmt: skip
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
        **{own: config[word] for word, own in _SIZES.items()}, _LIMIT: float(config[_LIMIT]),
        "max_position_embeddings": int(trained * factor), "rope_parameters": rope, "tie_word_embeddings": False,
    }  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a stored tensor, as a `layer.Stored`."""

    stored: Stored
    first: int
    count: int

    @property
    def place(self) -> str:
        return self.stored.place

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def dtype(self) -> torch.dtype | None:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.stored.shape[1:])

    def load(self) -> torch.Tensor:
        """A copy of them."""
        return self.stored.load()[self.first : self.first + self.count].clone()


def parameters(tensors: Mapping[str, Stored], config: Mapping[str, Any], place: str) -> dict[str, Stored]:
    """All tensors by transformers' names. config: as `config_of` has it. ValueError, which begins with ``place``, for
    a tensor that is missing, or that such a model does not have; naming the tensor, for a qkv of other rows."""
    left, found = dict(tensors), {}

    def take(name: str) -> Stored:
        if name not in left:
            raise ValueError(f"{place} has no tensor {name}: a file is missing, or it is no whole model")
        return left.pop(name)

    found |= {own: take(name) for name, own in _OUTER.items()}
    sizes = {name: config[f"num_{heads}_heads"] * config["head_dim"]
             for name, heads in (("q", "attention"), ("k", "key_value"), ("v", "key_value"))}  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        block, layer = f"block.{number}.", f"model.layers.{number}."
        found |= {layer + own: take(block + name) for name, own in _BLOCK.items()}
        for end in _FUSED:
            for name, rows in _split(take(f"{block}attn.qkv.{end}"), sizes).items():
                found[f"{layer}self_attn.{name}_proj.{end}"] = rows
    if left:
        raise ValueError(f"{next(iter(left.values())).place} is no part of the model that its config.json describes")
    return found


def _split(fused: Stored, sizes: Mapping[str, int]) -> dict[str, Rows]:
    total, first, found = sum(sizes.values()), 0, {}
    if not fused.shape or fused.shape[0] != total:
        raise ValueError(
            f"{fused.place} has shape {list(fused.shape)}, expected {total} rows of {dict(sizes)}: config.json is of "
            "another model, or the file is damaged"
        )
    for name, count in sizes.items():
        found[name] = Rows(fused, first, count)
        first += count
    return found
