"""How is an AWQ checkpoint read? In the version "gemm", the one in use, words run along the outputs, interleaved:

    X.qweight  int32  [in, out / 8]      nibble i of word c: column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    X.qzeros   int32  [groups, out / 8]  the same order, zero points as they are
    X.scales   float  [groups, out]

In the version "gemv" they run along the inputs, in their order, and groups are filled up to whole words W:

    X.qweight  int32  [out, in / 8]      nibble i of word c: input 8 c + i
    X.qzeros   int32  [out, W]           nibble i of word c: group 8 c + i
    X.scales   float  [out, 8 W]

In the version "gemv_fast" four rows share words of 16 bits, and zero points are multiplied out:

    X.qweight  int16  [out / 4, in]      nibble i of word 64 b + j: of the four rows' 64 inputs b, one row after the
                                         other, number 4 j + i; in a row, runs of 32 lie in the order _FAST
    X.qzeros   float  [8 W, out]         -(zero * scale), rounded
    X.scales   float  [8 W, out]

value = (code - zero) * scale. Other versions are named and refused.

Source: arXiv 2306.00978; the layout is that of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats.packing import unpack_nibbles
from ..ops import pack_awq_words
from .codes import ROWS, as_bytes
from .layer import LayerPlan, ReadLayer, Stored, StoredLayer, require_tensor
from .scales import SCALES, Groups, choose_format, column_scales, packed_layer, planned, require_scales

COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_VERSIONS = ("gemm", "gemv", "gemv_fast")
_ROWS, _RUN = 4, 64  # of gemv_fast: rows that share words, inputs of a row beside each other there
_FAST = (4, 2, 4)  # axes of the 32 inputs in a row: bits 1-2, bit 0, bits 3-4 of an input's number
_NIBBLE_OF_COLUMN = [COLUMN_OF_NIBBLE.index(column) for column in range(8)]


class AwqReader:
    """Reads folders of AutoAWQ and of what writes like it: 4 bits, any groups, in three versions."""

    method, title = "awq", "AWQ"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: ``quantization_config`` of config.json. ValueError for another version or another number of bits."""
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        again = str(config.get("format") or version).lower()
        if version not in _VERSIONS or again != version:
            wrong = again if version in _VERSIONS else version
            raise ValueError(
                f"this AWQ checkpoint is of version {wrong!r}, {', '.join(_VERSIONS)} are read: write it again with "
                "version='gemm'"
            )
        self._version = version
        self._size, self._zero_points = config.get("group_size"), config.get("zero_point", True)
        bits = config.get("bits", config.get("w_bit", 4))
        if bits != 4:
            raise ValueError(f"this AWQ checkpoint has {bits} bits, {version!r} has 4: its config.json is damaged")

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer has words of codes."""
        return "qweight" in layer.tensors

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """ValueError or TypeError naming layer and tensor, as `Reader.plan`."""
        kinds = {"gemm": self._of_columns, "gemv": self._of_rows, "gemv_fast": self._of_four_rows}
        return kinds[self._version](layer)

    def _of_columns(self, layer: StoredLayer) -> LayerPlan:
        words = require_tensor(layer, "qweight", (torch.int32,), (layer.in_features, layer.out_features // 8))
        size, scale = column_scales(layer, self._size)
        groups = Groups.of(4, size, scale, self._zeros(layer, scale.shape[1]))
        choice = choose_format(layer, groups)

        def read(tensors: Mapping[str, Tensor]) -> ReadLayer:
            words = tensors["qweight"].contiguous()
            codes = pack_awq_words(words) if choice.format == "int4" else _codes(words)
            return packed_layer(layer, groups, choice, codes)

        return planned(layer, self.title, groups, choice, {"qweight": words}, read)

    def _size_and_count(self, layer: StoredLayer) -> tuple[int, int]:
        """Of groups, where files have more scales than groups."""
        size = self._size if isinstance(self._size, int) and self._size > 0 else layer.in_features
        count, rest = divmod(layer.in_features, size)
        if rest:
            raise ValueError(f"{layer.name} has {layer.in_features} inputs, which groups of {size} do not divide")
        return size, count

    def _of_four_rows(self, layer: StoredLayer) -> LayerPlan:
        out, inputs = layer.out_features, layer.in_features
        if out % _ROWS or inputs % _RUN:
            raise ValueError(f"{layer.name} is {out} x {inputs}, 'gemv_fast' has multiples of {_ROWS} and {_RUN}")
        words = require_tensor(layer, "qweight", (torch.int16,), (out // _ROWS, inputs))
        size, count = self._size_and_count(layer)
        shape = layer.tensors["scales"].shape if "scales" in layer.tensors else ()
        stored = require_tensor(layer, "scales", SCALES, (max(shape[0] if shape else 0, count), out))
        products = require_tensor(layer, "qzeros", SCALES, stored.shape)
        scale = require_scales(stored, stored.load()[:count].t().contiguous())
        zero = _divided_zeros(products, products.load()[:count].t(), scale)
        groups = Groups.of(4, size, scale, zero)
        choice = choose_format(layer, groups)

        def read(tensors: Mapping[str, Tensor]) -> ReadLayer:
            codes = _codes_of_four_rows(tensors["qweight"])
            return packed_layer(layer, groups, choice, codes)

        return planned(layer, self.title, groups, choice, {"qweight": words}, read)

    def _of_rows(self, layer: StoredLayer) -> LayerPlan:
        words = require_tensor(layer, "qweight", (torch.int32,), (layer.out_features, layer.in_features // 8))
        size, count = self._size_and_count(layer)
        shape = layer.tensors["scales"].shape if "scales" in layer.tensors else ()
        width = max(shape[-1] // 8 if shape else 0, -(-count // 8))
        stored = require_tensor(layer, "scales", SCALES, (layer.out_features, 8 * width))
        scale = require_scales(stored, stored.load()[:, :count].contiguous())
        groups = Groups.of(4, size, scale, self._zeros_of_rows(layer, width)[:, :count].contiguous())
        choice = choose_format(layer, groups)

        def read(tensors: Mapping[str, Tensor]) -> ReadLayer:
            packed = as_bytes(tensors["qweight"].contiguous())
            return packed_layer(layer, groups, choice, packed if choice.format == "int4" else unpack_nibbles(packed))

        return planned(layer, self.title, groups, choice, {"qweight": words}, read)

    def _zeros_of_rows(self, layer: StoredLayer, width: int) -> Tensor:
        """uint8 ``[out, 8 width]``; symmetric files have none."""
        if "qzeros" not in layer.tensors and not self._zero_points:
            return torch.full((layer.out_features, 8 * width), 8, dtype=torch.uint8)
        zeros = require_tensor(layer, "qzeros", (torch.int32,), (layer.out_features, width))
        return unpack_nibbles(as_bytes(zeros.load().contiguous()))

    def _zeros(self, layer: StoredLayer, count: int) -> Tensor:
        """uint8 ``[out, groups]``; symmetric files have none."""
        if "qzeros" not in layer.tensors and not self._zero_points:
            return torch.full((layer.out_features, count), 8, dtype=torch.uint8)
        zeros = require_tensor(layer, "qzeros", (torch.int32,), (count, layer.out_features // 8))
        return _columns(zeros.load().t()).contiguous()


def _columns(words: Tensor) -> Tensor:
    """int32 ``[out / 8, n]`` -> uint8 ``[out, n]``, the columns in their order."""
    nibbles = unpack_nibbles(as_bytes(words)).unflatten(-1, (-1, 8))  # [out / 8, n, 8]
    return nibbles[..., _NIBBLE_OF_COLUMN].transpose(1, 2).flatten(0, 1)


def _codes(words: Tensor) -> Tensor:
    """uint8 ``[out, in]``, a few columns at a time."""
    in_features, num_words = words.shape
    out = torch.empty(num_words * 8, in_features, dtype=torch.uint8)
    step = max(1, ROWS // (8 * in_features))
    for first in range(0, num_words, step):
        rows = _columns(words[:, first : first + step].t())
        out[first * 8 : first * 8 + rows.shape[0]] = rows
    return out


def _codes_of_four_rows(words: Tensor) -> Tensor:
    """int16 ``[out / 4, in]`` of "gemv_fast" -> uint8 ``[out, in]``, inputs in their order, some rows at a time."""
    fours, inputs = words.shape
    out = torch.empty(fours, _ROWS, inputs, dtype=torch.uint8)
    step = max(1, ROWS // (_ROWS * inputs))
    for first in range(0, fours, step):
        part = words[first : first + step].contiguous()
        codes = unpack_nibbles(part.view(torch.uint8)).view(len(part), -1, _ROWS, _RUN // 32, *_FAST)
        # [four rows, 64 inputs, row, half of them, bits 1-2, bit 0, bits 3-4] -> rows, and the bits from the highest
        out[first : first + step] = codes.permute(0, 2, 1, 3, 6, 4, 5).flatten(2)
    return out.flatten(0, 1)


def _divided_zeros(stored: Stored, products: Tensor, scale: Tensor) -> Tensor:
    """-(zero * scale) as stored -> uint8 zero points. ValueError naming the tensor where no whole number from 0 to 15
    has that product."""
    wide = scale.to(torch.float64)
    zero = (-products.to(torch.float64) / torch.where(wide == 0, 1.0, wide)).round()
    again = -(wide * zero).to(products.dtype)
    wrong = (zero < 0) | (zero > 15) | (again != products) | ~products.isfinite()
    if bool(wrong.any()):
        row, group = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{stored.place} holds {int(wrong.sum())} numbers that are no scale times a zero point of 0 to 15, the "
            f"first ({products[row, group].item():g}) of output {row} in group {group}: the checkpoint is damaged"
        )
    return zero.to(torch.uint8)
