"""Which linears does a model shaped like Llama have, and how large are they?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LARGEST, _MOST_LAYERS = (1 << 31) - 1, 1 << 16  # names of all layers are made before the first one is looked for


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a decoder with q, k, v, o and gate, up, down projections, as config.json has them."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> LlamaShape:
        """From config.json; ValueError naming a size that is missing or no positive integer."""
        heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        head_dim = config.get("head_dim")
        if head_dim is None and hidden_size % heads:
            raise ValueError(f"config.json: hidden_size {hidden_size} is no multiple of {heads} heads, no head_dim")
        return cls(
            num_layers=_size(config, "num_hidden_layers", _MOST_LAYERS),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            heads=heads,
            kv_heads=_size(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads,
            head_dim=hidden_size // heads if head_dim is None else _size(config, "head_dim"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Name within a decoder layer -> (out_features, in_features)."""
        attention, values = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (attention, self.hidden_size),
            "self_attn.k_proj": (values, self.hidden_size),
            "self_attn.v_proj": (values, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, attention),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }

    def named_linears(self) -> Iterator[tuple[str, str, int, int]]:
        """(name of the decoder layer, name within it, out_features, in_features) of every linear."""
        for index in range(self.num_layers):
            for name, (out_features, in_features) in self.linears.items():
                yield f"model.layers.{index}", name, out_features, in_features

    def norms(self) -> tuple[str, ...]:
        """The names of all norms."""
        within = ("input_layernorm", "post_attention_layernorm")
        return (*(f"model.layers.{index}.{norm}" for index in range(self.num_layers) for norm in within), "model.norm")


def _size(config: Mapping[str, Any], name: str, most: int = _LARGEST) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"config.json: {name} is {value!r:.100}, a positive integer was expected, at most {most}")
    return value
