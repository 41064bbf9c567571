"""How is a GGUF file laid out that this package writes? Version 3, little-endian, aligned to 32 bytes.

What the bytes mean is in gguf_file.py, which reads them. Tensors come one after another, a chunk of rows at a time.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .gguf_file import (
    ARRAY,
    BOOL,
    FLOAT32,
    GGML_TYPES,
    INT32,
    MAGIC,
    STRING,
    UINT32,
    GgmlType,
    GgufFile,
    GgufTensor,
)  # fmt: skip

ALIGNMENT = 32
_VERSION = 3
_NUMBERS = {ggml.name: number for number, ggml in GGML_TYPES.items()}


@dataclass(frozen=True)
class NewTensor:
    """One that will be written.

    name: ggml's. ggml_type: ``"Q4_0"``. shape: of the values, in torch's order. chunks: called once, gives the bytes,
    as tensors of any dtype. known: the values where they are few and a reader of the header needs them.
    """

    name: str
    ggml_type: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Tensor]]
    known: Tensor | None = None

    @property
    def ggml(self) -> GgmlType:
        """Its type's record."""
        return GGML_TYPES[_NUMBERS[self.ggml_type]]

    @property
    def nbytes(self) -> int:
        """Without the padding behind it."""
        return math.prod(self.shape) // self.ggml.values * self.ggml.size


@dataclass(frozen=True)
class _Planned(GgufTensor):
    """A tensor of a file that is not written yet."""

    known: Tensor | None = None

    def load(self) -> Tensor:
        if self.known is None:
            raise ValueError(f"{self.place} is not written yet")
        return self.known


def header(metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> bytes:
    """All that stands before the first tensor, padded. metadata: bools, ints (uint32), floats (float32), strings,
    lists of strings, and arrays of "i". TypeError naming a key of another value."""
    written = [MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    written += [_text(key) + _value(key, value) for key, value in metadata.items()]
    for tensor, offset in zip(tensors, _offsets(tensors), strict=False):
        sizes = tensor.shape[::-1]
        shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        written.append(_text(tensor.name) + shape + struct.pack("<IQ", _NUMBERS[tensor.ggml_type], offset))
    joined = b"".join(written)
    return joined + _padding(len(joined))


def planned(path: Path, metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> GgufFile:
    """What `gguf_file.open_gguf` will say of the file."""
    start, held = len(header(metadata, tensors)), {}
    for tensor, offset in zip(tensors, _offsets(tensors), strict=False):
        ggml, begin = tensor.ggml, start + offset
        shape = tensor.shape if ggml.dtype else (*tensor.shape[:-1], tensor.shape[-1] // ggml.values * ggml.size)
        held[tensor.name] = _Planned(
            tensor.name, ggml.name, tensor.shape, ggml.dtype or torch.uint8, shape, begin, begin + tensor.nbytes, path,
            tensor.known,
        )  # fmt: skip
    rounded = {key: _float32(value) if isinstance(value, float) else value for key, value in metadata.items()}
    return GgufFile(path, _VERSION, rounded, held)


def write_tensor(file: BinaryIO, tensor: NewTensor) -> None:
    """Write it behind what is there. ValueError where its chunks are not of the size that the header says."""
    written = 0
    for chunk in tensor.chunks():
        written += file.write(chunk.contiguous().view(torch.uint8).numpy())
    if written != tensor.nbytes:
        raise ValueError(f"{tensor.name} has {written} bytes, its shape and type say {tensor.nbytes}")
    file.write(_padding(written))


def size_of(metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> int:
    """Bytes of the whole file."""
    *_, end = _offsets(tensors)
    return len(header(metadata, tensors)) + end


def _offsets(tensors: Sequence[NewTensor]) -> Iterator[int]:
    """Of every tensor, behind the header, and of their end."""
    at = 0
    for tensor in tensors:
        yield at
        at += tensor.nbytes + len(_padding(tensor.nbytes))
    yield at


def _padding(length: int) -> bytes:
    return b"\0" * (-length % ALIGNMENT)


def _float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int) and 0 <= value < 1 << 32:
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, array) and value.typecode == "i":
        return struct.pack(f"<IIQ{len(value)}i", ARRAY, INT32, len(value), *value)
    raise TypeError(f"{key} is {value!r:.100}, which no metadata of a GGUF file that is written here can be")
