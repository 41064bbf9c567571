"""Which classes have experts in place of an MLP?"""

from __future__ import annotations

from dataclasses import replace

from ..description import SEPARATE, SHARED, SHARED_UNWEIGHED, Mixture, Temperature
from .rms import BY_LAYER, HEADS, LLAMA, PRE

_FEED_FORWARD = {name: place.replace("mlp.", "feed_forward.") for name, place in SEPARATE.items()}
ENTRIES = (
    replace(
        LLAMA,
        class_name="MixtralForCausalLM",
        windows="every layer",
        mlp="experts",
        experts=Mixture(renormalize=True),
    ),
    replace(LLAMA, class_name="Qwen2MoeForCausalLM", mlp="experts", experts=Mixture(shared=SHARED), **BY_LAYER),
    replace(
        LLAMA,
        class_name="Qwen3MoeForCausalLM",
        norms={**PRE, **HEADS},
        windows="every layer",
        mlp="experts",
        experts=Mixture(),
    ),
    replace(
        LLAMA,
        class_name="OlmoeForCausalLM",
        norms={**PRE, **HEADS},
        head_norms="all heads",
        mlp="experts",
        experts=Mixture(),
        unset=("clip_qkv",),
    ),
    replace(
        LLAMA,
        class_name="Glm4MoeForCausalLM",
        norms={**PRE, **HEADS},
        head_norms_flag="use_qk_norm",
        mlp="experts",
        experts=Mixture(scores="sigmoid", shared=SHARED_UNWEIGHED, shared_gate=None),
    ),
    replace(
        LLAMA,
        class_name="Llama4ForCausalLM",
        norms={**PRE, "q": "self_attn.qk_norm", "k": "self_attn.qk_norm"},
        head_norms="per rotated head",
        head_norms_flag="use_qk_norm",
        linears=_FEED_FORWARD,
        rotation="pairs",
        layers_without_rotary="no_rope_layers",
        windows="chunks by layer type",
        temperature=Temperature(),
        mlp="experts",
        experts=Mixture(
            router="feed_forward.router",
            experts="feed_forward.experts",
            renormalize=False,
            shared={name: place.replace("mlp.", "feed_forward.") for name, place in SHARED.items()},
            shared_gate=None,
            scores="sigmoid",
            **dict.fromkeys(("choice_bias", "groups", "chosen_groups", "scale")),
            weighs_inputs=True,
            inputs_first=True,
        ),
    ),
    replace(
        LLAMA,
        class_name="GptOssForCausalLM",
        windows="by layer type",
        rotation="halves of single columns",
        sinks="self_attn.sinks",
        mlp="experts",
        experts=Mixture(router="mlp.router", renormalize=True, gate="clamped pairs"),
    ),
)
