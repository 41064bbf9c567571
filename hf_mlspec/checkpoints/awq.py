"""How is an AWQ checkpoint read? In the version "gemm", the one in use, words run along the outputs, interleaved:

    X.qweight  int32  [in, out / 8]      nibble i of word c: column 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    X.qzeros   int32  [groups, out / 8]  the same order, zero points as they are
    X.scales   float  [groups, out]

In the version "gemv" they run along the inputs, in their order, and groups are filled up to whole words W:

    X.qweight  int32  [out, in / 8]      nibble i of word c: input 8 c + i
    X.qzeros   int32  [out, W]           nibble i of word c: group 8 c + i
    X.scales   float  [out, 8 W]

value = (code - zero) * scale. Other versions are named and refused.

Source: arXiv 2306.00978; the layout is that of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..formats.packing import unpack_nibbles
from .codes import ROWS, as_bytes
from .layer import LayerPlan, ReadLayer, StoredLayer, require_tensor
from .scales import SCALES, Groups, choose_format, column_scales, packed_layer, planned, require_scales
from .transposing import packed_columns

COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_VERSIONS = ("gemm", "gemv")
_NIBBLE_OF_COLUMN = [COLUMN_OF_NIBBLE.index(column) for column in range(8)]


class AwqReader:
    """Reads folders of AutoAWQ and of what writes like it: 4 bits, any groups, versions "gemm" and "gemv"."""

    method, title = "awq", "AWQ"

    def __init__(self, config: Mapping[str, Any]) -> None:
        """config: ``quantization_config`` of config.json. ValueError for another version or another number of bits."""
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        again = str(config.get("format") or version).lower()
        if version not in _VERSIONS or again != version:
            wrong = again if version in _VERSIONS else version
            raise ValueError(
                f"this AWQ checkpoint is of version {wrong!r}, 'gemm' and 'gemv' are read: write it again with "
                "version='gemm'"
            )
        self._rows = version == "gemv"
        self._size, self._zero_points = config.get("group_size"), config.get("zero_point", True)
        bits = config.get("bits", config.get("w_bit", 4))
        if bits != 4:
            raise ValueError(f"this AWQ checkpoint has {bits} bits, {version!r} has 4: its config.json is damaged")

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer has words of codes."""
        return "qweight" in layer.tensors

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """ValueError or TypeError naming layer and tensor, as `Reader.plan`."""
        return self._of_rows(layer) if self._rows else self._of_columns(layer)

    def _of_columns(self, layer: StoredLayer) -> LayerPlan:
        words = require_tensor(layer, "qweight", (torch.int32,), (layer.in_features, layer.out_features // 8))
        size, scale = column_scales(layer, self._size)
        groups = Groups.of(4, size, scale, self._zeros(layer, scale.shape[1]))
        choice = choose_format(layer, groups)

        def read(tensors: Mapping[str, Tensor]) -> ReadLayer:
            codes = (packed_columns if choice.format == "int4" else _codes)(tensors["qweight"])
            return packed_layer(layer, groups, choice, codes)

        return planned(layer, self.title, groups, choice, {"qweight": words}, read)

    def _of_rows(self, layer: StoredLayer) -> LayerPlan:
        words = require_tensor(layer, "qweight", (torch.int32,), (layer.out_features, layer.in_features // 8))
        size = self._size if isinstance(self._size, int) and self._size > 0 else layer.in_features
        count, rest = divmod(layer.in_features, size)
        if rest:
            raise ValueError(f"{layer.name} has {layer.in_features} inputs, which groups of {size} do not divide")
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
