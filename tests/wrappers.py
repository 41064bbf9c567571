"""Which small random models that also see images do the tests decode with?"""

from __future__ import annotations

import torch
import transformers

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HEADS = {**_TEXT, "head_dim": 16}
_WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TOKENS = {"image_token_id": 190, "video_token_id": 191, "vision_start_token_id": 192, "vision_end_token_id": 193}
_EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYE |= {"image_size": 28, "patch_size": 14}
_QWEN_EYE = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_QWEN_EYE |= {"patch_size": 14}
WRAPPERS = {
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {**_HEADS, **_WINDOWS, "query_pre_attn_scalar": 20},
            "vision_config": _EYE,
            "image_token_id": 190,
            "boi_token_id": 191,
            "eoi_token_id": 192,
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen2-vl": (
        "Qwen2VLConfig",
        {
            "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
            **_TOKENS,
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLConfig",
        {"text_config": {**_TEXT, "rope_parameters": _SECTIONS}, "vision_config": _QWEN_EYE, **_TOKENS},
    ),
    "qwen3-vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**_HEADS, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
            "vision_config": {**_QWEN_EYE, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **_TOKENS,
        },
    ),
    "mistral3": (
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", **_HEADS, "sliding_window": 7},
            "vision_config": {"model_type": "pixtral", **_EYE},
            "image_token_index": 190,
            "spatial_merge_size": 1,
        },
    ),
    "llava": (
        "LlavaConfig",
        {
            "text_config": {"model_type": "granite", **_TEXT, "logits_scaling": 6.0, "residual_multiplier": 0.4},
            "vision_config": {"model_type": "clip_vision_model", **_EYE},
            "image_token_index": 190,
        },
    ),
}


def random_wrapper(name: str, dtype: torch.dtype = torch.float32):
    kind, settings = WRAPPERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # Gemma's projection of what it sees
                parameter.normal_(std=0.2)
            parameter.add_(torch.randn_like(parameter) * 0.2) if parameter.ndim == 1 else parameter.mul_(4)
    return model.eval()
