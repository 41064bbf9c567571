"""Which tiny random models do the tests of modules and of engines start from?"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PersimmonConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
_CONFIGS = {
    "llama": lambda **kw: LlamaConfig(**_SHAPE, **kw),
    "llama-tied": lambda **kw: LlamaConfig(**_SHAPE, tie_word_embeddings=True, **kw),
    "qwen2-bias": lambda **kw: Qwen2Config(**_SHAPE, **kw),
    "gemma2-tied": lambda **kw: Gemma2Config(**_SHAPE, head_dim=16, **kw),
    "persimmon": lambda **kw: PersimmonConfig(**_SHAPE, **kw),
    "gpt2-conv1d": lambda **kw: GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128, n_positions=64, **kw),
    "mixtral-experts": lambda **kw: MixtralConfig(**_SHAPE, num_local_experts=2, **kw),
    "qwen3-experts": lambda **kw: Qwen3MoeConfig(
        **_SHAPE, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=4, **kw
    ),
    "diffllama": lambda **kw: DiffLlamaConfig(**_SHAPE, **kw),  # no compiled decoder knows it
    "gpt-oss-experts": lambda **kw: GptOssConfig(
        **_SHAPE, head_dim=16, num_local_experts=2, num_experts_per_tok=2, **kw
    ),
}


@pytest.fixture
def tiny_model():
    """``tiny_model("llama", torch.bfloat16, hidden_size=...)``: a random model in eval mode, the same every time."""

    def make(name: str, dtype: torch.dtype = torch.float32, **settings):
        torch.manual_seed(0)
        settings = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, **settings}
        shape = _SHAPE | {key: settings.pop(key) for key in list(settings) if key in _SHAPE}
        config = _CONFIGS[name](**settings)
        for key, value in shape.items():
            if name != "gpt2-conv1d" and getattr(config, key) != value:
                setattr(config, key, value)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and norms that matter
        return model

    return make


@pytest.fixture
def ids():
    return torch.randint(1, 128, (2, 7), generator=torch.Generator().manual_seed(1))
