"""Which random decoders of every known architecture do the tests compile, and how do they feed them?

Small, seeded, with no weight at 0 or 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import transformers
from models import packed
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.cuda.states import DeltaStates
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.fewer_experts import routers
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.ops.delta import AT_END
from hf_mlspec.precision import OWN_BITS, Bits

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ORIGINAL = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "llama-tied-biases": (LlamaConfig, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3-rope": (LlamaConfig, {"rope_parameters": {**_LLAMA3, **_ORIGINAL}}),
    "yarn": (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_ORIGINAL}}),
    "one-kv-head": (LlamaConfig, {"num_key_value_heads": 1, "head_dim": 6}),
    "qwen2-windows": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "mistral": (MistralConfig, {"sliding_window": 7}),
    "gemma2": (Gemma2Config, {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 20}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 20}),
    "phi3": (Phi3Config, {}),
    "phi3-partial": (
        Phi3Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
}
# Of classes that not every supported release of transformers has.
_LATER = {
    "ministral": ("MinistralConfig", {"head_dim": 16, "sliding_window": 7, "layer_types": _KINDS}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "seed-oss": ("SeedOssConfig", {"head_dim": 24, "attention_out_bias": True}),
    "cwm": (
        "CwmConfig",
        {"bos_token_id": 1, "eos_token_id": [2], "head_dim": 16, "sliding_window": 7, "layer_types": _KINDS},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 6.0,
        },
    ),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "ernie": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "glm": ("GlmConfig", {"head_dim": 24, "attention_bias": True}),
    "arcee": ("ArceeConfig", {"mlp_bias": True}),
    "gemma": ("GemmaConfig", {"head_dim": 24}),
    "vaultgemma": ("VaultGemmaConfig", {"head_dim": 24, "sliding_window": 7, "layer_types": _KINDS}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 7, "layer_types": _KINDS}),
    "exaone4": ("Exaone4Config", {"sliding_window": 7, "layer_types": _KINDS}),
    "exaone4-full": ("Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm4": ("Glm4Config", {"head_dim": 24}),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.3,
        },
    ),
    "hyperclovax-pre": (
        "HyperCLOVAXConfig",
        {"use_post_norm": False, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    ),
    "jais2": ("Jais2Config", {"mlp_bias": True, "attention_bias": True}),
    "olmo": ("OlmoConfig", {}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": ("Cohere2Config", {"sliding_window": 7, "layer_types": _KINDS, "logit_scale": 0.3}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 7}),
    "phi": ("PhiConfig", {}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "falcon": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 176, "bias": True},
    ),
    "falcon-one-norm": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-one-key-head": ("FalconConfig", {"multi_query": True}),
    "falcon-every-head": ("FalconConfig", {"multi_query": False}),
    "opt": ("OPTConfig", {"ffn_dim": 176, "activation_function": "gelu"}),
    "biogpt": ("BioGptConfig", {}),
    "bigcode": ("GPTBigCodeConfig", {"n_inner": 176}),
    "gpt2": ("GPT2Config", {"n_inner": 176}),
}
_DELTA = {
    "head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 40,
}
_DELTA_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_DELTA_EXPERTS |= {"shared_expert_intermediate_size": 64}
_OF_THE_CPU = {"hunyuan": ("HunYuanDenseV1Config", {"head_dim": 24})}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_chunk_size": 8}
_GRANITE = {**_MAMBA, "mamba_n_groups": 1, "layer_types": ["mamba", "attention", "mamba"]}
_GRANITE |= {"shared_intermediate_size": 176, "num_local_experts": 0, "num_experts_per_tok": 0}
_GRANITE |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.3}
_GRANITE |= {"logits_scaling": 0.5, "attention_multiplier": 0.2}
_MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 8}
_HYBRIDS = {
    "qwen3.5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3.5-taps": ("Qwen3_5TextConfig", {**_DELTA, "linear_conv_kernel_dim": 2, "linear_num_key_heads": 4}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**_DELTA, **_DELTA_EXPERTS}),
    "qwen3-next": ("Qwen3NextConfig", {**_DELTA, **_DELTA_EXPERTS, "mlp_only_layers": [1]}),
    "mamba2": ("Mamba2Config", _MAMBA2),
    "mamba2-whole-norm": ("Mamba2Config", {**_MAMBA2, "n_groups": 1, "use_conv_bias": False, "use_bias": True}),
    "bamba": ("BambaConfig", {**_MAMBA, "mamba_n_groups": 2, "attn_layer_indices": [1]}),
    "granite-hybrid": ("GraniteMoeHybridConfig", {**_GRANITE, "position_embedding_type": None}),
    "granite-hybrid-rotated": ("GraniteMoeHybridConfig", {**_GRANITE, "position_embedding_type": "rope"}),
}


_GEMMA4 = {"num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": 7}
_GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 0}
_GEMMA4 |= {"vocab_size_per_layer_input": 211, "final_logit_softcapping": 9.0}
_LLAMA4 = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40}
_LLAMA4 |= {"intermediate_size_mlp": 176, "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1], "use_qk_norm": True}
_LLAMA4 |= {"attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.3}
_APART = {
    "gemma4": ("Gemma4TextConfig", _GEMMA4),
    "gemma4-keys": ("Gemma4TextConfig", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-inputs": ("Gemma4TextConfig", {**_GEMMA4, "hidden_size_per_layer_input": 24}),
    "gemma4-shared": (
        "Gemma4TextConfig",
        {**_GEMMA4, "hidden_size_per_layer_input": 24, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "llama4": ("Llama4TextConfig", _LLAMA4),
    "llama4-plain": ("Llama4TextConfig", {**_LLAMA4, "use_qk_norm": False, "attn_temperature_tuning": False}),
}


def _there(configs: dict) -> dict:
    found = {name: (getattr(transformers, kind, None), own) for name, (kind, own) in configs.items()}
    return {name: pair for name, pair in found.items() if pair[0] is not None}


CONFIGS |= _there(_LATER)
# What the decoder of the CPU computes, those of GPUs not all.
CPU_CONFIGS = {**CONFIGS, **_there(_OF_THE_CPU)}
# Of layers that differ from each other, or see stretches of a row: computed by the decoder of the CPU alone.
APART = _there(_APART)
# Gated delta nets, or Mamba-2, mostly beside attention; modules compute these in float32, whatever the model is in.
HYBRIDS = _there(_HYBRIDS)
_WHOLE = {"intermediate_size": 88}  # elements of an expert: transformers multiplies multiples of 8 in bfloat16
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, **_ORIGINAL}
_GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40, "head_dim": 16}
_GPT_OSS |= {"sliding_window": 7, "layer_types": _KINDS, "attention_bias": True, "rope_parameters": _YARN}
_GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "routed_scaling_factor": 1.5}
_GLM |= {"first_k_dense_replace": 1, "head_dim": 16, "n_group": 1, "topk_group": 1}
# Mixtures of experts.
MIXTURES = {
    "mixtral": (MixtralConfig, {**_WHOLE, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}),
    "olmoe": (OlmoeConfig, {**_WHOLE, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-renormalized": (
        OlmoeConfig,
        {**_WHOLE, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen2-moe": (Qwen2MoeConfig, {**_EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen2-moe-mixed": (
        Qwen2MoeConfig,
        {**_EXPERTS, "shared_expert_intermediate_size": 33, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe": (Qwen3MoeConfig, {**_EXPERTS, "head_dim": 24, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (Qwen3MoeConfig, {**_EXPERTS, "mlp_only_layers": [0, 2], "norm_topk_prob": False}),
    "qwen3-moe-one": (Qwen3MoeConfig, {**_EXPERTS, "num_experts": 1, "num_experts_per_tok": 1}),
    "gpt-oss": (GptOssConfig, _GPT_OSS),
    "glm4-moe": (Glm4MoeConfig, {**_GLM, "use_qk_norm": True}),
    "glm4-moe-groups": (Glm4MoeConfig, {**_GLM, "use_qk_norm": True, "n_group": 4, "topk_group": 2}),
    "glm4-moe-as-it-is": (Glm4MoeConfig, {**_GLM, "use_qk_norm": False, "norm_topk_prob": False}),
}
PACKED_MIXTURE = {"hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 32}
PACKED_SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}


def _follows(kind: type, word: str) -> bool:
    """Whether a config computes an entry from others, as Falcon's does the size of its heads."""
    return isinstance(getattr(kind, word, None), property)


