"""Which architectures do the decoders know? One entry each; docs/guide/add_an_architecture.md says how to add one."""

from __future__ import annotations

from .description import FUSED, SEPARATE, SHARED, Description, Mixture

_PRE = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
_SANDWICH = {
    "attention": "input_layernorm",
    "attention_out": "post_attention_layernorm",
    "mlp": "pre_feedforward_layernorm",
    "mlp_out": "post_feedforward_layernorm",
}
_HEADS = {"q": "self_attn.q_norm", "k": "self_attn.k_norm"}

_ENTRIES = (
    Description(
        class_name="LlamaForCausalLM",
        norm="rms",
        norms=_PRE,
        linears=SEPARATE,
        activation="hidden_act",
        windows="by layer type",  # its layers read none, but the cache of transformers does
    ),
    Description(
        class_name="MistralForCausalLM",
        norm="rms",
        norms=_PRE,
        linears=SEPARATE,
        activation="hidden_act",
        windows="every layer",
    ),
    Description(
        class_name="Qwen2ForCausalLM",
        norm="rms",
        norms=_PRE,
        linears=SEPARATE,
        activation="hidden_act",
        windows="by layer type",
    ),
    Description(
        class_name="Qwen3ForCausalLM",
        norm="rms",
        norms={**_PRE, **_HEADS},
        linears=SEPARATE,
        activation="hidden_act",
        windows="by layer type",
    ),
    Description(
        class_name="Gemma2ForCausalLM",
        norm="rms plus one",
        norms=_SANDWICH,
        linears=SEPARATE,
        activation="hidden_activation",
        windows="by layer type",
        embedding_scale="root of hidden",
        attention_softcap="attn_logit_softcapping",
        logit_softcap="final_logit_softcapping",
    ),
    Description(
        class_name="Gemma3ForCausalLM",
        norm="rms plus one",
        norms={**_SANDWICH, **_HEADS},
        linears=SEPARATE,
        activation="hidden_activation",
        positions="rotary by layer type",
        windows="by layer type",
        embedding_scale="root of hidden",
        logit_softcap="final_logit_softcapping",
    ),
    Description(
        class_name="Phi3ForCausalLM",
        norm="rms",
        norms=_PRE,
        linears=FUSED,
        activation="hidden_act",
        windows="every layer",
    ),
    Description(
        class_name="MixtralForCausalLM",
        norm="rms",
        norms=_PRE,
        linears=SEPARATE,
        activation="hidden_act",
        windows="every layer",
        mlp="experts",
        experts=Mixture(renormalize=True),
    ),
    Description(
        class_name="Qwen2MoeForCausalLM",
        norm="rms",
        norms=_PRE,
        linears=SEPARATE,
        activation="hidden_act",
        windows="by layer type",
        mlp="experts",
        experts=Mixture(shared=SHARED),
    ),
    Description(
        class_name="Qwen3MoeForCausalLM",
        norm="rms",
        norms={**_PRE, **_HEADS},
        linears=SEPARATE,
        activation="hidden_act",
        windows="every layer",
        mlp="experts",
        experts=Mixture(),
    ),
    Description(
        class_name="OlmoeForCausalLM",
        norm="rms",
        norms={**_PRE, **_HEADS},
        head_norms="all heads",
        linears=SEPARATE,
        activation="hidden_act",
        windows="by layer type",  # as Llama's
        mlp="experts",
        experts=Mixture(),
        unset=("clip_qkv",),
    ),
)
KNOWN: dict[str, Description] = {entry.class_name: entry for entry in _ENTRIES}
