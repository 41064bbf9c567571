"""What does a reader say of one linear layer of a checkpoint, before and after it reads it?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..formats import FORMATS, PackedWeight


class Stored(Protocol):
    """One tensor of a file, as its header describes it. dtype None: one that torch does not have."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]

    @property
    def place(self) -> str:
        """``tensor in file``, for messages."""

    def load(self) -> Tensor:
        """A copy of it."""


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor that is in memory already, or about to be stored, as a `Stored`."""

    place: str
    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def load(self) -> Tensor:
        """A copy of it."""
        return self.tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class StoredLayer:
    """The tensors of one linear layer, by what their names have behind the layer's own: ``"qweight"``.

    in_features, out_features: as config.json has them. ValueError for a layer that has none.
    """

    name: str
    in_features: int
    out_features: int
    tensors: Mapping[str, Stored]

    def __post_init__(self) -> None:
        if self.in_features < 1 or self.out_features < 1:
            raise ValueError(
                f"{self.name} has {self.in_features} inputs and {self.out_features} outputs in config.json, a layer "
                "that is quantized has one of each at least: restore the config.json that was saved with the weights"
            )

    @property
    def stored_bytes(self) -> int:
        """Of all its tensors."""
        return sum(_nbytes(tensor) for tensor in self.tensors.values())


@dataclass(frozen=True)
class ReadLayer:
    """A layer that was read.

    weight: packed, or ``[out, in]`` of a floating dtype where no format of this package holds its values exactly.
    order: int64 ``[in]``, column j of ``weight`` multiplies input ``order[j]``; None: the inputs as they come.
    """

    weight: PackedWeight | Tensor
    order: Tensor | None = None


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is stored, and what it becomes. Whoever makes one has checked the layer: names, shapes, dtypes,
    and the values of everything but the codes.

    stored_as: for people, ``"GPTQ, 4 bits, groups of 128, act-order"``. tensors: what ``read`` takes of ``layer``.
    format: a word of FORMATS with its options, or "" for a dense weight, then why_dense says why. ordered: whether
    the inputs are permuted. read: the tensors, by their names in ``tensors`` -> the layer, with values that equal the
    checkpoint's own bit for bit; ValueError naming layer and tensor for codes that no quantizer writes.
    """

    layer: StoredLayer
    stored_as: str
    tensors: Mapping[str, Stored]
    read: Callable[[Mapping[str, Tensor]], ReadLayer]
    format: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    ordered: bool = False
    why_dense: str = ""

    @property
    def stored_bytes(self) -> int:
        """Of all the layer's tensors."""
        return self.layer.stored_bytes

    @property
    def bits_per_weight(self) -> float:
        """On disk, scales included."""
        return self.stored_bytes * 8 / (self.layer.in_features * self.layer.out_features)

    @property
    def read_as(self) -> str:
        """The format's title with its options, or "dense", for people."""
        if not self.format:
            return "dense"
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return FORMATS[self.format].title + (f" ({options})" if options else "")


def _nbytes(tensor: Stored) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count * (tensor.dtype.itemsize if tensor.dtype is not None else 0)


class Reader(Protocol):
    """Reads one kind of checkpoint.

    method: what config.json calls it, ``quantization_config["quant_method"]``. title: what people call it.
    """

    method: str
    title: str

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer is quantized; another one is stored as it is."""

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """ValueError or TypeError naming layer and tensor for what cannot be read: tensors that are missing, of other
        shapes or dtypes, or whose numbers no quantizer writes."""


def require_tensor(layer: StoredLayer, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> Stored:
    """The layer's tensor ``name``; ValueError or TypeError where it is missing, or of another shape or dtype."""
    tensor = layer.tensors.get(name)
    if tensor is None:
        have = ", ".join(sorted(layer.tensors)) or "nothing"
        raise ValueError(f"{layer.name}: {name} is missing, the files hold {have}; download the checkpoint again")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{tensor.place} has shape {list(tensor.shape)}, expected {list(shape)} for {layer.in_features} inputs "
            f"and {layer.out_features} outputs: config.json is of another model, or the file is damaged"
        )
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"{tensor.place} is {tensor.dtype}, expected {expected}")
    return tensor
