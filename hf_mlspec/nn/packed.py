"""In which layout are packed parameters, on disk or in tiles for the kernels, and how does a module change it?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..formats.weights import BitPlaneWeight, Int4Weight, Mxfp4Weight, NestedWeight
from ..ops.products import sliced_linear
from .packed_formats import FORMATS, PackedFormat, Parts
from .switch import PrecisionSwitch

Weight = Mxfp4Weight | Int4Weight | NestedWeight | BitPlaneWeight
_changing_layout = threading.Lock()


class PackedModule(nn.Module):
    """A module with packed parameters ``<name>_<part>`` for each of ``names`` and of its format's parts.

    They have one of two layouts, on disk and in state_dict() or, from the first forward on, in tiles (ops/tiles*.py;
    on a GPU with kernels ops/tiles*_cuda.py), told apart by the axes of the scales. A change exchanges the data of the
    very Parameter objects, so that all views of a model that share them (early_exit) change together.
    """

    format: str
    names: tuple[str, ...]
    disk_axes: int  # of scales on disk; in tiles they have one more

    def __init__(self, switch: PrecisionSwitch) -> None:
        super().__init__()
        self.switch = switch

    @property
    def packing(self) -> PackedFormat:
        """What the format's tensors are called, and the functions for them."""
        return FORMATS[self.format]

    @property
    def activation_bits(self) -> int:
        """The switch's, in this thread."""
        return self.switch.activation_bits

    @property
    def is_prepacked(self) -> bool:
        """Whether the parameters are in tiles."""
        return self._parameters[f"{self.names[-1]}_scale"].dim() > self.disk_axes

    def held(self, name: str) -> Parts:
        """The parameters ``<name>_<part>``, in their present layout; None for what the weight does without."""
        return tuple([self._parameters[f"{name}_{part}"] for part in self.packing.parts])

    def parts(self, name: str) -> Parts:
        """The data of ``held(name)``."""
        return tuple([None if tensor is None else tensor.data for tensor in self.held(name)])

    @torch.compiler.disable
    def prepack_(self) -> PackedModule:
        """Parameters in tiles, as the kernels of their device read them. A second call changes nothing."""
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
        codes = [self.held(name)[0].data for name in self.names]
        return all(self.packing.fits(tiles[(0,) * stacked]) for tiles in codes)

    def _in_tiles(self, name: str) -> Parts:
        """The parts of ``name``, which are as on disk, in tiles."""
        raise NotImplementedError

    def _on_disk(self, name: str) -> Parts:
        """The parts of ``name`` as on disk: their own memory where they are, else a copy."""
        raise NotImplementedError

    def _register_parts(self, name: str, tensors: Parts) -> None:
        with torch.inference_mode(False):  # a tensor made in that mode could not be sliced outside of it
            for part, tensor in zip(self.packing.parts, tensors, strict=True):
                if tensor is not None:
                    tensor = nn.Parameter(tensor.clone() if tensor.is_inference() else tensor, requires_grad=False)
                self.register_parameter(f"{name}_{part}", tensor)

    def _hold(self, tensors: list[Parts]) -> None:
        # The last name's scales come last: other threads look at them to tell the layout.
        for name, parts in zip(self.names, tensors, strict=True):
            for part, tensor in sorted(zip(self.packing.parts, parts, strict=True), key=lambda own: own[0] == "scale"):
                if tensor is not None:
                    getattr(self, f"{name}_{part}").data = tensor

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.is_prepacked:
            return
        for name in self.names:
            for part, tensor in zip(self.packing.parts, self._on_disk(name), strict=True):
                if tensor is not None:
                    destination[f"{prefix}{name}_{part}"] = tensor

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.unprepack_()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        """Moves everything, casts the biases, and never casts a part of a weight: `.half()` and `.to(dtype)` see
        float16 scales and bfloat16 escapes as int16, whose bits they leave alone. Another kind of device reads other
        tiles: weights that go there are put back as on disk, and in tiles by the next forward."""
        codes = self.held(self.names[-1])[0].detach()
        if self.is_prepacked and fn(codes.new_empty(0)).device.type != codes.device.type:
            self.unprepack_()
        parts = [part for name in self.names for part in self.held(name) if part is not None]
        halves = {id(part) for part in parts if part.is_floating_point()}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in halves:
                return fn(tensor)
            bits = fn(tensor.detach().view(torch.int16))
            if bits.dtype != torch.int16:
                what = "float16 scales" if tensor.dtype == torch.float16 else "bfloat16 escapes"
                raise TypeError(f"{type(self).__name__}: its {what} cannot be cast to {bits.dtype}")
            return bits.view(tensor.dtype)

        return super()._apply(moved, recurse)


class PackedLinear(PackedModule):
    """``y = x W^T + b`` with W in a packed format, in one copy; what all of them have in common."""

    names = ("weight",)
    disk_axes = 2
    reads_dense = True  # whether a materialized weight is what a call asks for

    def __init__(
        self,
        weight: Weight,
        bias: nn.Parameter | None = None,
        switch: PrecisionSwitch | None = None,
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
        self._register_parts("weight", tuple(getattr(weight, f"weight_{part}") for part in self.packing.parts))
        self.register_parameter("bias", bias)
        self.register_buffer("weight_dense", None, persistent=False)

    @property
    def weight_tiles(self) -> nn.Parameter:
        """uint8, in the tiles of its device (ops/tiles*.py); RuntimeError before ``prepack_()``."""
        return self._tiles(self.packing.parts[0])

    @property
    def scale_tiles(self) -> nn.Parameter:
        """uint8 or float16, as ``weight_tiles``; RuntimeError before ``prepack_()``."""
        return self._tiles("scale")

    def packed_weight(self) -> Weight:
        """The weight as on disk: the parameters' own memory, or a copy of them where they are in tiles."""
        return self.packing.weight(*self._on_disk("weight"))

    def materialize(self, dtype: torch.dtype) -> PackedLinear:
        """Keep W in ``dtype`` next to the codes: for machines without kernels, the memory of a dense layer for its
        speed.

        x of that dtype is then multiplied as it is, whatever activation_bits; for MXFP4 in bfloat16 with the bits of
        the 16-bit reference path. Calls with another dtype of x, and checkpoints, use the codes.
        """
        self.weight_dense = self.dequantized(dtype)
        return self

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W as ``[out, in]`` in ``dtype``."""
        return self.packed_weight().dequantize(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` -> ``[..., out]`` in x.dtype."""
        if self.weight_dense is not None and self.reads_dense and self.weight_dense.dtype == x.dtype:
            return sliced_linear(x, self.weight_dense, self.bias)
        if not self.is_prepacked:
            self.prepack_()
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.packing.multiply(x, self.held("weight"), self._rows, self.bias, self.switch)

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
        self._rows = parts[1].shape[0]  # scales have a row for every output in every format
        return self.packing.prepack(*parts)

    def _on_disk(self, name: str) -> Parts:
        parts = self.parts(name)
        return self.packing.unprepack(*parts, self._rows) if self.is_prepacked else parts

    def extra_repr(self) -> str:
        dense = "" if self.weight_dense is None else f", materialized={self.weight_dense.dtype}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation_bits={self.activation_bits}{dense}"
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
