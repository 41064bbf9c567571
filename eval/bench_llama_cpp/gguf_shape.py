"""How does a GGUF file of a shape in gpt-oss's form, with random codes, come to be? llama.cpp reads it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers import GptOssConfig

BLOCK, BLOCK_BYTES, SCALE = 32, 17, 121  # MXFP4 in ggml: an exponent byte and 16 of codes
_TYPES = gguf.GGMLQuantizationType


def write(config: GptOssConfig, file: Path) -> int:
    """Experts in MXFP4, other matrices in BF16, the rest in float32; -> its bytes. Layers hold the same values."""
    writer = gguf.GGUFWriter(str(file), "gpt-oss")
    _settings(writer, config)
    hidden, inner, count = config.hidden_size, config.intermediate_size, config.num_local_experts
    heads, kept = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    draw = np.random.default_rng(0)
    floats = {n: _float32(draw, n) for n in {hidden, inner, count, heads, kept, config.num_attention_heads}}
    matrices = {shape: _bfloat16(draw, *shape) for shape in {
        (config.vocab_size, hidden), (heads, hidden), (kept, hidden), (hidden, heads)}}  # fmt: skip
    wide, narrow = _mxfp4(draw, count, inner, hidden), _mxfp4(draw, count, hidden, inner)
    biases = {n: np.broadcast_to(floats[n], (count, n)).copy() for n in (hidden, inner)}
    router = draw.standard_normal((count, hidden), dtype=np.float32) * 0.02
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", matrices[config.vocab_size, hidden], raw_dtype=_TYPES.BF16)
    writer.add_tensor("output_norm.weight", floats[hidden])
    for layer in range(config.num_hidden_layers):
        at = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm"):
            writer.add_tensor(f"{at}.{name}.weight", floats[hidden])
        linears = ("attn_q", heads, hidden), ("attn_k", kept, hidden), ("attn_v", kept, hidden)
        for name, out, size in (*linears, ("attn_output", hidden, heads)):
            writer.add_tensor(f"{at}.{name}.weight", matrices[out, size], raw_dtype=_TYPES.BF16)
            writer.add_tensor(f"{at}.{name}.bias", floats[out])
        writer.add_tensor(f"{at}.attn_sinks.weight", floats[config.num_attention_heads])
        writer.add_tensor(f"{at}.ffn_gate_inp.weight", router)
        writer.add_tensor(f"{at}.ffn_gate_inp.bias", floats[count])
        for name, codes, out in (("gate", wide, inner), ("up", wide, inner), ("down", narrow, hidden)):
            writer.add_tensor(f"{at}.ffn_{name}_exps.weight", codes, raw_dtype=_TYPES.MXFP4)
            writer.add_tensor(f"{at}.ffn_{name}_exps.bias", biases[out])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.stat().st_size


def _settings(writer: gguf.GGUFWriter, config: GptOssConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(150000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(32.0)
    writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)


def _float32(draw: np.random.Generator, count: int) -> np.ndarray:
    return draw.standard_normal(count, dtype=np.float32) * 0.02


def _bfloat16(draw: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """As bytes ``[rows, 2 columns]``: the upper halves of float32 numbers, drawn once a row of 1,024 and turned."""
    few = draw.standard_normal((min(rows, 1024), columns), dtype=np.float32) * 0.02
    bits = (few.view(np.uint32) >> 16).astype(np.uint16)
    return np.tile(bits, (-(-rows // len(bits)), 1))[:rows].view(np.uint8)


def _mxfp4(draw: np.random.Generator, count: int, out: int, size: int) -> np.ndarray:
    """As bytes ``[count, out, blocks of 17]``."""
    blocks = draw.integers(0, 256, (count, out, size // BLOCK, BLOCK_BYTES), dtype=np.uint8)
    blocks[..., 0] = SCALE
    return blocks.reshape(count, out, -1)
