"""How do several linears of a model become one, without a second copy of their weights?

Dense weights are put one behind the other in one tensor, of which the modules' parameters become views; packed ones
are put in tiles together, and their parameters become views of those tiles where every linear but the last fills its
tiles. Where it does not, the group keeps tiles of its own beside the modules' weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .. import ops
from ..ops.tiles import TILE_BYTES, TILE_OUTPUTS
from ..ops.tiles_cuda import PAIR_OUTPUTS
from ..precision import Bits
from .architecture import UnknownArchitecture, linear_shape, require_format
from .linear import Int4Linear
from .packed import PackedLinear
from .packed_formats import Parts


class DenseLinear:
    """``weight`` ``[out, in]``, bfloat16 or float32, ``bias`` float32 ``[out]`` or None."""

    __slots__ = ("bias", "multiply", "weight")
    extra_bytes = 0

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.multiply = ops.bf16_linear if weight.dtype == torch.bfloat16 else ops.f32_linear

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]``; bits mean nothing to a dense weight."""
        return self.multiply(x, self.weight, self.bias)


class PackedDeviceLinear:
    """Tiles of ``ops.prepack_*``; activation_bits: what the modules' switch said when it was read."""

    __slots__ = ("activation_bits", "bias", "dequantize", "extra_bytes", "group_size", "out_features", "tiles")

    def __init__(self, module: PackedLinear, tiles: Parts, out_features: int, bias: Tensor | None, extra_bytes: int):
        self.tiles, self.out_features, self.bias, self.extra_bytes = tiles, out_features, bias, extra_bytes
        self.activation_bits = module.activation_bits
        self.group_size = module.group_size if isinstance(module, Int4Linear) else None  # None: MXFP4
        self.dequantize = module.switch.multiply == "dequant"

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` at 16, 8 or 4 activation bits, 0: the switch's."""
        bits = bits.activation or self.activation_bits
        if self.group_size is None:
            return ops.mxfp4_linear(x, *self.tiles, self.out_features, self.bias, bits)
        if bits == 16 and self.dequantize:
            return ops.bf16_linear(x, ops.int4_dequantize(*self.tiles, self.out_features, self.group_size), self.bias)
        return ops.int4_linear(
            x, *self.tiles, self.out_features, self.bias, group_size=self.group_size, activation_bits=bits
        )


DeviceLinear = DenseLinear | PackedDeviceLinear


@torch.no_grad()
def joined(modules: Sequence[nn.Module], name: str) -> DeviceLinear:
    """One linear whose outputs are those of ``modules``, in order.

    Moves the modules' weights (never what they hold). UnknownArchitecture when their weights do not go together.
    """
    for module in modules:
        linear_shape(module, name)
    bias = _joined_bias(modules)
    with torch.inference_mode(False):  # a tensor made in that mode could not be used outside of it
        if any(isinstance(module, PackedLinear) for module in modules):
            _require_one_format(modules, name)
            return _joined_packed(modules, bias)
        for module in modules:
            require_format(module.weight, name)
        return DenseLinear(_joined_dense([module.weight for module in modules], name), bias)


def _joined_bias(modules: Sequence[nn.Module]) -> Tensor | None:
    if all(module.bias is None for module in modules):
        return None
    parts = []
    for module in modules:
        zeros = next(module.parameters()).new_zeros(linear_shape(module, "")[1], dtype=torch.float32)
        parts.append(zeros if module.bias is None else module.bias.detach().float())
    return torch.cat(parts)


def _require_one_format(modules: Sequence[nn.Module], name: str) -> None:
    kinds = {
        (type(m).__name__, getattr(m, "group_size", 0), getattr(m, "symmetric", True), id(getattr(m, "switch", None)))
        for m in modules
    }
    if len(kinds) > 1:
        raise UnknownArchitecture(
            f"its {name} projections are {len(modules)} weights of {len(kinds)} kinds (format, group size, zero "
            "points, switch), and they are multiplied as one"
        )


def _joined_dense(weights: list[nn.Parameter], name: str) -> Tensor:
    if len({weight.dtype for weight in weights}) > 1:
        kinds = ", ".join(str(weight.dtype) for weight in weights)
        raise UnknownArchitecture(f"its {name} projections are {kinds}, and they are multiplied as one")
    whole = _neighbours([weight.detach() for weight in weights])
    if whole is None:
        whole = torch.cat([weight.detach() for weight in weights])
        _make_views(weights, whole)
    return whole


def _make_views(weights: list[nn.Parameter], whole: Tensor) -> None:
    first = 0
    for weight in weights:
        weight.data = whole[first : first + len(weight)]
        first += len(weight)


def _neighbours(tensors: list[Tensor]) -> Tensor | None:
    """One tensor over several that lie one behind the other in one piece of memory, else None."""
    first = tensors[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == end
        if not same or not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            return None
        end += tensor.nbytes
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _joined_packed(modules: Sequence[PackedLinear], bias: Tensor | None) -> PackedDeviceLinear:
    out_features, extra_bytes = sum(module.out_features for module in modules), 0
    tiles = modules[0].prepack_().parts("weight") if len(modules) == 1 else _tiles_as_one(modules)
    if tiles is None:
        disk = [module.packed_weight() for module in modules]
        parts = [[getattr(weight, f"weight_{part}") for weight in disk] for part in modules[0].packing.parts]
        tiles = modules[0].packing.prepack(*[None if part[0] is None else torch.cat(part) for part in parts])
        if not _share_tiles(modules, tiles):
            extra_bytes = sum(part.nbytes for part in tiles if part is not None)
    return PackedDeviceLinear(modules[0], tiles, out_features, bias, extra_bytes)


def _share_tiles(modules: Sequence[PackedLinear], tiles: Parts) -> bool:
    """Let the modules hold their part of the group's tiles, where each but the last fills its tiles."""
    height = TILE_OUTPUTS if _is_of_the_cpu(tiles) else PAIR_OUTPUTS
    if any(module.out_features % height for module in modules[:-1]):
        return False
    first = 0
    for module in modules:
        end = first + -(-module.out_features // height)
        cut = [part if part is None or _is_whole(tiles, i) else part[first:end] for i, part in enumerate(tiles)]
        module.hold_tiles_(tuple(cut))
        first = end
    return True


def _is_of_the_cpu(tiles: Parts) -> bool:
    """In which of the two layouts tiles are."""
    return tiles[0].shape[2] == TILE_BYTES


def _is_whole(tiles: Parts, index: int) -> bool:
    """Whether a part belongs to all outputs: scales and zero points stand in the tiles of a GPU."""
    return index > 0 and not _is_of_the_cpu(tiles)


def _tiles_as_one(modules: Sequence[PackedLinear]) -> Parts | None:
    """The tiles of a group whose modules hold views of them already."""
    if not all(module.is_prepacked for module in modules):
        return None
    held = [module.parts("weight") for module in modules]
    whole = []
    for index, parts in enumerate(zip(*held, strict=True)):
        if parts[0] is None:
            whole.append(None)
            continue
        if _is_whole(held[0], index):
            one = parts[0] if len({part.data_ptr() for part in parts}) == 1 else None
        else:
            one = _neighbours(list(parts))
        if one is None:
            return None
        whole.append(one)
    return tuple(whole)
