"""What does a safetensors file hold, is it whole, and are its bytes those that were saved?"""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

CHECKSUMS_KEY = "mlspec_crc32"  # in every file's metadata: JSON, tensor name -> CRC-32 as 8 hexadecimal digits
_LENGTH_BYTES = 8  # a file opens with the header's length, little-endian
_LONGEST_HEADER = 100_000_000  # safetensors' own limit
_THREADS = min(4, os.cpu_count() or 1)
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: its bytes are ``file[begin:end]``; dtype None where torch has none of that name."""

    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path

    @property
    def place(self) -> str:
        """``tensor in file``, for messages."""
        return f"{self.name} in {self.file}"

    def read(self, contents: memoryview) -> torch.Tensor:
        """A copy of the tensor out of the whole file's ``contents``."""
        flat = torch.frombuffer(bytearray(contents[self.begin : self.end]), dtype=self.dtype)
        return flat.view(self.shape)

    def load(self) -> torch.Tensor:
        """A copy of the tensor."""
        with mapped(self.file) as contents:
            return self.read(contents)


def read_header(file: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors and the metadata of ``file``, read from its header alone.

    ValueError naming the file, and the numbers, when it is truncated or longer than its header says, when the header
    is no JSON object of tensors, or when a tensor's bytes, dtype and shape do not belong together.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if len(first) < _LENGTH_BYTES or length > _LONGEST_HEADER:
            raise _damaged(file, f"it has {size} bytes and opens with a header length of {length}")
        if _LENGTH_BYTES + length > size:
            raise _damaged(file, f"it has {size} bytes, its header alone {_LENGTH_BYTES + length}: it is truncated")
        text = stream.read(length)
    try:
        header = json.loads(text)
        metadata = dict(header.pop("__metadata__", {}))
        start = _LENGTH_BYTES + length
        tensors = [_stored(name, entry, start, file) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(file, f"its header of {length} bytes cannot be read ({error})") from error
    _require_whole(tensors, start, size, file)
    return tensors, metadata


def _stored(name: str, entry: dict[str, Any], start: int, file: Path) -> StoredTensor:
    begin, end = entry["data_offsets"]
    dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
    odd = [number for number in (begin, end, *shape) if type(number) is not int or number < 0]
    if odd:
        raise ValueError(f"{name} has {odd[0]!r} among its sizes and offsets")
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name} has shape {list(shape)} of {entry['dtype']} in {end - begin} bytes")
    return StoredTensor(name, dtype, shape, start + begin, start + end, file)


def _require_whole(tensors: list[StoredTensor], start: int, size: int, file: Path) -> None:
    end = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != end:
            raise _damaged(file, f"{tensor.name} begins at byte {tensor.begin}, the tensor before it ends at {end}")
        end = tensor.end
    if end != size:
        what = "truncated" if size < end else "longer than what was saved"
        last = next((tensor.name for tensor in tensors if tensor.end > size), None)
        where = f" within or before {last}" if last else ""
        raise _damaged(file, f"it has {size} bytes, its header describes {end}: it is {what}{where}")


def _damaged(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} is damaged: {why}; download or write the checkpoint again")


@contextmanager
def mapped(file: Path) -> Iterator[memoryview]:
    """The file's bytes, mapped read-only."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        contents = memoryview(mapping)
        try:
            yield contents
        finally:
            contents.release()


def require_checksums(file: Path, tensors: Iterable[StoredTensor], expected: dict[str, str]) -> None:
    """ValueError naming the tensor, the file and both CRC-32 when bytes of ``tensors`` are not those saved.

    Tensors that ``expected`` (name -> 8 hexadecimal digits) does not hold pass.
    """
    known = [tensor for tensor in tensors if tensor.name in expected]
    with mapped(file) as contents, ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda tensor: _crc(contents[tensor.begin : tensor.end]), known)
        wrong = [(t, crc) for t, crc in zip(known, found, strict=True) if crc != expected[t.name]]
    if wrong:
        tensor, crc = wrong[0]
        more = f" ({len(wrong)} tensors of this file differ)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{tensor.place} is damaged: its {tensor.end - tensor.begin} bytes have CRC-32 {crc}, saved was "
            f"{expected[tensor.name]}{more}; download or write the checkpoint again"
        )


def checksums(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """CRC-32 of every tensor's bytes, as 8 hexadecimal digits; tensors on the meta device are left out.

    A tensor that processes share (DTensor) is gathered for it, one at a time: all of them must call this.
    """
    shared = {name: _tensor_crc(t.full_tensor()) for name, t in tensors.items() if isinstance(t, DTensor)}
    local = [name for name, tensor in tensors.items() if name not in shared and not tensor.is_meta]
    with ThreadPoolExecutor(_THREADS) as pool:
        return {**shared, **dict(zip(local, pool.map(lambda name: _tensor_crc(tensors[name]), local), strict=True))}


def _tensor_crc(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return _crc(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else _crc(b"")


def _crc(data: memoryview | bytes) -> str:
    return f"{zlib.crc32(data):08x}"
