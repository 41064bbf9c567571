"""How does the CUDA decoder call a linear, and how do several become one without a second copy of their weights?

Dense weights are put one behind the other in one tensor, of which the modules' parameters become views; packed ones
are put in tiles together, and their parameters become views of those tiles where every linear but the last fills its
tiles. Where it does not, the group keeps tiles of its own beside the modules' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ... import ops
from ...formats import Parts
from ...formats.hadamard import Hadamard
from ...nn.adapters import is_adapted
from ...nn.linear import lay_rows
from ...nn.lut import LutLinear
from ...nn.nested import NestedLinear
from ...nn.packed import PackedLinear
from ...nn.packed_formats import as_one
from ...nn.planes import PlanesLinear
from ...nn.switch import filled
from ...ops.tiles import cut, is_tiles
from ...precision import Bits
from ..architecture import UnknownArchitecture, linear_shape, require_format
from ..slots import order_of, require_one_order, rotation_of, slot_of
from .linears import DenseLinear, FourBitLinear, OutlierLinear
from .neighbours import make_views, neighbours
from .streamed import StreamedPlanesLinear
from .zipper import ZipperTilesLinear


class NestedTilesLinear:
    """Tiles of ``ops.prepack_nested``, exact or as the draft.

    drafts: what the draft multiplies, (tiles, codebook, out_features, bias) of all modules, or where their codebooks
    differ of each one.
    """

    __slots__ = ("bias", "drafts", "escapes", "extra_bytes", "out_features", "own", "tiles")

    def __init__(self, module: NestedLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        draft, exponents, low, _, codebook, escape_rows, escape_weight = tiles
        self.tiles, self.out_features, self.bias, self.extra_bytes = (draft, exponents, low), out_features, bias, 0
        self.escapes = {"escape_rows": escape_rows, "escape_weight": escape_weight}
        self.drafts = [(self.tiles, codebook, out_features, bias)]
        self.own = module.switch.bits

    def draft_apart(self, modules: Sequence[NestedLinear]) -> None:
        """Each module's draft by itself, from the tiles that it holds: their codebooks differ."""
        biases = [None] * len(modules) if self.bias is None else self.bias.split([m.out_features for m in modules])
        self.drafts = []
        for module, bias in zip(modules, biases, strict=True):
            draft, exponents, low, _, codebook, _, _ = module.prepack_().parts("weight")
            self.drafts.append(((draft, exponents, low), codebook, module.out_features, bias))

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` at (16, 16), (4, 16) or (4, 8) bits, 0: the switch's."""
        weight_bits, width = filled(bits, self.own)
        if weight_bits == 16:
            how = {"weight_bits": 16, "activation_bits": width, **self.escapes}
            return ops.nested_linear(x, *self.tiles, self.drafts[0][1], self.out_features, self.bias, **how)
        parts = [
            ops.nested_linear(x, *tiles, codebook, count, bias, weight_bits=weight_bits, activation_bits=width)
            for tiles, codebook, count, bias in self.drafts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class PlanesTilesLinear:
    """Tiles of ``ops.prepack_planes``, of which a call reads the first few."""

    __slots__ = ("bias", "extra_bytes", "how", "out_features", "own", "tiles")

    def __init__(self, module: PlanesLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        self.tiles, self.out_features, self.bias, self.extra_bytes = tiles[:2], out_features, bias, 0
        self.how = {"group_size": module.group_size, "zero_doubled": module.zero_doubled}
        self.own = module.switch.bits

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` with as many planes as bits.weight says, 0: the switch's."""
        count = bits.weight or self.own.weight
        return ops.bitplane_linear(x, *self.tiles, self.out_features, self.bias, **self.how, num_planes=count)

    def chosen(self, x: Tensor, widths: Tensor, likely: int = 0) -> Tensor:
        """The same with as many planes as int32 ``widths`` on the device says: ``[1]``, or one for each token. likely:
        all are there."""
        return ops.bitplane_chosen(x, *self.tiles, widths, self.out_features, self.bias, **self.how)


