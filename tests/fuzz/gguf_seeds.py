"""What do good GGUF files look like, and how does one say something else? A model, settings alone, and a matrix in
every kind of blocks; settings and tensors are changed, and written as a good file has them."""

from __future__ import annotations

import io
import random
import struct
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hf_mlspec.checkpoints.gguf_blocks import SCALE_BYTES, VALUES
from hf_mlspec.checkpoints.gguf_file import GGML_TYPES, open_gguf
from hf_mlspec.checkpoints.gguf_header import NewTensor, header, write_tensor
from hf_mlspec.checkpoints.gguf_rope import rope_divisors


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

    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_beta_fast": 32.0}  # fmt: skip
    settings = header({"general.architecture": "llama", "x": True, "y": 1.5}, [])
    whole = [by_path(lambda path, own=own: small_gguf(path, *own)) for own in (
        ("qwen3", linear), ("qwen3", yarn), ("llama", {}), ("llama", linear), ("qwen2", {}))]  # fmt: skip
    return by_path(written), settings, arrays(), *whole, *map(gguf_blocks, VALUES)


def arrays() -> bytes:
    """Settings that are arrays: of bools, of numbers, of texts, of arrays."""
    kinds = (
        struct.pack("<IQ3B", 7, 3, 0, 1, 1), struct.pack("<IQ2f", 6, 2, 1.0, 2.0),
        struct.pack("<IQQ1s", 8, 1, 1, b"a"), struct.pack("<IQIQ2IIQ", 9, 2, 4, 2, 7, 8, 5, 0),
        struct.pack("<IQq", 11, 1, -1),
    )  # fmt: skip
    keys = [struct.pack("<Q2sI", 2, b"k%d" % number, 9) + kind for number, kind in enumerate(kinds)]
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)) + b"".join(keys)
    return data + b"\0" * (-len(data) % 32)


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
    """A model of one layer in F32: with norms of heads, with biases, or with Llama 3's frequencies."""
    own: dict[str, torch.Tensor] = {}
    if architecture == "qwen3":
        own = {"blk.0.attn_q_norm.weight": torch.ones(16), "blk.0.attn_k_norm.weight": torch.ones(16)}
    elif architecture == "qwen2":
        own = {f"blk.0.attn_{name}.bias": torch.zeros(32 if name == "q" else 16) for name in "qkv"}
    else:
        said = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
        own = {"rope_freqs.weight": rope_divisors(said, 16)}
    own |= {f"{name}.weight": torch.ones(shape) for name, shape in (_SHAPES | {"output": (8, 32)}).items()}
    sizes = {key.removeprefix("llama."): value for key, value in _LLAMA.items()} | more
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()}
    tensors = [NewTensor(name, "F32", tuple(one.shape), lambda one=one: [one]) for name, one in own.items()]
    with path.open("wb") as file:
        first = {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 3}
        file.write(header(first | metadata, tensors))
        for tensor in tensors:
            write_tensor(file, tensor)


def _tensor(name: str, shape: tuple[int, ...]) -> NewTensor:
    if len(shape) == 1:
        return NewTensor(name, "F32", shape, lambda: [torch.ones(shape)])
    return NewTensor(name, "Q4_0", shape, lambda: [torch.full((shape[0], shape[1] // 32 * 18), 3, dtype=torch.uint8)])


_KEYS = (
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length",
    "llama.rope.scaling.attn_factor", "llama.rope.scaling.yarn_beta_slow", "llama.rope.scaling.x",
    "llama.rope.freq_base", "llama.rope.dimension_count", "llama.vocab_size", "llama.attention.key_length",
    "llama.attention.value_length", "llama.expert_count", "llama.block_count", "llama.attention.head_count",
    "llama.embedding_length", "llama.x", "general.type", "general.alignment", "split.count", "general.architecture",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id",
)  # fmt: skip
_VALUES = (0, 1, 2, 3, 16, 32, 2**31, 2**32 - 1, True, 0.0, 1.0, 2.0, 1e-6, 1e4, -1.0, float("nan"), "", "none",
           "linear", "yarn", "llama", "qwen2", "qwen3", "model", "adapter", ["a"])  # fmt: skip
_NAMES = ("rope_freqs.weight", "output.weight", "blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias",
          "blk.0.ffn_up.bias", "blk.1.attn_q.weight", "x.weight", "blk.0.attn_q_norm.weight")  # fmt: skip
_NEW_SHAPES = ((8,), (16,), (32,), (8, 32), (32, 32), (16, 32), (1, 32), (2, 256), (32, 16), (1, 1, 32))


@lru_cache(256)
def _opened(data: bytes) -> tuple[dict[str, Any], dict[str, NewTensor]] | None:
    """What a file says, and its tensors as they are; None where it is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        path.write_bytes(data)
        try:
            file = open_gguf(path)
        except ValueError:
            return None
        raw = {one.name: torch.frombuffer(bytearray(data[one.begin : one.end]), dtype=torch.uint8)
               for one in file.tensors.values() if one.end > one.begin}  # fmt: skip
        if len(raw) < len(file.tensors):
            return None
        tensors = {one.name: NewTensor(one.name, one.ggml_type, one.values_shape, lambda own=raw[one.name]: [own])
                   for one in file.tensors.values()}  # fmt: skip
        return dict(file.metadata), tensors


def changed_gguf(data: bytes, chance: random.Random) -> bytes | None:
    """A file with other settings or tensors, whole by itself; None where this one cannot be written again."""
    if (opened := _opened(data)) is None:
        return None
    metadata, tensors = dict(opened[0]), dict(opened[1])
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        how = chance.random()
        if how < 0.5:
            prefix = metadata.get("general.architecture", "llama")
            key = chance.choice((*metadata, *_KEYS)).replace("llama.", f"{prefix}.")
            metadata[key] = chance.choice(_VALUES)
        elif how < 0.6 and metadata:
            del metadata[chance.choice(list(metadata))]
        elif how < 0.7 and tensors:
            del tensors[chance.choice(list(tensors))]
        else:
            name, shape = chance.choice((*tensors, *_NAMES)), chance.choice(_NEW_SHAPES)
            fill = chance.choice((0.0, 1.0, 8.0, float("nan")))
            tensors[name] = NewTensor(name, "F32", shape, lambda shape=shape, fill=fill: [torch.full(shape, fill)])
    try:
        return _whole(metadata, list(tensors.values()))
    except (TypeError, AttributeError, OverflowError, UnicodeError):  # arrays that nothing here writes
        return None


def _whole(metadata: dict[str, Any], tensors: list[NewTensor]) -> bytes:
    file = io.BytesIO()
    file.write(header(metadata, tensors))
    for tensor in tensors:
        write_tensor(file, tensor)
    return file.getvalue()
