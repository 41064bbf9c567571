"""Which of our formats holds a layer of integer codes with scales and zero points, and is it exactly that?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..formats import Int4Weight, PackedWeight, PlanesWeight
from ..formats.damage import all_positive
from ..formats.int4 import GROUP_SIZES
from ..formats.packing import pack_nibbles
from ..formats.planes import pack_planes
from .codes import ROWS, gathered_nibbles
from .layer import LayerPlan, ReadLayer, Stored, StoredLayer, require_tensor

SCALES = (torch.float16, torch.bfloat16, torch.float32)  # dtypes on disk
_WIDEST_INT4 = 4


@dataclass(frozen=True)
class Groups:
    """Integer codes of one layer, without the codes: value = (code - zero) * scale, scales above 0.

    bits: of a code. size: inputs that share a scale, in the order of the groups; the last group may have fewer. scale:
    ``[out, groups]``, in the dtype on disk. zero: uint8 of that shape. order: int64 ``[in]``, the inputs group by
    group, or None. turned: bool of that shape, where the file has a negative scale: there a code c on disk stands for
    largest - c. dead: where it has a scale of 0, and all codes stand for the zero point.
    """

    bits: int
    size: int
    scale: Tensor
    zero: Tensor
    order: Tensor | None = None
    turned: Tensor | None = None
    dead: Tensor | None = None

    @classmethod
    def of(cls, bits: int, size: int, scale: Tensor, zero: Tensor, order: Tensor | None = None) -> Groups:
        """As they are on disk, with scales of any sign."""
        largest, turned, dead = (1 << bits) - 1, None, None
        if not all_positive(scale):
            turned, dead = scale < 0, scale == 0
            turned, dead = turned if bool(turned.any()) else None, dead if bool(dead.any()) else None
        if turned is not None:
            scale, zero = scale.abs(), torch.where(turned, largest - zero, zero)
        if dead is not None:
            scale = torch.where(dead, torch.ones_like(scale), scale)
        if _all_are(zero, 1 << (bits - 1)):
            zero = zero[:1, :1].clone().expand(zero.shape)  # one number, whatever the layer's size
        return cls(bits, size, scale, zero, order, turned, dead)

    @property
    def middle(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    @cached_property
    def symmetric(self) -> bool:
        return _all_are(self.zero, self.middle)

    def told(self, title: str, in_features: int) -> str:
        """The layer for people: "GPTQ, 4 bits, groups of 128, symmetric, act-order"."""
        size = "a channel" if self.size >= in_features else f"groups of {self.size}"
        kind = "symmetric" if self.symmetric else "with zero points"
        return f"{title}, {self.bits} bits, {size}, {kind}" + (", act-order" if self.order is not None else "")


@dataclass(frozen=True)
class Choice:
    """What a layer becomes. format: a word of FORMATS, "" for dense, then ``why`` says why. times: how often a scale
    is repeated for our smaller groups."""

    format: str
    options: Mapping[str, Any]
    times: int = 1
    why: str = ""


def _all_are(codes: Tensor, value: int) -> bool:
    low, high = codes.aminmax()
    return int(low) == int(high) == value


def choose_format(layer: StoredLayer, groups: Groups) -> Choice:
    """The format that holds every value of the layer exactly, the smallest of them; dense where none does."""
    size = fitting_group(groups.size, layer.in_features)
    if size is None:
        return Choice("", {}, why=f"groups of {groups.size} inputs of {layer.in_features}, ours hold 32, 64 or 128")
    if exact_float16(groups.scale) is None:
        return Choice("", {}, why=f"float16 does not hold its {groups.scale.dtype} scales exactly")
    times, symmetric = groups.size // size, groups.symmetric
    if symmetric and groups.bits != _WIDEST_INT4:
        return Choice("planes", {"num_planes": groups.bits, "group_size": size}, times)
    if groups.bits <= _WIDEST_INT4:
        return Choice("int4", {"group_size": size, "symmetric": symmetric}, times)
    return Choice("", {}, why=f"{groups.bits}-bit codes with zero points of their own")


def planned(
    layer: StoredLayer, title: str, groups: Groups, choice: Choice, tensors: Mapping[str, Stored],
    read: Callable[[Mapping[str, Tensor]], ReadLayer],
) -> LayerPlan:  # fmt: skip
    """The plan of a layer of integers."""
    return LayerPlan(
        layer, groups.told(title, layer.in_features), tensors, read, choice.format, choice.options,
        groups.order is not None and bool(choice.format), choice.why,
    )  # fmt: skip


def column_scales(layer: StoredLayer, told: object) -> tuple[int, Tensor]:
    """The size of a group, and scales ``[out, groups]``, of a layer that has them as ``scales [groups, out]``. told:
    as `group_size`. ValueError or TypeError naming what does not fit."""
    shape = layer.tensors["scales"].shape if "scales" in layer.tensors else (1, layer.out_features)
    count = shape[0] if len(shape) == 2 and shape[0] else 1
    stored = require_tensor(layer, "scales", SCALES, (count, layer.out_features))
    size = group_size(layer, told, count, stored.place)
    return size, require_scales(stored, stored.load()).t().contiguous()


def require_scales(tensor: Stored, scale: Tensor) -> Tensor:
    """``scale``; ValueError naming the tensor for one that is NaN or Inf, with its place."""
    if all_positive(scale):
        return scale
    wrong = ~scale.isfinite()
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{tensor.place} holds {int(wrong.sum())} scales that are NaN or Inf, the first "
            f"({scale[tuple(place)].item():g}) at {place}: the checkpoint is damaged; download it again"
        )
    return scale


def packed_layer(
    layer: StoredLayer, groups: Groups, choice: Choice, codes: Tensor, ordered: bool = False
) -> ReadLayer:
    """The layer that ``choice`` names. codes: uint8 ``[out, in]``, inputs in their own order; for int4 also two a
    byte, ``[out, in / 2]``, and then maybe in the order of the groups (``ordered``)."""
    if not choice.format:
        return ReadLayer(_dense(layer, groups, codes))
    own = layer.in_features * choice.times // groups.size  # our groups; the last of theirs may be cut short
    scale = repeated(exact_float16(groups.scale), choice.times)[:, :own].contiguous()
    weight: PackedWeight
    if choice.format == "int4":
        packed = codes if codes.shape[1] * 2 == layer.in_features else pack_nibbles(codes)
        packed = packed if groups.order is None or ordered else gathered_nibbles(packed, groups.order)
        packed = _with_signs(packed, groups, choice.times, own)
        zero = None if groups.symmetric else repeated(groups.zero, choice.times)[:, :own].contiguous()
        weight = Int4Weight(packed, scale, zero, name=layer.name)
    else:
        planes = _planes(codes, groups)
        weight = PlanesWeight(planes, scale, torch.tensor([2 * groups.middle], dtype=torch.int32), name=layer.name)
    return ReadLayer(weight.validate(layer.out_features, layer.in_features), groups.order)


def _with_signs(packed: Tensor, groups: Groups, times: int, own: int) -> Tensor:
    """Codes two a byte, in the order of the groups: turned, and set to the zero point, where the groups are."""
    for places, change in ((groups.turned, "turned"), (groups.dead, "dead")):
        if places is None:
            continue
        packed = packed.clone().unflatten(-1, (own, -1))
        where = repeated(places, times)[:, :own]
        if change == "turned":
            packed[where] ^= ((1 << groups.bits) - 1) * 0x11
        else:
            packed[where] = (repeated(groups.zero, times)[:, :own][where] * 0x11).unsqueeze(-1)
        packed = packed.flatten(-2)
    return packed


def _planes(codes: Tensor, groups: Groups) -> Tensor:
    planes = torch.empty(groups.bits, codes.shape[0], codes.shape[1] // 8, dtype=torch.uint8)
    step = max(1, ROWS // codes.shape[1])
    for first in range(0, codes.shape[0], step):
        part = codes[first : first + step]
        part = part if groups.order is None else part.index_select(-1, groups.order)
        if groups.dead is not None:
            dead = groups.dead[first : first + step].repeat_interleave(groups.size, -1)[:, : codes.shape[1]]
            part = part.masked_fill(dead, groups.middle)
        planes[:, first : first + step] = pack_planes(part, groups.bits)
    return planes


def _dense(layer: StoredLayer, groups: Groups, codes: Tensor) -> Tensor:
    """In the dtype of the scales, rounded once: as the writers of these files compute it."""
    if codes.shape[1] != layer.in_features:
        raise AssertionError(f"{layer.name}: dense weights are made of whole codes")
    inverse = None if groups.order is None else torch.argsort(groups.order)
    out = torch.empty(codes.shape, dtype=groups.scale.dtype)
    step = max(1, ROWS // codes.shape[1])
    for first in range(0, codes.shape[0], step):
        rows = slice(first, first + step)
        zero, scale = (part[rows].repeat_interleave(groups.size, dim=-1) for part in _on_disk(groups))
        if inverse is not None:
            zero, scale = zero[:, inverse], scale[:, inverse]
        zero, scale = zero[:, : codes.shape[1]], scale[:, : codes.shape[1]]
        steps = codes[rows].to(torch.int32) - zero.to(torch.int32)
        out[rows] = (steps.to(torch.float64) * scale.to(torch.float64)).to(out.dtype)
    return out


def _on_disk(groups: Groups) -> tuple[Tensor, Tensor]:
    """Zero points and scales, with the signs of the file."""
    zero, scale = groups.zero, groups.scale
    if groups.turned is not None:
        largest = (1 << groups.bits) - 1
        zero, scale = torch.where(groups.turned, largest - zero, zero), torch.where(groups.turned, -scale, scale)
    return zero, scale if groups.dead is None else scale.masked_fill(groups.dead, 0)


def group_size(layer: StoredLayer, told: object, count: int, place: str) -> int:
    """Inputs that share a scale where there are ``count`` scales a row. told: the config's, -1 or None where it does
    not say. ValueError, which begins with ``place``, where they do not belong together."""
    inputs = layer.in_features
    whole = isinstance(told, int) and told >= inputs and count == 1
    if not isinstance(told, int) or isinstance(told, bool) or told <= 0 or whole:
        if inputs % count:
            raise ValueError(f"{place} has {count} groups, which do not divide {inputs} inputs")
        return inputs // count
    if count != -(-inputs // told):
        raise ValueError(
            f"{place} has {count} groups: {inputs} inputs in groups of {told}, as config.json has it, are "
            f"{-(-inputs // told)}"
        )
    return told


def fitting_group(group_size: int, in_features: int) -> int | None:
    """Our largest group that divides both: scales may be repeated, and no value changes. None: there is none."""
    fitting = [own for own in GROUP_SIZES if group_size % own == 0 and in_features % own == 0]
    return fitting[-1] if fitting else None


def repeated(scales: Tensor, times: int) -> Tensor:
    """``[out, groups]`` -> ``[out, groups * times]``: every scale for the parts of its group."""
    return scales if times == 1 else scales.repeat_interleave(times, dim=-1)


def exact_float16(scales: Tensor) -> Tensor | None:
    """The scales in float16, None where that would change one."""
    if scales.dtype == torch.float16:
        return scales
    narrow = scales.to(torch.float16)
    return narrow if torch.equal(narrow.to(torch.float64), scales.to(torch.float64)) else None