class LutTilesLinear:
    """Tiles of ``ops.prepack_lut``, of which a call reads the first few planes and their table."""

    __slots__ = ("bias", "extra_bytes", "out_features", "own", "tiles")

    def __init__(self, module: LutLinear, tiles: Parts, out_features: int, bias: Tensor | None):
        self.tiles, self.out_features, self.bias, self.extra_bytes = tiles, out_features, bias, 0
        self.own = module.switch.bits

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]`` with as many planes as bits.weight says, 0: the switch's."""
        count = bits.weight or self.own.weight
        return ops.lut_linear(x, *self.tiles, self.out_features, self.bias, num_planes=count)


class OrderedLinear:
    """A linear whose weight was made for inputs in another order: int32 ``[in]``, as in nn/transforms.py."""

    __slots__ = ("linear", "order")

    def __init__(self, linear: PackedTilesLinear, order: Tensor):
        self.linear, self.order = linear, order

    @property
    def extra_bytes(self) -> int:
        """Of the linear."""
        return self.linear.extra_bytes

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]``, as the linear does."""
        return self.linear(ops.ordered_rows(x, self.order), bits)


class RotatedLinear:
    """A linear whose weight was made for inputs times Hadamard matrices."""

    __slots__ = ("how", "linear")

    def __init__(self, linear: DenseLinear | PackedTilesLinear, how: Hadamard):
        self.linear, self.how = linear, how

    @property
    def extra_bytes(self) -> int:
        """Of the linear."""
        return self.linear.extra_bytes

    def __call__(self, x: Tensor, bits: Bits) -> Tensor:
        """``[n, in]`` -> ``[n, out]``, as the linear does."""
        return self.linear(ops.hadamard_rows(x, self.how), bits)


PackedTilesLinear = (
    FourBitLinear | OutlierLinear | NestedTilesLinear | PlanesTilesLinear | LutTilesLinear | ZipperTilesLinear
    | StreamedPlanesLinear
)
JoinedLinear = DenseLinear | PackedTilesLinear | OrderedLinear | RotatedLinear
# Of each format: (one of the modules, tiles of all of them, their outputs, bias) -> how the CUDA decoder calls them.
SLOTS: dict[str, Callable[[PackedLinear, Parts, int, Tensor | None], PackedTilesLinear]] = {
    "mxfp4": FourBitLinear,
    "int4": FourBitLinear,
    "int4_int8": OutlierLinear,
    "nested": NestedTilesLinear,
    "planes": PlanesTilesLinear,
    "lut": LutTilesLinear,
    "zipper": ZipperTilesLinear,
}


@torch.no_grad()
def joined(modules: Sequence[nn.Module], name: str) -> JoinedLinear:
    """One linear whose outputs are those of ``modules``, in order.

    Moves the modules' weights (never what they hold). UnknownArchitecture when their weights do not go together.
    """
    for module in modules:
        if is_adapted(module):
            raise UnknownArchitecture(f"its {name} carries adapters; those of attention and MLP alone are added")
        linear_shape(module, name)
    bias, rotations = _joined_bias(modules), [rotation_of(module, name) for module in modules]
    with torch.inference_mode(False):  # a tensor made in that mode could not be used outside of it
        if any(isinstance(module, PackedLinear) for module in modules):
            _require_one_format(modules, name)
            orders = [order_of(module) for module in modules]
            require_one_order(orders, name)
            slot = slot_of(SLOTS, modules[0], name, "CUDA")
            streamed = getattr(modules[0], "source", None) is not None
            linear = StreamedPlanesLinear(modules, bias) if streamed else _joined_packed(modules, slot, bias)
            linear = linear if orders[0] is None else OrderedLinear(linear, orders[0])
        else:
            weights = [lay_rows(module) for module in modules]
            for weight in weights:
                require_format(weight, name)
            linear = DenseLinear(_joined_dense(weights, name), bias)
    return linear if rotations[0] is None else RotatedLinear(linear, rotations[0])


def _joined_bias(modules: Sequence[nn.Module]) -> Tensor | None:
    if all(module.bias is None for module in modules):
        return None
    parts = []
    for module in modules:
        zeros = next(module.parameters()).new_zeros(linear_shape(module, "")[1], dtype=torch.float32)
        parts.append(zeros if module.bias is None else module.bias.detach().float())
    return torch.cat(parts)


def _require_one_format(modules: Sequence[nn.Module], name: str) -> None:
    told = "group_size", "symmetric", "num_planes", "least_planes", "zero_doubled", "how", "high_part"
    kinds = {
        (type(m).__name__, id(getattr(m, "switch", None)), *(getattr(m, name, None) for name in told)) for m in modules
    }
    if len(kinds) > 1:
        raise UnknownArchitecture(
            f"its {name} projections are {len(modules)} weights of {len(kinds)} kinds (format, group size, zero "
            "points, planes, split, switch), and they are multiplied as one"
        )


def _joined_dense(weights: list[nn.Parameter], name: str) -> Tensor:
    if len({weight.dtype for weight in weights}) > 1:
        kinds = ", ".join(str(weight.dtype) for weight in weights)
        raise UnknownArchitecture(f"its {name} projections are {kinds}, and they are multiplied as one")
    whole = neighbours([weight.detach() for weight in weights])
    if whole is None:
        whole = torch.cat([weight.detach() for weight in weights])
        make_views(weights, whole)
    return whole


def _joined_packed(
    modules: Sequence[PackedLinear], slot: Callable[..., PackedTilesLinear], bias: Tensor | None
) -> PackedTilesLinear:
    out_features, extra_bytes = sum(module.out_features for module in modules), 0
    tiles = modules[0].prepack_().parts("weight") if len(modules) == 1 else _tiles_as_one(modules)
    if tiles is None:
        disk = [_on_disk(module) for module in modules]
        tiles = modules[0].packing.prepack(*as_one(modules[0].format, disk))
        if not _share_tiles(modules, disk, tiles):
            extra_bytes = sum(part.nbytes for part in tiles if part is not None)
    linear = slot(modules[0], tiles, out_features, bias)
    linear.extra_bytes = extra_bytes
    if isinstance(linear, NestedTilesLinear) and _codebooks_differ(modules):
        linear.draft_apart(modules)
    if isinstance(linear, ZipperTilesLinear) and not extra_bytes:
        linear.share_high(modules)
    return linear


def _on_disk(module: PackedLinear) -> Parts:
    weight = module.packed_weight()
    return tuple([getattr(weight, f"weight_{part}") for part in module.record.parts])


def _codebooks_differ(modules: Sequence[PackedLinear]) -> bool:
    first = modules[0].weight_codebook
    return any(not torch.equal(module.weight_codebook, first) for module in modules[1:])


def _share_tiles(modules: Sequence[PackedLinear], disk: list[Parts], tiles: Parts) -> bool:
    """Let the modules, which are as on disk, hold their part of the group's tiles, where those can be cut."""
    shares = cut(tiles, [module.out_features for module in modules])
    if shares is None:
        return False
    for module, own, share in zip(modules, disk, shares, strict=True):
        beside = module.packing.beside(*own) if module.packing.beside else (None,) * len(tiles)
        held = [one if part is None else part for part, one in zip(share, beside, strict=True)]
        module.hold_tiles_(tuple(held))
    return True


def _tiles_as_one(modules: Sequence[PackedLinear]) -> Parts | None:
    """The tiles of a group whose modules hold views of them already."""
    if not all(module.is_prepacked for module in modules):
        return None
    held = [module.parts("weight") for module in modules]
    whole = []
    for parts in zip(*held, strict=True):
        if not is_tiles(parts[0]):
            whole.append(parts[0])
            continue
        shared = len({part.data_ptr() for part in parts}) == 1 and len({part.shape for part in parts}) == 1
        one = parts[0] if shared else neighbours(parts)
        if one is None:
            return None
        whole.append(one)
    return _with_escapes(modules, held, whole) if hasattr(held[0], "escape_index") else tuple(whole)


def _with_escapes(modules: Sequence[PackedLinear], held: list[Parts], whole: list[Tensor | None]) -> Parts:
    """The parts of a group with escapes (nested), with the rows of all of them that have escapes."""
    rows, weights, first = [], [], 0
    for module, parts in zip(modules, held, strict=True):
        if parts.escape_index is not None:
            rows.append(parts.escape_index + first)
            weights.append(parts.escape_value)
        first += module.out_features
    return *whole[:5], torch.cat(rows) if rows else None, torch.cat(weights) if weights else None
