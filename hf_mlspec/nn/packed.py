"""In which layout are packed parameters, on disk or in tiles for the kernels, and how does a module change it?"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..formats import FORMATS, Format, PackedWeight, Parts
from ..ops.products import sliced_linear
from .packed_formats import PACKINGS, Packing
from .switch import PrecisionSwitch
from .transforms import NONE, Transform, held_tensors

_changing_layout = threading.RLock()
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


class PackedModule(nn.Module, ABC):
    """A module with packed parameters ``<name>_<part>`` for each of ``names`` and of its format's parts.

    What one adds says how the parts of a name get into tiles and back, `_in_tiles` and `_on_disk`.

    They have one of two layouts, on disk and in state_dict() or, from the first forward on, in tiles (ops/tiles*.py;
    on a GPU with kernels ops/tiles*_cuda.py), told apart by the axes of the part
    with a row per output (scales, tables). A change exchanges the data of the
    very Parameter objects, so that all views of a model that share them (early_exit) change together.
    """

    format: str
    names: tuple[str, ...]
    disk_axes: int  # of the part with a row per output on disk; in tiles it has one more
    part_of: str | None = None  # of what it holds a part: no state of the whole can be saved then

    def __init__(self, switch: PrecisionSwitch) -> None:
        super().__init__()
        self.switch = switch

    @property
    def record(self) -> Format:
        """What the format is."""
        return FORMATS[self.format]

    @property
    def packing(self) -> Packing:
        """What modules do with the format."""
        return PACKINGS[self.format]

    @property
    def activation_bits(self) -> int:
        """The switch's, in this thread."""
        return self.switch.activation_bits

    @property
    def is_prepacked(self) -> bool:
        """Whether the parameters are in tiles."""
        if self.packing.prepack is None:
            return False
        return self._rows_part.dim() > self.disk_axes

    @property
    def is_lent(self) -> bool:
        """Whether plain tensors stand for the parameters: tensor parallelism puts a process's share there for the time
        of one call. They are not this module's to change."""
        return type(self._rows_part) is torch.Tensor

    @property
    def _rows_part(self) -> torch.Tensor:
        """The last name's part with a row per output, whose axes tell the layout."""
        return self._parameters[f"{self.names[-1]}_{self.record.weight.ROWS}"]

    def held(self, name: str) -> Parts:
        """The parameters ``<name>_<part>``, in their present layout; None for what the weight does without."""
        return self.record.weight.PARTS(*[self._parameters[f"{name}_{part}"] for part in self.record.parts])

    def parts(self, name: str) -> Parts:
        """The data of ``held(name)``."""
        return self.record.weight.PARTS(*[None if part is None else part.data for part in self.held(name)])

    def _in_one_layout(self, name: str) -> tuple[Parts, bool]:
        """`parts`, none of which another thread changes meanwhile, and whether they are in tiles."""
        with _changing_layout:
            return self.parts(name), self.is_prepacked

    @torch.compiler.disable
    def prepack_(self) -> PackedModule:
        """Parameters in tiles, as the kernels of their device read them. A second call changes nothing."""
        if self.packing.prepack is None:
            return self
        with _changing_layout, torch.inference_mode(False):
            if self.is_prepacked and not self._fit_device():
                self._hold([self._on_disk(name) for name in self.names])
            if not self.is_prepacked:
                self._hold([self._in_tiles(name) for name in self.names])
        return self

    def unprepack_(self) -> PackedModule:
        """Parameters as on disk. A second call changes nothing."""
        with _changing_layout, torch.inference_mode(False):
            if self.is_prepacked:
                self._hold([self._on_disk(name) for name in self.names])
        return self

    def _fit_device(self) -> bool:
        """Whether tiles that were moved without this module's knowledge are those of their device."""
        stacked = self.disk_axes - 2  # axes of experts: any one of them tells
        codes = [self.parts(name)[0] for name in self.names]
        return all(self.packing.fits(tiles[(0,) * stacked]) for tiles in codes)

    @abstractmethod
    def _in_tiles(self, name: str) -> Parts:
        """The parts of ``name``, which are as on disk, in tiles."""

    @abstractmethod
    def _on_disk(self, name: str) -> Parts:
        """The parts of ``name`` as on disk: their own memory where they are, else a copy."""

    def _product(self, x: torch.Tensor, parts: Parts, rows: int, bias: torch.Tensor | None) -> torch.Tensor:
        """``[..., in]`` times a weight of so many rows, as ``held``."""
        if self.packing.multiply is None:
            return sliced_linear(x, self.record.weight(*parts).dequantize(x.dtype), bias)
        return self.packing.multiply(x, parts, rows, bias, self.switch)

    def _register_parts(self, name: str, tensors: Parts) -> None:
        with torch.inference_mode(False):  # a tensor made in that mode could not be sliced outside of it
            for part, tensor in zip(self.record.parts, tensors, strict=True):
                if tensor is not None:
                    tensor = nn.Parameter(tensor.clone() if tensor.is_inference() else tensor, requires_grad=False)
                self.register_parameter(f"{name}_{part}", tensor)

    def _hold(self, tensors: list[Parts]) -> None:
        # The last name's part with rows comes last: other threads look at it to tell the layout.
        last = self.record.weight.ROWS
        for name, parts in zip(self.names, tensors, strict=True):
            for part, tensor in sorted(zip(self.record.parts, parts, strict=True), key=lambda own: own[0] == last):
                if tensor is not None:
                    getattr(self, f"{name}_{part}").data = tensor

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if self.part_of is not None:
            raise ValueError(f"{prefix}weight is of {self.part_of}: pack and save the whole model, without tp_plan")
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.names if self.is_prepacked else ():
            for part, tensor in zip(self.record.parts, self._on_disk(name), strict=True):
                if tensor is not None:
                    destination[f"{prefix}{name}_{part}"] = tensor

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unprepack_()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        """Moves everything, casts the biases, and never casts a part of a weight: `.half()` and `.to(dtype)` see
        floating parts (scales, escapes) as integers of their width, whose bits they leave alone. Another kind of
        device reads other tiles: weights that go there are put back as on disk, and in tiles by the next forward."""
        codes = self.held(self.names[-1])[0].detach()
        if self.is_prepacked and fn(codes.new_empty(0)).device.type != codes.device.type:
            self.unprepack_()
        parts = [
            (f"{name}_{part}", tensor)
            for name in self.names
            for part, tensor in zip(self.record.parts, self.held(name), strict=True)
        ]
        floats = {id(part): name for name, part in parts if part is not None and part.is_floating_point()}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in floats:
                return fn(tensor)
            integers = _INTEGERS[tensor.element_size()]
            bits = fn(tensor.detach().view(integers))
            if bits.dtype != integers:
                raise TypeError(f"{type(self).__name__}: its {floats[id(tensor)]} is {tensor.dtype} and cannot be "
                                f"cast to {bits.dtype}")  # fmt: skip
            return bits.view(tensor.dtype)

        return super()._apply(moved, recurse)


