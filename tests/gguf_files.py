"""GGUF files for tests: written by the `gguf` package, which knows nothing of ours, or byte by byte."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="writes the files; pip install gguf")

SCALES = {"Q4_0": (0, 2), "Q4_1": (0, 4), "Q5_0": (0, 2), "Q5_1": (0, 4), "Q8_0": (0, 2), "Q4_K": (0, 4),
          "Q5_K": (0, 4), "Q6_K": (208, 210)}  # fmt: skip
STORED = {"F32": np.float32, "F16": np.float16}


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0, scales: str = "any") -> np.ndarray:
    """uint8 ``[rows, bytes]`` of every code there is; scales: "any" sign and some zeros, "positive", or "not negative"
    with some zeros."""
    rng = np.random.default_rng(seed)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    raw = rng.integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    each = raw.reshape(-1, size)
    if kind == "MXFP4":
        each[:, 0] = rng.integers(0, 254, len(each))
        return raw
    first, last = SCALES[kind]
    numbers = rng.normal(0, 0.02, (len(each), (last - first) // 2)).astype(np.float16)
    if scales != "any":
        numbers = np.abs(numbers) + np.float16(1e-6)
    if scales != "positive":
        numbers[:: 5] = 0
        numbers[1::10] = 6e-8  # subnormal
    if scales == "any":
        numbers[:: 15] = -0.0
    each[:, first:last] = numbers.view(np.uint8)
    return raw


def values_of(raw: np.ndarray, kind: str) -> torch.Tensor:
    """What the `gguf` package makes of them, float32."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])))


def write(path: Path, tensors: dict, metadata: dict | None = None, architecture: str = "llama") -> Path:
    """tensors: name -> (type, raw blocks or floats). metadata: key -> value, or (value, GGUFValueType)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        if isinstance(value, tuple):
            writer.add_key_value(key, *value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, (kind, data) in tensors.items():
        if kind in STORED:
            writer.add_tensor(name, data.astype(STORED[kind]))
        else:
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """One entry of metadata."""
    return text(key) + struct.pack("<I", kind) + value


def info(name: str | bytes, sizes: tuple, kind: int, offset: int) -> bytes:
    """One entry of a tensor."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def by_hand(
    entries: list | tuple = (), infos: list | tuple = (), data: bytes = b"", version: int = 3, alignment: int = 32,
    magic: bytes = b"GGUF", counts: tuple | None = None,
) -> bytes:  # fmt: skip
    """A file's bytes."""
    num_tensors, num_entries = counts or (len(infos), len(entries))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join(entries) + b"".join(infos)
    return header + b"\0" * (-len(header) % alignment) + data if infos else header
