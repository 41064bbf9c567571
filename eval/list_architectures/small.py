"""How is a small random model of a class made, so that it can be run? Settings of its config, one entry a class."""

from __future__ import annotations

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB, PAD, BOS, EOS = 64, 0, 1, 2
_IDS = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
# Of many kinds of layers at once: a config keeps what it does not know.
_MODERN = {
    **_SHAPE,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8),
}
# Of classes that can be both: an encoder sees later tokens, by the config of its own.
_BERT = {**_SHAPE, "is_decoder": True}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 64,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 128,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_PART = {**_SHAPE, "num_hidden_layers": 1, "vocab_size": VOCAB}
SETTINGS: dict[str, dict] = {
    **dict.fromkeys(
        (
            "AfmoeForCausalLM",
            "ApertusForCausalLM",
            "AriaTextForCausalLM",
            "BeamForCausalLM",
            "BitNetForCausalLM",
            "CTRLLMHeadModel",
            "Cohere2MoeForCausalLM",
            "DeepseekV4ForCausalLM",
            "DiffLlamaForCausalLM",
            "Dots1ForCausalLM",
            "Ernie4_5_MoeForCausalLM",
            "ExaoneMoeForCausalLM",
            "FalconMambaForCausalLM",
            "FlexOlmoForCausalLM",
            "FlintForCausalLM",
            "FuyuForCausalLM",
            "GraniteMoeForCausalLM",
            "GraniteMoeSWAForCausalLM",
            "GraniteMoeSharedForCausalLM",
            "GraniteSWAForCausalLM",
            "HYV3ForCausalLM",
            "HYV4ForCausalLM",
            "HrmTextForCausalLM",
            "HunYuanMoEV1ForCausalLM",
            "Inkling2ForCausalLM",
            "InklingForCausalLM",
            "JetMoeForCausalLM",
            "Kolibri1ForCausalLM",
            "LagunaForCausalLM",
            "Lfm2ForCausalLM",
            "MambaForCausalLM",
            "MellumForCausalLM",
            "MiMoV2FlashForCausalLM",
            "MiniMaxForCausalLM",
            "MiniMaxM2ForCausalLM",
            "MiniMaxM3VLForCausalLM",
            "Ministral3ForCausalLM",
        ),
        _MODERN,
    ),
    **dict.fromkeys(
        (
            "BertGenerationDecoder",
            "BertLMHeadModel",
            "BigBirdForCausalLM",
            "CamembertForCausalLM",
            "Data2VecTextForCausalLM",
            "ErnieForCausalLM",
            "MegatronBertForCausalLM",
            "RobertaForCausalLM",
            "RobertaPreLayerNormForCausalLM",
            "XLMRobertaForCausalLM",
            "XLMRobertaXLForCausalLM",
        ),
        _BERT,
    ),
    "XmodForCausalLM": {**_BERT, "default_language": "en_XX"},
    "ElectraForCausalLM": {**_BERT, "embedding_size": 32},
    "RoFormerForCausalLM": {**_BERT, "embedding_size": 32},
    "RemBertForCausalLM": {**_BERT, "input_embedding_size": 16, "output_embedding_size": 24},
    "RoCBertForCausalLM": {
        **_BERT,
        "pronunciation_vocab_size": VOCAB,
        "shape_vocab_size": VOCAB,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    **dict.fromkeys(
        (
            "BartForCausalLM",
            "BigBirdPegasusForCausalLM",
            "BlenderbotForCausalLM",
            "BlenderbotSmallForCausalLM",
            "MBartForCausalLM",
            "MvpForCausalLM",
            "PLBartForCausalLM",
            "PegasusForCausalLM",
        ),
        _BART,
    ),
    "MarianForCausalLM": {**_BART, "decoder_vocab_size": VOCAB},
    "TrOCRForCausalLM": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 128,
    },
    "WhisperForCausalLM": {**_BART, "max_target_positions": 128, "max_source_positions": 64},
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "BltForCausalLM": {
        "patcher_config": _PART,
        "encoder_config": {**_PART, "hidden_size_global": 32},
        "decoder_config": {**_PART, "hidden_size_global": 32},
        "global_config": _PART,
        "encoder_hash_byte_group_vocab": 97,
    },
    "CodeGenForCausalLM": {**_GPT, "rotary_dim": 4, "n_ctx": 128},
    "GPTJForCausalLM": {**_GPT, "rotary_dim": 4},
    "OpenAIGPTLMHeadModel": _GPT,
    "CpmAntForCausalLM": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "dim_head": 8,
        "dim_ff": 64,
        "num_hidden_layers": 2,
        "prompt_length": 4,
        "prompt_types": 4,
        "segment_types": 4,
    },
    "DogeForCausalLM": {**_SHAPE, "num_key_value_heads": 2, "keep_window_size": 8},
    "GPTNeoForCausalLM": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 128,
    },
    "GPTNeoXJapaneseForCausalLM": {**_SHAPE, "intermediate_multiple_size": 2},
    "GitForCausalLM": {
        **_SHAPE,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 16,
        },
    },
    "MossTranscribeDiarizeForConditionalGeneration": {
        "text_config": {**_SHAPE, **_IDS, "num_key_value_heads": 2, "head_dim": 8},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_mel_bins": 16,
        },
        "audio_token_id": 63,
    },
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "use_cache": True},
    "RecurrentGemmaForCausalLM": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 8,
    },
    "XGLMForCausalLM": {
        "d_model": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "XLMWithLMHeadModel": {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128},
    "XLNetLMHeadModel": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "d_head": 8},
}


def small(name: str, kind: str) -> nn.Module:
    """A seeded float32 model of a class of SETTINGS, in eval mode. kind: its model type."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**_IDS, **SETTINGS[name]})).float().eval()
    with torch.no_grad():  # flat logits would leave rounding to decide which token is best
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else parameter.add_(0.2 * torch.randn_like(parameter))
    return model
