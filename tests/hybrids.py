"""Which tiny models that keep a state do the tests decode with? All random and seeded; a class may be missing."""

from __future__ import annotations

import pytest
import torch
import transformers

VOCAB, PAD, BOS, EOS = 64, 0, 1, 2
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_MAMBA2 = {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
_NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "head_dim": 8,
}
# class -> (class of its config, settings)
HYBRIDS = {
    "Qwen3NextForCausalLM": (
        "Qwen3NextConfig",
        {**_SHAPE, **_DELTA, **_MIXTURE, "shared_expert_intermediate_size": 32},
    ),
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", {**_SHAPE, **_DELTA}),
    "MambaForCausalLM": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8}),
    "Mamba2ForCausalLM": ("Mamba2Config", {"hidden_size": 32, "num_hidden_layers": 3, **_MAMBA2}),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybridConfig",
        {
            **_SHAPE,
            **_MAMBA,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "NemotronHForCausalLM": (
        "NemotronHConfig",
        {**{name: size for name, size in _SHAPE.items() if name != "num_hidden_layers"}, **_NEMOTRON},
    ),
    "Lfm2ForCausalLM": ("Lfm2Config", {**_SHAPE, "layer_types": ["conv", "full_attention"] * 2}),
    "OlmoHybridForCausalLM": ("OlmoHybridConfig", {**_SHAPE, **_DELTA, "linear_num_value_heads": 2}),
    "FalconH1ForCausalLM": ("FalconH1Config", {**_SHAPE, **_MAMBA, "mamba_d_ssm": 64}),
    "RwkvForCausalLM": ("RwkvConfig", {"hidden_size": 32, "num_hidden_layers": 3, "attention_hidden_size": 32}),
}


def hybrid(name: str, seed: int = 0):
    """A model of this class, float32; skips where this version of transformers lacks it."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config, settings = HYBRIDS[name]
    words = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    torch.manual_seed(seed)
    model = getattr(transformers, name)(getattr(transformers, config)(**words, **settings)).eval()
    with torch.no_grad():  # flat logits would leave float32 rounding to decide which token is best
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model