def random_model(name: str, dtype: torch.dtype, *, seed: int = 0, **options) -> nn.Module:
    kind, own = {**CPU_CONFIGS, **MIXTURES, **HYBRIDS, **APART}[name]
    torch.manual_seed(seed)
    said = {word: value for word, value in {**_SHAPE, **own, **options}.items() if not _follows(kind, word)}
    model = AutoModelForCausalLM.from_config(kind(**said), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones would hide a forgotten bias or norm
            parameter.add_(torch.randn_like(parameter) * 0.2) if parameter.ndim == 1 else parameter.mul_(4)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):
            buffer.add_(torch.randn_like(buffer) * 0.1)
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = 0.7  # within reach of small weights
    return model.to(dtype).eval()


def packed_model(name: str = "llama", weights: str = "int4", dtype: torch.dtype = torch.float32, **settings):
    return packed(random_model(name, dtype, **PACKED_SHAPE), weights, **settings)


class Lanes:
    """Rows of a CudaDecoder that are fed some tokens at a time, over a cache full of old numbers."""

    def __init__(self, decoder: CudaDecoder, batch: int, slots: int = 64, rows: int | None = None):
        """rows: of the cache, of which the first `batch` are used."""
        self.decoder, self.lengths = decoder, [0] * batch
        self.cache = new_kv(decoder, rows or batch, slots).fill_(1e4)
        self.kv, self.states = self.cache[:, :, :batch], None
        if decoder.num_recurrent:
            how = decoder.num_recurrent, batch, decoder.dtype, decoder.device
            self.states = DeltaStates.new(decoder.sizes.delta, *how)

    def feed(self, tokens: list[list[int]], *, padding: int = 0, bits: Bits = OWN_BITS) -> list[torch.Tensor]:
        """Logits `[given tokens, vocab]` of every row; `padding` more columns hold no token."""
        width = max(map(len, tokens)) + padding
        ids = torch.tensor([row + [10**6] * (width - len(row)) for row in tokens], dtype=torch.int32)
        pick = torch.tensor([r * width + t for r, row in enumerate(tokens) for t in range(len(row))])
        numbers = (ids, self._ints(self.lengths), self._ints(map(len, tokens)))
        device = self.decoder.device
        logits = self.decoder.forward(
            *(number.to(device) for number in numbers), self.kv, pick=pick.to(device), bits=bits,
            states=self.states, settles=AT_END,
        )  # fmt: skip
        self.lengths = [length + len(row) for length, row in zip(self.lengths, tokens, strict=True)]
        return list(logits.split([len(row) for row in tokens]))

    @staticmethod
    def _ints(numbers) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int32)


