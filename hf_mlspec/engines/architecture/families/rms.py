"""Which classes norm what a block reads by its root mean square? Each entry says how it differs from Llama."""

from __future__ import annotations

from dataclasses import replace

from ..description import FUSED, HALF_FUSED, PLAIN, SEPARATE, Description

PRE = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
HEADS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}

LLAMA = Description(
    class_name="LlamaForCausalLM",
    norm="rms",
    norms=PRE,
    linears=SEPARATE,
    activation="hidden_act",
    windows="none",
)
BY_LAYER = {"windows": "by layer type"}
GRANITE = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}
ENTRIES = (
    LLAMA,
    replace(LLAMA, class_name="MistralForCausalLM", windows="every layer"),
    replace(LLAMA, class_name="MinistralForCausalLM", **BY_LAYER),
    replace(LLAMA, class_name="Qwen2ForCausalLM", **BY_LAYER),
    replace(LLAMA, class_name="Qwen3ForCausalLM", norms={**PRE, **HEADS}, **BY_LAYER),
    replace(LLAMA, class_name="Phi3ForCausalLM", linears=FUSED, windows="every layer"),
    replace(LLAMA, class_name="SmolLM3ForCausalLM", layers_without_rotary="no_rope_layers", **BY_LAYER),
    replace(LLAMA, class_name="SeedOssForCausalLM"),
    replace(LLAMA, class_name="CwmForCausalLM", **BY_LAYER),
    replace(LLAMA, class_name="GraniteForCausalLM", **GRANITE),
    replace(LLAMA, class_name="HeliumForCausalLM", rotation="pairs"),
    replace(LLAMA, class_name="Ernie4_5ForCausalLM", rotation="pairs"),
    replace(LLAMA, class_name="GlmForCausalLM", linears=HALF_FUSED, rotation="pairs"),
    replace(LLAMA, class_name="ArceeForCausalLM", linears=PLAIN, mlp="plain"),
    replace(
        LLAMA,
        class_name="HunYuanDenseV1ForCausalLM",
        norms={**PRE, "q": "self_attn.query_layernorm", "k": "self_attn.key_layernorm"},
        head_norms="per rotated head",
    ),
    replace(
        LLAMA,
        class_name="GemmaForCausalLM",
        norm="rms plus one",
        embedding_scale="root of hidden",
        unset=("use_bidirectional_attention",),
    ),
    replace(
        LLAMA,
        class_name="VaultGemmaForCausalLM",
        norm="rms plus one",
        norms={"attention": "input_layernorm", "mlp": "pre_feedforward_layernorm"},
        activation="hidden_activation",
        embedding_scale="root of hidden",
        attention_softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
        **BY_LAYER,
    ),
)
