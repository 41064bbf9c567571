"""What does a GGUF file say of itself, and is every tensor where its header puts it?

A file (versions 2 and 3, little-endian) is: "GGUF", the version, the counts of tensors and of metadata, the metadata
(key, type, value), one entry a tensor (name, sizes with the columns first, type, offset), and behind padding to the
alignment the tensors, each padded to the alignment as well.

Source: the GGUF specification, ggml's docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .safetensors_file import mapped

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
_ALIGNMENT = 32  # of files that do not say
_LARGEST_ALIGNMENT = 1 << 20
_LONGEST_HEADER = 1 << 26  # bytes; those of the largest vocabularies have 15 MB
_MOST_ENTRIES, _MOST_TENSORS = 1 << 16, 1 << 18
_LONGEST_KEY = 65535  # of the specification
_MAX_DIMS = 4
_MAX_DEPTH = 4  # arrays in arrays
_LEAST_ENTRY = 14  # bytes: a key of one byte and a value of one
_LEAST_TENSOR = 33  # bytes: a name of one byte and one size


class GgmlType(NamedTuple):
    """values: of a block, consecutive along a row. size: its bytes. dtype: None for blocks of codes and scales."""

    name: str
    values: int
    size: int
    dtype: torch.dtype | None = None


GGML_TYPES = {
    0: GgmlType("F32", 1, 4, torch.float32), 1: GgmlType("F16", 1, 2, torch.float16),
    2: GgmlType("Q4_0", 32, 18), 3: GgmlType("Q4_1", 32, 20), 6: GgmlType("Q5_0", 32, 22), 7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34), 9: GgmlType("Q8_1", 32, 40), 10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110), 12: GgmlType("Q4_K", 256, 144), 13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210), 15: GgmlType("Q8_K", 256, 292), 16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74), 18: GgmlType("IQ3_XXS", 256, 98), 19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18), 21: GgmlType("IQ3_S", 256, 110), 22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136), 24: GgmlType("I8", 1, 1, torch.int8), 25: GgmlType("I16", 1, 2, torch.int16),
    26: GgmlType("I32", 1, 4, torch.int32), 27: GgmlType("I64", 1, 8, torch.int64),
    28: GgmlType("F64", 1, 8, torch.float64), 29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2, torch.bfloat16), 34: GgmlType("TQ1_0", 256, 54), 35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17), 40: GgmlType("NVFP4", 64, 36), 41: GgmlType("Q1_0", 128, 18),
}  # fmt: skip
# Value types of metadata that have a fixed size, by number: struct's letter, which array knows too.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: its bytes are ``file[begin:end]``. A `layer.Stored`.

    ggml_type: "Q4_0". values_shape: in torch's order, ``[rows, cols]``. dtype, shape: of what `load` returns; of
    blocks uint8 ``[rows, bytes of a row]``. A type that this package does not know has dtype None, and no end.
    """

    name: str
    ggml_type: str
    values_shape: tuple[int, ...]
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path

    @property
    def place(self) -> str:
        """``tensor in file``, for messages."""
        return f"{self.name} in {self.file}"

    def read(self, contents: memoryview, rows: slice | None = None) -> torch.Tensor:
        """A copy of the tensor, or of some of a matrix' consecutive rows, out of the whole file's ``contents``."""
        shape, begin, end = self.shape, self.begin, self.end
        if self.dtype is None:
            raise ValueError(f"{self.place} is of ggml's {self.ggml_type}, which this package does not know")
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            of_a_row = (end - begin) // shape[0]
            begin, end = begin + first * of_a_row, begin + last * of_a_row
            shape = (last - first, *shape[1:])
        return torch.frombuffer(bytearray(contents[begin:end]), dtype=self.dtype).view(shape)

    def load(self) -> torch.Tensor:
        """A copy of the tensor; ValueError naming the type where this package does not know it."""
        with mapped(self.file) as contents:
            return self.read(contents)


@dataclass(frozen=True)
class GgufFile:
    """A file's header. metadata: numbers, bools, strings, lists of strings or of arrays, and arrays of numbers (bools
    as 0 and 1). tensors: by their names, in the file's order."""

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


class _Damage(Exception):
    """Why a header cannot be that of a GGUF file."""