class PackedLinear(PackedModule):
    """``y = x W^T + b`` with W in a packed format, in one copy; what all of them have in common."""

    names = ("weight",)
    disk_axes = 2
    reads_dense = True  # whether a materialized weight is what a call asks for

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, name: str = "weight", switch: PrecisionSwitch | None = None, **options: Any
    ) -> PackedLinear:
        """Quantize ``linear.weight``; the bias is shared, a transform stays. options: of the format. TypeError and
        ValueError naming ``name`` as its weight's ``from_dense``."""
        weight = FORMATS[cls.format].weight.from_dense(linear.weight.detach(), name=name, **options)
        return cls(weight, linear.bias, switch).transform_like_(linear).train(linear.training)

    @classmethod
    def empty(
        cls, linear: nn.Linear, name: str = "weight", switch: PrecisionSwitch | None = None, **options: Any
    ) -> PackedLinear:
        """The shape of ``linear`` with values of 0 on its device (meta while a checkpoint loads)."""
        record = FORMATS[cls.format]
        record.require_fit(linear.in_features, name, **options)
        parts = record.zeros(tuple(linear.weight.shape), linear.weight.device, **options)
        return cls(record.weight(*parts, name=name), linear.bias, switch)

    def __init__(
        self, weight: PackedWeight, bias: nn.Parameter | None = None, switch: PrecisionSwitch | None = None
    ) -> None:
        """Takes over the tensors of ``weight`` and the very ``bias`` object; without ``switch`` it gets one of its own
        at 16 bits. ValueError when they do not fit together."""
        super().__init__(require_switch(switch, self.format, weight.name))
        weight.validate()
        if bias is not None and list(bias.shape) != [weight.out_features]:
            raise ValueError(
                f"{weight.name}: bias has shape {list(bias.shape)}, the weight {weight.out_features} rows"
            )
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._rows = weight.out_features  # fewer where tensor parallelism gave this layer a part of the outputs
        self._register_parts("weight", weight.parts)
        self.register_parameter("bias", bias)
        self.register_buffer("weight_dense", None, persistent=False)
        self.transform = NONE

    def transform_(self, kind: Transform, tensors: Mapping[str, torch.Tensor] | None = None) -> PackedLinear:
        """Let inputs go through ``kind`` first, whatever the precision: the weight was made for what comes out.

        tensors: those of the kind, which are saved with the layer; None: as the kind has them. ValueError where their
        names, shapes or dtypes are others, or their values none that the kind has.
        """
        own = dict(kind.tensors(self.in_features, next(self.parameters()).device))
        for name, tensor in (own if tensors is None else tensors).items():
            if name not in own or (tensor.shape, tensor.dtype) != (own[name].shape, own[name].dtype):
                raise ValueError(
                    f"transform {kind.word!r}: {name} is {tensor.dtype} {list(tensor.shape)}, for {self.in_features} "
                    f"inputs it holds { {key: (value.dtype, list(value.shape)) for key, value in own.items()} }"
                )
            own[name] = tensor
            if kind.check is not None:
                kind.check(self.in_features)(f"transform {kind.word!r}", name, tensor)
        for name in self.transform_tensors():
            delattr(self, f"transform_{name}")
        self.transform = kind
        for name, tensor in own.items():
            self.register_buffer(f"transform_{name}", tensor)
        return self

    def transform_like_(self, linear: nn.Module) -> PackedLinear:
        """Take over the transform of a `TransformedLinear` whose weight this one's was made of."""
        if getattr(linear, "transform", NONE) is NONE:
            return self
        return self.transform_(linear.transform, linear.transform_tensors())

    def transform_tensors(self) -> dict[str, torch.Tensor]:
        """Those of its transform, by name."""
        return held_tensors(self)

    @property
    def weight_tiles(self) -> nn.Parameter:
        """uint8, in the tiles of its device (ops/tiles*.py); RuntimeError before ``prepack_()``."""
        return self._tiles(self.record.parts[0])

    @property
    def scale_tiles(self) -> nn.Parameter:
        """uint8 or float16, as ``weight_tiles``; RuntimeError before ``prepack_()``."""
        return self._tiles("scale")

    def packed_weight(self) -> PackedWeight:
        """The weight as on disk: the parameters' own memory, or a copy of them where they are in tiles."""
        return self.record.weight(*self._on_disk("weight"))

    def materialize(self, dtype: torch.dtype) -> PackedLinear:
        """Keep W in ``dtype`` next to the codes: for machines without kernels, the memory of a dense layer for its
        speed.

        x of that dtype is then multiplied as it is, whatever activation_bits; for MXFP4 in bfloat16 with the bits of
        the 16-bit reference path. Calls with another dtype of x, and checkpoints, use the codes.
        """
        self.weight_dense = self.dequantized(dtype)
        return self

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W as ``[out, in]`` in ``dtype``: what multiplies transformed inputs."""
        return self.packed_weight().dequantize(dtype)

    def dequantized_plain(self, dtype: torch.dtype) -> torch.Tensor:
        """W as ``[out, in]`` in ``dtype``: what multiplies inputs as they come. Of transforms that have one."""
        return self.transform.plain(self.dequantized(dtype), self.transform_tensors())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        if self.transform is not NONE:
            x = self.transform.apply(x, self.transform_tensors())
        if self.weight_dense is not None and self.reads_dense and self.weight_dense.dtype == x.dtype:
            return sliced_linear(x, self.weight_dense, self.bias)
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._for_product(), self._rows, self.bias)

    def _for_product(self) -> Parts:
        """The weight as a product reads it: in tiles, which the parameters are from the first call on."""
        if not self.is_prepacked:
            if self.is_lent and self.packing.prepack is not None:
                return self._in_tiles("weight")
            self.prepack_()
        return self.held("weight")

    def hold_tiles_(self, tiles: Parts) -> None:
        """Take over tiles of this very weight (``ops.prepack_*``) in place of the parameters' present data."""
        with _changing_layout, torch.inference_mode(False):
            self._rows = self.out_features
            self._hold([tiles])

    def _tiles(self, part: str) -> nn.Parameter | None:
        if not self.is_prepacked:
            raise RuntimeError(f"{type(self).__name__}: the weight is in the layout on disk, call prepack_() first")
        return getattr(self, f"weight_{part}")

    def _in_tiles(self, name: str) -> Parts:
        parts = self.parts(name)
        self._rows = getattr(parts, self.record.weight.ROWS).shape[0]  # a row for every output
        return self.packing.prepack(*parts)

    def _on_disk(self, name: str) -> Parts:
        parts, in_tiles = self._in_one_layout(name)
        return self.packing.unprepack(*parts, self._rows) if in_tiles else parts

    def extra_repr(self) -> str:
        dense = "" if self.weight_dense is None else f", materialized={self.weight_dense.dtype}"
        transform = "" if self.transform is NONE else f", transform={self.transform.word}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation_bits={self.activation_bits}{dense}{transform}"
        )


def require_switch(switch: PrecisionSwitch | None, format: str, name: str) -> PrecisionSwitch:
    """``switch``, or one of its own at 16 bits for None. TypeError for another object, ValueError when it switches
    weights of another format."""
    if switch is None:
        return PrecisionSwitch(format)
    if not isinstance(switch, PrecisionSwitch):
        raise TypeError(f"{name}: switch is a {type(switch).__name__}, expected a PrecisionSwitch")
    if switch.weights != format:
        raise ValueError(f"{name}: the weight is {format}, its switch is for {switch.weights} weights")
    return switch
