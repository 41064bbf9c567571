"""Which targets do benchmarks decode with: which shapes of random weights, and does one run compiled steps?"""

from __future__ import annotations

import torch
import transformers
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hf_mlspec

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "max_position_embeddings")


def llama(*sizes: int) -> dict[str, int]:
    """What LlamaConfig takes, from numbers in the order of _SIZES."""
    return dict(zip(_SIZES, sizes, strict=True))


SMALL_SHAPES = {
    "llama-0.5b": llama(896, 4864, 24, 14, 2, 151936, 2048),
    "llama-1.1b": llama(2048, 5632, 22, 32, 4, 32000, 2048),
    "tiny": llama(64, 128, 2, 4, 2, 96, 512),
}
# Mixtures of experts in Qwen3-MoE's form: what Qwen3MoeConfig takes. Of moe-844m 138M are active.
MIXTURES = {
    "moe-844m": {
        **llama(1024, 2816, 8, 16, 4, 16384, 2048), "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "norm_topk_prob": True, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **llama(2048, 6144, 48, 32, 4, 151936, 8192), "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "moe-tiny": {
        **llama(64, 128, 2, 4, 2, 96, 512), "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
}
MIXTURES["qwen3-30b-a3b-24"] = {**MIXTURES["qwen3-30b-a3b"], "num_hidden_layers": 24}  # half: with a cast on 80 GB
# Gated delta nets in three layers of four, in Qwen3.5's form: what Qwen3_5TextConfig takes.
HYBRIDS = {
    "qwen3.5-27b": {**llama(5120, 17408, 64, 24, 4, 248320, 8192), "head_dim": 256, "linear_num_value_heads": 48},
    "hybrid-0.5b": {
        **llama(1024, 2816, 24, 8, 2, 151936, 4096), "head_dim": 128, "linear_num_key_heads": 8,
        "linear_num_value_heads": 8, "tie_word_embeddings": True,
    },
    "hybrid-tiny": {
        **llama(64, 128, 4, 4, 2, 96, 512), "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}
# In gpt-oss's form: what GptOssConfig takes. Windows on every other layer, YaRN: its own defaults.
GPT_OSS = {
    "gpt-oss-20b": {**llama(2880, 2880, 24, 64, 8, 201088, 131072), "head_dim": 64, "num_local_experts": 32},
    "gpt-oss-120b": {**llama(2880, 2880, 36, 64, 8, 201088, 131072), "head_dim": 64, "num_local_experts": 128},
    "gpt-oss-tiny": {**llama(64, 64, 2, 4, 2, 96, 512), "head_dim": 16, "num_local_experts": 8},
}
SHAPES = {
    **SMALL_SHAPES,
    "llama-3-8b": llama(4096, 14336, 32, 32, 8, 128256, 8192),
    "llama-3-70b": llama(8192, 28672, 80, 64, 8, 128256, 8192),
    "tiny-2x512": llama(512, 1536, 2, 8, 8, 8192, 8192),
    "llama-2x512": llama(512, 1408, 2, 8, 4, 128256, 8192),
    "llama-6x1024": llama(1024, 2816, 6, 16, 4, 8192, 2048),  # code-76m's
    "llama-2x1024": llama(1024, 2816, 2, 8, 4, 128256, 8192),
    "qwen3-2x1024": llama(1024, 2816, 2, 8, 4, 151936, 8192),
}
OF_CHAINS = {**SHAPES, **MIXTURES, **HYBRIDS}  # of the targets and drafts that eval.replay and eval.bench_auto make


def random_model(shape: str, device: str = "cpu", seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A model of this shape, but of these sizes where any are given, and of random BF16 weights."""
    torch.manual_seed(seed)
    before, (kind, config) = torch.get_default_dtype(), kind_and_config(shape, **sizes)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return kind(config).eval()
    finally:
        torch.set_default_dtype(before)


def kind_and_config(shape: str, **sizes: int) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class and the config of a model of this shape, but of these sizes where any are given."""
    kind, config = LlamaForCausalLM, LlamaConfig
    if shape in MIXTURES:
        kind, config = Qwen3MoeForCausalLM, Qwen3MoeConfig
    elif shape in HYBRIDS:
        kind, config = transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig
    elif shape in GPT_OSS:
        kind, config = GptOssForCausalLM, GptOssConfig
    return kind, config(**{**OF_CHAINS, **GPT_OSS}[shape] | sizes, eos_token_id=None)


def random_start(shape: str) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A model of random BF16 weights, and 32 random ids to start from."""
    target = random_model(shape)
    ids = torch.randint(0, target.config.vocab_size, (1, 32))
    return target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def why_not_prepared(target: PreTrainedModel) -> str | None:
    """The reason why no compiled steps run this target; None where they do."""
    try:
        hf_mlspec.prepare(target)
    except (RuntimeError, ValueError) as error:
        return str(error)
    by_linear = any(type(module).__name__ == "KernelLinear" for module in target.modules())
    hf_mlspec.restore(target)
    return f"{type(target).__name__}'s linears run one by one, as the log says why" if by_linear else None