def open_gguf(path: str | Path) -> GgufFile:
    """The header of a file, checked against the file's size before anything of a size that it names is allocated.

    ValueError naming the file, and the numbers, where it is no GGUF file of version 2 or 3, truncated or longer than
    its header says, or where names, sizes or offsets do not belong together.
    """
    path = Path(path)
    size = path.stat().st_size
    if size < 24:
        raise _damaged(path, f"it has {size} bytes, a GGUF file opens with 24")
    with mapped(path) as contents:
        header = contents[: min(size, _LONGEST_HEADER)]
        try:
            return _parse(path, _Cursor(header, size > len(header)), size)
        except _Damage as damage:
            raise _damaged(path, str(damage)) from None
        finally:
            header.release()


def _damaged(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} is damaged: {why}; download or write the checkpoint again")


class _Cursor:
    """Reads a header from its beginning. cut: whether the file goes on behind ``data``."""

    def __init__(self, data: memoryview, cut: bool) -> None:
        self.data, self.cut, self.at = data, cut, 0

    def require(self, num_bytes: int, what: str) -> None:
        left = len(self.data) - self.at
        if num_bytes > left:
            why = "which no header has" if self.cut else f"and the file has {left} more: it is truncated"
            raise _Damage(f"{what} at byte {self.at} needs {num_bytes} bytes, {why}")

    def take(self, num_bytes: int, what: str) -> bytes:
        self.require(num_bytes, what)
        self.at += num_bytes
        return bytes(self.data[self.at - num_bytes : self.at])

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), what))[0]

    def text(self, what: str) -> bytes:
        return self.take(self.number("Q", f"the length of {what}"), what)

    def name(self, what: str) -> str:
        written = self.text(what)
        try:
            name = written.decode()
        except UnicodeDecodeError:
            raise _Damage(f"{what} is {written[:64]!r}, which is no UTF-8") from None
        if not 0 < len(written) <= _LONGEST_KEY or not name.isprintable():
            raise _Damage(f"{what} has {len(written)} bytes, {name[:64]!r}, which is no name")
        return name


def _parse(path: Path, cursor: _Cursor, size: int) -> GgufFile:
    magic = cursor.take(4, "the magic")
    if magic != MAGIC:
        raise _Damage(f"it opens with {magic!r}, a GGUF file with {MAGIC!r}")
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        why = ", it was written for big-endian machines" if version and not version & 0xFFFF else ""
        raise _Damage(f"its version is {version}{why}, this package reads {VERSIONS[0]} and {VERSIONS[1]}")
    num_tensors = cursor.number("Q", "the number of tensors")
    num_entries = cursor.number("Q", "the number of metadata entries")
    what = f"a header of {num_tensors} tensors and {num_entries} metadata entries"
    if num_tensors > _MOST_TENSORS or num_entries > _MOST_ENTRIES:
        raise _Damage(f"it says that it has {what}, at most {_MOST_TENSORS} and {_MOST_ENTRIES} are read")
    cursor.require(num_tensors * _LEAST_TENSOR + num_entries * _LEAST_ENTRY, what)
    metadata = _unique(_entries(cursor, num_entries), "metadata key")
    alignment = _alignment(metadata)
    entries = _unique((_tensor_entry(cursor) for _ in range(num_tensors)), "tensor")
    start = _aligned(cursor.at, alignment)
    tensors = {name: _tensor(path, name, entry, start, alignment) for name, entry in entries.items()}
    _require_whole(tensors, start if tensors else cursor.at, alignment, size)
    return GgufFile(path, version, metadata, tensors)


