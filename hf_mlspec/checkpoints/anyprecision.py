"""Which weights do the bit planes and tables of an Any-Precision checkpoint mean, at each of its widths?

Any-Precision LLM (arXiv 2402.10517) stores for every linear

    qweight   int32    [B, N, K / 32]   plane 0 has the highest bits; a weight of b bits reads planes 0 to b - 1
    lut{b}    float16  [N, 2^b]         for b from the seed's width to B: w = lut_b[row, index of b bits]

An index of b bits is that of b + 1 bits without its last bit. Tables are fitted per width: planes alone are not
enough. Within a row, words are permuted in chunks of 1024 weights; the last may be shorter. In a chunk of T words
(32 T weights) bit 31 - (8 s + j) of word t belongs to weight 8 T s + 8 t + j, s = 0..3, j = 0..7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import LutWeight
from ..formats.damage import require_finite
from .layer import LayerPlan, ReadLayer, Stored, StoredLayer, require_tensor

_CHUNK = 1024  # weights that are permuted together
_WIDEST = 8
_WORDS = 1 << 17  # of a plane in flight


@dataclass(frozen=True)
class AnyPrecisionConfig:
    """``config["anyprec"]``: tables of seed to parent bits."""

    seed: int
    parent: int

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> AnyPrecisionConfig:
        """From config.json; ValueError naming a setting that is missing or of a layout that is not read."""
        settings = config.get("anyprec")
        if not isinstance(settings, Mapping):
            raise ValueError(f"config.json: anyprec is {settings!r}, the settings of Any-Precision were expected")
        seed, parent = settings.get("seed_precision"), settings.get("parent_precision")
        if type(seed) is not int or type(parent) is not int or not 1 <= seed <= parent <= _WIDEST:
            raise ValueError(
                f"config.json: anyprec has seed_precision {seed!r} and parent_precision {parent!r}, expected "
                f"1 <= seed <= parent <= {_WIDEST}"
            )
        groups = settings.get("group_count", 1)
        if groups != 1:
            raise ValueError(f"config.json: anyprec has group_count {groups!r}, one table a row was expected")
        return cls(seed, parent)


@dataclass(frozen=True, eq=False)
class AnyPrecisionLayer:
    """One layer, whole: planes int32 ``[B, N, K / 32]`` and a table float16 ``[N, 2^b]`` for some widths b."""

    name: str
    planes: Tensor
    tables: Mapping[int, Tensor]

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that there are tables for."""
        return tuple(sorted(self.tables))

    def indices(self, bits: int) -> Tensor:
        """uint8 ``[N, K]``, in the order of the weights: what the first ``bits`` planes say. ValueError for more
        planes than there are."""
        if not 1 <= bits <= self.planes.shape[0]:
            raise ValueError(f"{self.name} has {self.planes.shape[0]} bit planes, not {bits}")
        _, rows, words = self.planes.shape
        out = torch.empty(rows, words * 32, dtype=torch.uint8)
        step = max(1, _WORDS // max(words, 1))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            index = torch.zeros(1, dtype=torch.uint8)
            for plane in self.planes[:bits, part]:
                index = index << 1 | plane_bits(plane)
            out[part] = index
        return out

    def dequantize(self, bits: int) -> Tensor:
        """float16 ``[N, K]`` of ``bits`` bits; ValueError naming the table where there is none of that width."""
        table = self.tables.get(bits)
        if table is None:
            have = ", ".join(map(str, self.widths))
            raise ValueError(f"{self.name}: lut{bits} is missing, there are tables of {have} bits: take one of them")
        index = self.indices(bits)
        out = torch.empty(index.shape, dtype=table.dtype)
        step = max(1, 32 * _WORDS // max(index.shape[1], 1))
        for first in range(0, index.shape[0], step):
            part = slice(first, first + step)
            out[part] = table[part].gather(1, index[part].long())
        return out


def plane_bits(words: Tensor) -> Tensor:
    """One plane's int32 ``[rows, K / 32]`` -> uint8 ``[rows, K]`` of 0 and 1, in the order of the weights."""
    shifts = 31 - torch.arange(32, dtype=torch.int32)
    out = []
    for chunk in words.split(_CHUNK // 32, dim=-1):
        bits = (chunk.unsqueeze(-1) >> shifts & 1).to(torch.uint8).unflatten(-1, (4, 8))  # [rows, T, s, j]
        out.append(bits.transpose(1, 2).flatten(1))
    return torch.cat(out, -1)


def plane_bytes(words: Tensor) -> Tensor:
    """Planes int32 ``[B, N, K / 32]`` -> uint8 ``[B, N, K / 8]``, bit i of byte j that of weight 8 j + i."""
    places = torch.arange(8, dtype=torch.uint8)
    out = torch.empty(*words.shape[:2], words.shape[2] * 4, dtype=torch.uint8)
    step = max(1, _WORDS // max(words.shape[2], 1))
    for plane, to in zip(words, out, strict=True):
        for first in range(0, len(plane), step):
            bits = plane_bits(plane[first : first + step]).unflatten(-1, (-1, 8))
            to[first : first + step] = (bits << places).sum(-1, dtype=torch.uint8)
    return out


class AnyPrecisionReader:
    """Reads every plane and table of a layer, as lookup-table planes."""

    method = "anyprec"
    title = "Any-Precision"
    pickled = True  # such folders hold pytorch_model.bin

    def __init__(self, config: AnyPrecisionConfig) -> None:
        self.config = config

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer is quantized. Its original weight may lie beside the planes, and is not read."""
        return "qweight" in layer.tensors

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """Lookup-table planes. ValueError or TypeError naming layer and tensor: planes or a table of any width
        missing, of another shape or dtype, a table with NaN or Inf."""
        stored = self._required(layer)
        seed, parent = self.config.seed, self.config.parent

        def read_layer(tensors: Mapping[str, Tensor]) -> ReadLayer:
            tables = torch.cat([tensors[f"lut{bits}"] for bits in range(seed, parent + 1)], 1)
            return ReadLayer(LutWeight(plane_bytes(tensors["qweight"]), tables, layer.name))

        widths = f"{seed} to {parent}" if seed < parent else f"{parent}"
        stored_as = f"Any-Precision, {widths} bits, a table a row"
        options = {"num_planes": parent, "least_planes": seed}
        return LayerPlan(layer, stored_as, stored, read_layer, "lut", options)

    def layer_of(self, layer: StoredLayer) -> AnyPrecisionLayer:
        """The layer with every table; errors as of `plan`."""
        stored = self._required(layer)
        tables = {bits: stored[f"lut{bits}"].load() for bits in range(self.config.seed, self.config.parent + 1)}
        return AnyPrecisionLayer(layer.name, stored["qweight"].load(), tables)

    def _required(self, layer: StoredLayer) -> dict[str, Stored]:
        rows, inputs = layer.out_features, layer.in_features
        if inputs % 32:
            raise ValueError(f"{layer.name}: {inputs} inputs are no multiple of 32, the bits of a word")
        shape = (self.config.parent, rows, inputs // 32)
        stored = {"qweight": require_tensor(layer, "qweight", (torch.int32,), shape)}
        for bits in range(self.config.seed, self.config.parent + 1):
            name = f"lut{bits}"
            stored[name] = require_tensor(layer, name, (torch.float16,), (rows, 1 << bits))
            require_finite(layer.name, name, stored[name].load())
        return stored
