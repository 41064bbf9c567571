"""Which classes take the mean off what they norm?"""

from __future__ import annotations

from dataclasses import replace

from ..description import PLAIN, SEPARATE, WITHOUT_WINDOW
from .rms import BY_LAYER, LLAMA

_LAYER = replace(LLAMA, class_name="Jais2ForCausalLM", norm="layer", norm_eps="layer_norm_eps")
_SHARED = {"attention": "input_layernorm", "mlp": "input_layernorm"}  # both blocks read one norm
_FC = {"up": "mlp.fc1", "down": "mlp.fc2"}
_COHERE = replace(
    _LAYER,
    class_name="CohereForCausalLM",
    norms=_SHARED,
    residual="parallel",
    rotation="pairs by columns",
    logit_scale="logit_scale",
    unset=("use_qk_norm",),
)
_NEOX = replace(
    _LAYER,
    class_name="GPTNeoXForCausalLM",
    linears={
        "qkv_by_head": "attention.query_key_value",
        "o": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    mlp="plain",
    residual="parallel",
    residual_flag="use_parallel_residual",
    attention="attention",
    head_dim="head_size",
    kv_heads="num_attention_heads",
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    rotary_embedding="gpt_neox.rotary_emb",
    head="lm_head | embed_out",
)
_GPT2 = replace(
    _LAYER,
    class_name="GPT2LMHeadModel",
    norms={"attention": "ln_1", "mlp": "ln_2"},
    norm_eps="layer_norm_epsilon",
    linears={"qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
    activation="activation_function",
    mlp="plain",
    attention="attn",
    positions="learned",
    position_embedding="transformer.wpe",
    embedding="transformer.wte",
    layers="transformer.h",
    final_norm="transformer.ln_f",
    unset=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
)
_AS_OPT = {
    "norms": {"attention": "self_attn_layer_norm", "mlp": "final_layer_norm"},
    "norm_eps": 1e-5,
    "linears": {**{name: SEPARATE[name] for name in "qkv"}, "o": "self_attn.out_proj", "up": "fc1", "down": "fc2"},
    "kv_heads": "num_attention_heads",
    "mlp": "plain",
    "positions": "learned",
    "position_offset": 2,
}
ENTRIES = (
    replace(_LAYER, linears=PLAIN, mlp="plain"),
    replace(_LAYER, class_name="OlmoForCausalLM", norm_eps=1e-5, unset=("clip_qkv",)),
    _COHERE,
    replace(_COHERE, class_name="Cohere2ForCausalLM", layers_without_rotary=WITHOUT_WINDOW, unset=(), **BY_LAYER),
    replace(
        _LAYER,
        class_name="NemotronForCausalLM",
        norm="layer plus one",
        norm_eps="norm_eps",
        linears=PLAIN,
        mlp="plain",
    ),
    replace(
        _LAYER,
        class_name="StableLmForCausalLM",
        unset=("use_parallel_residual", "qk_layernorm"),
    ),
    replace(
        _LAYER,
        class_name="Starcoder2ForCausalLM",
        norm_eps="norm_epsilon",
        linears={**{name: SEPARATE[name] for name in "qkvo"}, "up": "mlp.c_fc", "down": "mlp.c_proj"},
        mlp="plain",
        windows="every layer",
    ),
    replace(
        _LAYER,
        class_name="PhiForCausalLM",
        norms=_SHARED,
        residual="parallel",
        linears={**{name: SEPARATE[name] for name in "qkv"}, "o": "self_attn.dense", **_FC},
        mlp="plain",
        final_norm="model.final_layernorm",
        unset=("qk_layernorm",),
    ),
    _NEOX,
    replace(
        _NEOX,
        class_name="FalconForCausalLM",
        norms={"attention": "ln_attn | input_layernorm", "mlp": "ln_mlp | input_layernorm"},
        norm_eps="layer_norm_epsilon",
        linears={
            "qkv_by_head": "self_attention.query_key_value",
            "o": "self_attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        residual_flag="parallel_attn",
        unset=("alibi",),
        activation="activation",
        attention="self_attention",
        attention_scale="inv_norm_factor",
        head_dim="head_dim",
        embedding="transformer.word_embeddings",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        rotary_embedding="transformer.rotary_emb",
        head="lm_head",
    ),
    replace(
        _LAYER,
        class_name="OPTForCausalLM",
        **_AS_OPT,
        activation="activation_function",
        position_embedding="model.decoder.embed_positions",
        embedding="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        needed=("do_layer_norm_before",),
        unset=("_remove_final_layer_norm",),
    ),
    replace(
        _LAYER,
        class_name="BioGptForCausalLM",
        **_AS_OPT,
        position_embedding="biogpt.embed_positions",
        embedding_scale="root of hidden",
        embedding="biogpt.embed_tokens",
        layers="biogpt.layers",
        final_norm="biogpt.layer_norm",
        head="output_projection",
    ),
    _GPT2,
    replace(_GPT2, class_name="GPTBigCodeForCausalLM", needed=("multi_query",), unset=()),
)
