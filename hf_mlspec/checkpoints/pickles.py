"""What does a file of torch.save hold, read so that nothing in it can run?

A pickle is a program. Two gates stand before one: its names are read without running it, and all but a few
(`_ALLOWED`: tensors, storages, dtypes, plain containers) are refused; what passes is read by torch.load's own
restricted machine (``weights_only=True``). The class that QuaRot pickles, ``quant_utils.WeightQuantizer``, becomes the
inert `WeightQuantizer` here, which has its attributes and nothing of its code. Pickles of before torch 1.6 hold the
source of such a class, too; with one in it they are refused.
"""

from __future__ import annotations

import errno
import mmap
import pickletools
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .layer import HeldTensor

QUANTIZER = "quant_utils.WeightQuantizer"
_ALLOWED = {
    "collections.OrderedDict", "builtins.set", "__builtin__.set",
    "torch.Size", "torch.device", "torch.nn.parameter.Parameter", "torch.storage.UntypedStorage",
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", QUANTIZER,
}  # fmt: skip
_LEGACY_PICKLES = 5  # magic number, protocol, the saver's machine, the object, the keys of its storages
_LEGACY_START = b"\x80\x02"
_NAMED = 3  # refused names that a message lists


class WeightQuantizer:
    """An inert stand-in for QuaRot's class of that name: the attributes that were pickled, no code."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, Mapping):
            raise ValueError(f"the state of a {QUANTIZER} is a {type(state).__name__}, expected its attributes")
        self.__dict__.update(state)

    def value(self, name: str, default: Any = None) -> Any:
        """An attribute or a buffer, ``default`` where there is none."""
        buffers = self.__dict__.get("_buffers")
        if isinstance(buffers, Mapping) and name in buffers:
            return buffers[name]
        return self.__dict__.get(name, default)


def read_pickle(file: Path) -> Any:
    """What torch.save wrote to ``file`` (a zip, or a pickle of before torch 1.6): tensors on the CPU, in plain
    containers. A zip's tensors are mapped, not read.

    ValueError naming the file and what in it is refused: any global but those of tensors and plain containers,
    compressed or overlapping parts, tensors that claim more bytes than there are, damage of any kind.
    """
    try:
        is_zip = zipfile.is_zipfile(file)
        refused = sorted(set(_globals_of_zip(file) if is_zip else _globals_of_legacy(file)) - _ALLOWED)
        refused = [name for name in refused if not _of_torch(name)]
        if refused:
            more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            raise ValueError(f"it names {', '.join(refused[:_NAMED])}{more}")
        with torch.serialization.safe_globals([(WeightQuantizer, QUANTIZER)]):
            held = torch.load(str(file), map_location="cpu", weights_only=True, mmap=is_zip)
        _require_backed(held)
    except Exception as error:  # what a hostile file makes of its reader can be anything
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # a zip may name places that no file has
            raise
        raise ValueError(
            f"{file} is refused: {_reason(error)}; only tensors in plain containers are read, and nothing of a pickle "
            "is run"
        ) from error
    return held


def _reason(error: Exception) -> str:
    """The error's own words, without torch's advice to load the file with everything that is in it."""
    _, _, unpickler = str(error).partition("WeightsUnpickler error:")
    words = unpickler.strip() or str(error).strip() or type(error).__name__
    return words.splitlines()[0]


def held_tensors(state: Any, file: Path) -> dict[str, HeldTensor]:
    """The tensors of a state_dict that `read_pickle` read, by name; ValueError where it is none."""
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{file} holds no state_dict: a mapping of names to tensors was expected")
    return {name: HeldTensor(f"{name} in {file}", value) for name, value in state.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class PickledTensor:
    """A tensor of a state dict that torch.save wrote, as a `StoredTensor` of a file."""

    name: str
    tensor: Tensor
    file: Path
    begin: int = 0

    @property
    def end(self) -> int:
        """Bytes behind ``begin``."""
        return self.tensor.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensor."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the tensor."""
        return tuple(self.tensor.shape)

    @property
    def place(self) -> str:
        """``tensor in file``, for messages."""
        return f"{self.name} in {self.file}"

    def load(self) -> Tensor:
        """A copy of the tensor."""
        return self.tensor.detach().clone(memory_format=torch.contiguous_format)


def pickled_tensors(file: Path) -> list[PickledTensor]:
    """The tensors of a state dict, none of which is read before it is loaded. ValueError as of `read_pickle`, and
    naming the file where it is none."""
    state = read_pickle(file)
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ValueError(f"{file} holds no state dict of tensors: give the file of the weights")
    return [PickledTensor(str(name), tensor, file) for name, tensor in state.items()]


def _globals_of_zip(file: Path) -> Iterator[str]:
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        packed = [entry.filename for entry in entries if entry.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"its part {packed[0]} is compressed, torch.save compresses nothing")
        claimed, size = sum(entry.file_size for entry in entries), file.stat().st_size
        if claimed > size:
            raise ValueError(f"its parts claim {claimed} bytes, the file has {size}")
        pickles = [entry for entry in entries if entry.filename.endswith(".pkl")]
        if [Path(entry.filename).name for entry in pickles] != ["data.pkl"]:
            raise ValueError(f"it holds {len(pickles)} pickles, torch.save writes one, data.pkl")
        yield from _globals(archive.read(pickles[0]))


def _globals_of_legacy(file: Path) -> Iterator[str]:
    if tarfile.is_tarfile(file):
        raise ValueError("it is a tar, a layout of before torch 0.2")
    with file.open("rb") as stream:
        if stream.read(len(_LEGACY_START)) != _LEGACY_START:
            raise ValueError("it is neither a zip nor a pickle of torch.save")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as contents:  # reads what is there, never more
            for _ in range(_LEGACY_PICKLES):
                yield from _globals(contents)


def _globals(pickled: Any) -> Iterator[str]:
    """``module.name`` of every global of one pickle, which is parsed and not run. STACK_GLOBAL takes its names from
    the stack, INST and OBJ call at once: torch.save writes none of them."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("GLOBAL", "INST"):
            yield str(argument).replace(" ", ".", 1)
        elif opcode.name in ("STACK_GLOBAL", "OBJ", "EXT1", "EXT2", "EXT4"):
            yield f"a global by {opcode.name}"


def _of_torch(name: str) -> bool:
    """Whether it is a dtype, or the class of a typed storage."""
    module, _, last = name.rpartition(".")
    found = getattr(torch, last, None) if module == "torch" else None
    return isinstance(found, torch.dtype) or (isinstance(found, type) and last.endswith("Storage"))


def _require_backed(held: Any) -> None:
    """ValueError for a tensor whose elements are not all there: one number, claimed to be a billion of them."""
    seen, waiting = set(), [held]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            claimed, there = value.numel() * value.element_size(), value.untyped_storage().nbytes()
            if claimed > there:
                raise ValueError(f"a tensor of shape {list(value.shape)} claims {claimed} bytes, {there} are there")
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            waiting += value
        if isinstance(value, WeightQuantizer):
            waiting += value.__dict__.values()
