"""Which classes have gated delta nets in place of attention in most of their layers?"""

from __future__ import annotations

from dataclasses import replace

from ..description import SHARED, Delta, Mixture
from .rms import HEADS, LLAMA, PRE

_PARTS = {"qkv": "in_proj_qkv", "z": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a", "out": "out_proj"}
_GROUPED = {"qkv": "in_proj_qkvz", "b": "in_proj_ba", "out": "out_proj"}
_QWEN = replace(
    LLAMA,
    class_name="Qwen3_5ForCausalLM",
    norm="rms plus one",
    norms={**PRE, **HEADS},
    head_gates="behind each query",
    delta=Delta(linears={name: f"linear_attn.{place}" for name, place in _PARTS.items()}),
)
ENTRIES = (
    _QWEN,
    replace(
        _QWEN,
        class_name="Qwen3_5MoeForCausalLM",
        mlp="experts",
        experts=Mixture(renormalize=True, shared=SHARED),
    ),
    replace(
        _QWEN,
        class_name="Qwen3NextForCausalLM",
        delta=Delta(linears={name: f"linear_attn.{place}" for name, place in _GROUPED.items()}, grouped=True),
        mlp="experts",
        experts=Mixture(shared=SHARED),
    ),
)