def _unique(pairs: Iterator[tuple[str, Any]], what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Damage(f"{what} {name!r} occurs twice")
        found[name] = value
    return found


def _entries(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    for number in range(count):
        key = cursor.name(f"metadata key {number}")
        yield key, _value(cursor, cursor.number("I", f"the type of {key}"), key)


def _value(cursor: _Cursor, kind: int, key: str, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], key)
    if kind == BOOL:
        return bool(_require_bools(cursor.take(1, key), key)[0])
    if kind == STRING:
        return cursor.text(key).decode(errors="surrogateescape")  # some vocabularies hold bytes
    if kind == ARRAY and depth < _MAX_DEPTH:
        return _array(cursor, key, depth)
    raise _Damage(f"{key} is of type {kind}, " + ("nested too deep" if kind == ARRAY else "which does not exist"))


def _array(cursor: _Cursor, key: str, depth: int) -> Any:
    kind = cursor.number("I", f"the type of {key}")
    count = cursor.number("Q", f"the length of {key}")
    what = f"{key}, an array of {count},"
    if kind in _SCALARS:
        values = array(_SCALARS[kind])
        _frombytes(values, cursor.take(count * struct.calcsize(f"<{_SCALARS[kind]}"), what), _SCALARS[kind])
        return values
    if kind == BOOL:
        return array("B", _require_bools(cursor.take(count, what), key))
    least = 8 if kind == STRING else 12  # bytes of an empty one
    cursor.require(count * least, what)
    return [_value(cursor, kind, key, depth + 1) for _ in range(count)]


def _frombytes(values: array, data: bytes, letter: str) -> None:
    if values.itemsize == struct.calcsize(f"<{letter}") and struct.pack("=H", 1) == b"\x01\x00":
        values.frombytes(data)
    else:
        values.extend(number for (number,) in struct.iter_unpack(f"<{letter}", data))


def _require_bools(data: bytes, key: str) -> bytes:
    if data.strip(b"\x00\x01"):
        odd = next(byte for byte in data if byte > 1)
        raise _Damage(f"{key} holds {odd}, a bool is 0 or 1")
    return data


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get(ALIGNMENT_KEY, _ALIGNMENT)
    whole = isinstance(alignment, int) and 0 < alignment <= _LARGEST_ALIGNMENT
    if not whole or alignment & (alignment - 1):
        raise _Damage(f"{ALIGNMENT_KEY} is {alignment!r}, expected a power of two")
    return alignment


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


class _Entry(NamedTuple):
    """Of a tensor, as the header has it: sizes with the columns first."""

    sizes: tuple[int, ...]
    kind: int
    offset: int


def _tensor_entry(cursor: _Cursor) -> tuple[str, _Entry]:
    name = cursor.name("a tensor's name")
    num_dims = cursor.number("I", f"the number of axes of {name}")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _Damage(f"{name} has {num_dims} axes, expected 1 to {_MAX_DIMS}")
    sizes = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims, f"the sizes of {name}"))
    kind = cursor.number("I", f"the type of {name}")
    return name, _Entry(sizes, kind, cursor.number("Q", f"the offset of {name}"))


def _tensor(path: Path, name: str, entry: _Entry, start: int, alignment: int) -> GgufTensor:
    shape = entry.sizes[::-1]
    if not all(shape) or math.prod(shape) >= 1 << 63:
        raise _Damage(f"{name} has shape {list(shape)}, which no tensor has")
    if entry.offset % alignment:
        raise _Damage(f"{name} has offset {entry.offset}, no multiple of the alignment {alignment}")
    begin = start + entry.offset
    ggml = GGML_TYPES.get(entry.kind)
    if ggml is None:
        return GgufTensor(name, f"type {entry.kind}", shape, None, shape, begin, begin, path)
    if shape[-1] % ggml.values:
        raise _Damage(f"{name} has shape {list(shape)}, a block of {ggml.name} holds {ggml.values} values of a row")
    end = begin + math.prod(shape) // ggml.values * ggml.size
    stored = shape if ggml.dtype is not None else (*shape[:-1], shape[-1] // ggml.values * ggml.size)
    return GgufTensor(name, ggml.name, shape, ggml.dtype or torch.uint8, stored, begin, end, path)


def _require_whole(tensors: Mapping[str, GgufTensor], start: int, alignment: int, size: int) -> None:
    end, known = start, True  # known: whether the length of the tensor before is
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.end > size:
            raise _Damage(f"it has {size} bytes, {tensor.name} ends at {tensor.end}: it is truncated")
        if tensor.begin < end or (known and tensor.begin > _aligned(end, alignment)):
            raise _Damage(f"{tensor.name} begins at byte {tensor.begin}, what is before it ends at {end}")
        end, known = tensor.end, tensor.dtype is not None
    if known and size > _aligned(end, alignment):
        raise _Damage(f"it has {size} bytes, its header describes {end}: it is longer than what was saved")