def joined_linears(model: nn.Module, decoder: CudaDecoder) -> list[tuple[Callable, list[nn.Module]]]:
    """What multiplies in the layers of a Llama's decoder, and the modules whose outputs it computes, side by side."""
    pairs = []
    for own, layer in zip(model.model.layers, decoder._layers, strict=True):
        attention, mlp = own.self_attn, own.mlp
        pairs += [(layer.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]), (layer.o, [attention.o_proj])]
        pairs += [(layer.gate_up, [mlp.gate_proj, mlp.up_proj]), (layer.down, [mlp.down_proj])]
    return pairs


def packed_layers(model: nn.Module) -> list[tuple[str, PackedLinear]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, PackedLinear)]


def in_float64(model: nn.Module) -> nn.Module:
    """A copy with dense weights for inputs as they come."""
    wide = copy.deepcopy(model)
    for path, module in list(wide.named_modules()):
        if isinstance(module, PackedExperts):
            wide.set_submodule(path, module.dequantized_module(torch.float32).eval())
    for path, module in packed_layers(wide):
        linear = nn.Linear(module.in_features, module.out_features, module.bias is not None)
        linear.weight, linear.bias = nn.Parameter(module.dequantized_plain(torch.float32)), module.bias
        wide.set_submodule(path, linear.eval())
    return wide.double()


NARROW = 0.05  # of the standard deviation of a router's logits: below, rounding decides where a token goes


def exact_and_firm(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a mixture in float64, where the model is, and which tokens come before any of their row whose experts
    a rounding error could change."""
    wide = in_float64(model)
    wide.set_experts_implementation("eager")
    return firm_logits(wide, ids.to(model.device))


def firm_logits(wide: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `exact_and_firm`, of a model that is in float64 by now."""
    narrow = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)

    def look(router: nn.Module, _, outputs) -> None:
        logits, chosen = outputs[0].view(*ids.shape, -1), router.top_k
        if hasattr(router, "e_score_correction_bias"):
            logits = logits.sigmoid() + router.e_score_correction_bias
        narrowly = NARROW * logits.std()
        if hasattr(router, "num_group"):
            groups = logits.unflatten(-1, (router.num_group, -1)).topk(2, dim=-1).values.sum(dim=-1)
            best, last = groups.sort(dim=-1, descending=True), router.topk_group
            if last < router.num_group:
                narrow.logical_or_(best.values[..., last - 1] - best.values[..., last] < narrowly)
                seen = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, best.indices[..., :last], True)
                logits = logits.where(seen.repeat_interleave(logits.shape[-1] // router.num_group, dim=-1), -1.0)
        if chosen < logits.shape[-1]:
            best = logits.sort(dim=-1, descending=True).values
            narrow.logical_or_(best[..., chosen - 1] - best[..., chosen] < narrowly)

    found = [router for _, router in routers(wide) if "weight" in router._parameters]
    hooks = [router.register_forward_hook(look) for router in found]
    try:
        with torch.no_grad():
            logits = wide(ids).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits, narrow.cumsum(dim=1) == 0


def capped(logits: torch.Tensor, decoder: CudaDecoder) -> torch.Tensor:
    """Float64 logits as a model returns them: with the soft cap that choosing applies."""
    cap = decoder.logit_softcap
    return torch.tanh(logits.double() / cap) * cap if cap else logits.double()


def ragged_rows_agree(lanes: Lanes, ids: list[list[int]], together: torch.Tensor, one: int, other: int) -> None:
    """Three rows in three calls of different counts, a row without tokens in each of the first two, and padding: the
    bits of all tokens at once. one, other: tokens of the first row in the first call, of the last in the second."""
    lanes.feed([ids[0][:one], ids[1][:5], []])
    first = lanes.feed([ids[0][one : one + 4], [], ids[2][:other]], padding=2)
    second = lanes.feed([ids[0][one + 4 : one + 5], ids[1][5:7], ids[2][other : other + 3]])
    assert torch.equal(torch.cat([first[0], second[0]]), together[0, one : one + 5])
    assert torch.equal(second[1], together[1, 5:7])
    assert torch.equal(torch.cat([first[2], second[2]]), together[2, : other + 3])
