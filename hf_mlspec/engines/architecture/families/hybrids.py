"""Which classes have gated delta nets, or Mamba-2, in place of attention in most of their layers?"""

from __future__ import annotations

from dataclasses import replace

from ..description import SEPARATE, SHARED, Delta, Description, Mixture
from .rms import GRANITE, HEADS, LLAMA, PRE

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


def _mamba(net: str) -> Delta:
    """Mamba-2 at this place in a layer."""
    return Delta(
        linears={"qkv": f"{net}.in_proj", "out": f"{net}.out_proj"},
        net=net,
        heads=("n_groups", "num_heads", "ssm_state_size", "head_dim", "conv_kernel_size"),
        taps=f"{net}.conv1d.weight",
        rate=f"{net}.A_log",
        shift=f"{net}.dt_bias",
        norm=f"{net}.norm",
        activations=("activation",),
        skip=f"{net}.D",
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
    Description(
        class_name="Mamba2ForCausalLM",
        norm="rms",
        norms={"attention": "norm"},
        linears={},
        activation="hidden_act",
        windows="none",
        mlp="none",
        positions="none",
        norm_eps="layer_norm_epsilon",
        delta=_mamba("mixer"),
        embedding="backbone.embeddings",
        layers="backbone.layers",
        final_norm="backbone.norm_f",
    ),
    replace(
        LLAMA,
        class_name="BambaForCausalLM",
        norms={"attention": "input_layernorm", "mlp": "pre_ff_layernorm"},
        linears={name: place.replace("mlp.", "feed_forward.") for name, place in SEPARATE.items()},
        final_norm="model.final_layernorm",
        delta=_mamba("mamba"),
    ),
    replace(
        LLAMA,
        class_name="GraniteMoeHybridForCausalLM",
        linears={
            **{name: SEPARATE[name] for name in "qkvo"},
            "gate_up": "shared_mlp.input_linear",
            "down": "shared_mlp.output_linear",
        },
        unset=("num_local_experts",),
        rotates="position_embedding_type",
        delta=_mamba("mamba"),
        **GRANITE,
    ),
)
