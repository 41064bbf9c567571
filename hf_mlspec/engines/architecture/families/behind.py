"""Which classes norm what a block computes, before it is added: alone (OLMo 2), or beside what it reads (Gemma 2)?"""

from __future__ import annotations

from dataclasses import replace

from ..description import HALF_FUSED, WITHOUT_WINDOW, LayerInputs
from .rms import BY_LAYER, HEADS, LLAMA, PRE

_SANDWICH = {
    "attention": "input_layernorm",
    "attention_out": "post_attention_layernorm",
    "mlp": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}
_BEHIND = {name: place for name, place in _SANDWICH.items() if name.endswith("_out")}
_GEMMA = replace(
    LLAMA,
    class_name="Gemma2ForCausalLM",
    norm="rms plus one",
    norms=_SANDWICH,
    activation="hidden_activation",
    embedding_scale="root of hidden",
    logit_softcap="final_logit_softcapping",
    **BY_LAYER,
)
_GEMMA4 = replace(
    _GEMMA,
    class_name="Gemma4ForCausalLM",
    norm="rms",
    norms={**_SANDWICH, **HEADS},
    positions="rotary by layer type",
    heads="by layer",
    values="own, or keys",
    value_norm="self_attn.v_norm",
    shared_keys="is_kv_shared_layer",
    layer_inputs=LayerInputs(),
    layer_scale="layer_scalar",
    unset=("enable_moe_block",),
)
_OLMO = replace(LLAMA, class_name="Olmo2ForCausalLM", norms={**_BEHIND, **HEADS}, head_norms="all heads")
ENTRIES = (
    replace(_GEMMA, attention_softcap="attn_logit_softcapping"),
    replace(
        _GEMMA,
        class_name="Gemma3ForCausalLM",
        norms={**_SANDWICH, **HEADS},
        positions="rotary by layer type",
    ),
    _GEMMA4,
    _OLMO,
    replace(_OLMO, class_name="Olmo3ForCausalLM", positions="rotary by layer type", **BY_LAYER),
    replace(
        LLAMA,
        class_name="Exaone4ForCausalLM",
        norms={**_BEHIND, **HEADS},
        layers_without_rotary=WITHOUT_WINDOW,
        **BY_LAYER,
    ),
    replace(
        LLAMA,
        class_name="Glm4ForCausalLM",
        norms={**PRE, "attention_out": "post_self_attn_layernorm", "mlp_out": "post_mlp_layernorm"},
        linears=HALF_FUSED,
        rotation="pairs",
    ),
    replace(
        LLAMA,
        class_name="HyperCLOVAXForCausalLM",
        norms={**PRE, "attention_out": "post_norm1", "mlp_out": "post_norm2"},
        embedding_multiplier="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_scale="logits_scaling",
    ),
)
