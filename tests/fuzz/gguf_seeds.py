"""What do good GGUF files look like? A model, settings alone, and a matrix in every kind of blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_mlspec.checkpoints.gguf_blocks import SCALE_BYTES, VALUES
from hf_mlspec.checkpoints.gguf_file import GGML_TYPES
from hf_mlspec.checkpoints.gguf_header import NewTensor, header, write_tensor


def by_path(write: Callable[[Path], Any]) -> bytes:
    """What a writer puts at a path."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "written"
        write(path)
        return path.read_bytes()


_LLAMA = {
    "llama.context_length": 64, "llama.embedding_length": 32, "llama.feed_forward_length": 32, "llama.block_count": 1,
    "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.vocab_size": 8,
    "llama.rope.dimension_count": 16, "llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.freq_base": 1e4,
}  # fmt: skip
_SHAPES = {
    "token_embd": (8, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
    "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
    "blk.0.ffn_gate": (32, 32), "blk.0.ffn_up": (32, 32), "blk.0.ffn_down": (32, 32),
}  # fmt: skip


def gguf() -> tuple[bytes, ...]:
    """A llama of one layer in Q4_0 and F32, and a file of settings alone."""
    metadata = {"general.architecture": "llama", "general.name": "tiny", **_LLAMA, "tokenizer.ggml.tokens": ["a", "b"]}

    def written(path: Path) -> None:
        tensors = [_tensor(f"{name}.weight", shape) for name, shape in _SHAPES.items()]
        with path.open("wb") as file:
            file.write(header(metadata, tensors))
            for tensor in tensors:
                write_tensor(file, tensor)

    rope = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    settings = header({"general.architecture": "llama", "x": True, "y": 1.5}, [])
    return by_path(written), settings, *map(gguf_blocks, VALUES), by_path(lambda path: small_gguf(path, "qwen3", rope))


def gguf_blocks(kind: str) -> bytes:
    """One matrix in blocks of a kind, whose scales are float16 numbers above 0."""
    ggml = next(one for one in GGML_TYPES.values() if one.name == kind)
    torch.manual_seed(0)
    blocks = torch.randint(0, 120, (2 * 256 // ggml.values, ggml.size), dtype=torch.uint8)
    if kind in SCALE_BYTES:
        first, last = SCALE_BYTES[kind]
        scale = [0, 60] if last - first == 2 else [0, 60, 0, 196]  # 1, and -4 as a minimum: a zero point of 4
        blocks[:, first:last] = torch.tensor(scale, dtype=torch.uint8)
    tensor = NewTensor("blk.0.ffn_up.weight", kind, (2, 256), lambda: [blocks.view(2, -1)])

    def written(path: Path) -> None:
        with path.open("wb") as file:
            file.write(header({"general.architecture": "llama"}, [tensor]))
            write_tensor(file, tensor)

    return by_path(written)


def small_gguf(path: Path, architecture: str, more: dict[str, Any]) -> None:
    """A model of one layer in F32, with norms of heads."""
    shapes = {"blk.0.attn_q_norm": (16,), "blk.0.attn_k_norm": (16,)} | _SHAPES | {"output": (8, 32)}
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in (_LLAMA | more).items()}
    tensors = [NewTensor(f"{name}.weight", "F32", shape, lambda shape=shape: [torch.ones(shape)])
               for name, shape in shapes.items()]  # fmt: skip
    with path.open("wb") as file:
        own = {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 3}
        file.write(header(own | metadata, tensors))
        for tensor in tensors:
            write_tensor(file, tensor)


def _tensor(name: str, shape: tuple[int, ...]) -> NewTensor:
    if len(shape) == 1:
        return NewTensor(name, "F32", shape, lambda: [torch.ones(shape)])
    return NewTensor(name, "Q4_0", shape, lambda: [torch.full((shape[0], shape[1] // 32 * 18), 3, dtype=torch.uint8)])
