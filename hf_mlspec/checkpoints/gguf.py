"""Which of this package's weights is a tensor of a GGUF file, with every value the same?

    Q4_0    int4 in groups of 32, asymmetric where a block's scale is negative     MXFP4   MXFP4
    Q8_0    bit-planes, 8 of them, in groups of 32                                 Q5_0    bit-planes, 6 of them
    Q4_1    int4 in groups of 32 with zero points, where every minimum is -0 to -15 times its block's scale

The minima of other Q4_1 files are float16 numbers of their own, and our zero points integers: those become dense.
So do Q5_1, Q4_K, Q5_K and Q6_K, for minima or scales of 16 values, and Q8_0 with a negative scale, which only other
tools write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats import Int4Weight, Mxfp4Weight, PlanesWeight
from ..formats.damage import NAN_SCALE
from .gguf_blocks import (
    SCALE_BYTES,
    VALUES,
    eight_planes,
    halves,
    int4_parts,
    int4_parts_of_minima,
    mxfp4_parts,
    six_planes,
    zero_points,
)
from .gguf_file import GGML_TYPES, GgufFile, GgufTensor
from .layer import LayerPlan, ReadLayer, StoredLayer
from .safetensors_file import mapped

GROUP = 32
KEY = "weight"  # of a layer's only tensor
_CHUNK = 1 << 20  # bytes in flight; unpacked they are up to ten times as many
_TYPES = {ggml.name: ggml for ggml in GGML_TYPES.values()}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "MXFP4": 4, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6}
_WHY_DENSE = {
    "Q4_1": "the minima of Q4_1 are no whole zero points",
    "Q5_1": "Q5_1 has a minimum for every block",
    "Q4_K": "Q4_K has a minimum for every 32 values",
    "Q5_K": "Q5_K has a minimum for every 32 values",
    "Q6_K": "Q6_K has a scale for every 16 values",
}


def stored_layer(name: str, tensor: GgufTensor) -> StoredLayer:
    """A linear layer's only tensor, as a layer: ``name`` is the module's, without ".weight". ValueError unless it is
    a matrix."""
    if len(tensor.values_shape) != 2:
        raise ValueError(f"{tensor.place} has shape {list(tensor.values_shape)}, a linear layer's has two axes")
    rows, cols = tensor.values_shape
    return StoredLayer(name, in_features=cols, out_features=rows, tensors={KEY: tensor})


def dense(tensor: GgufTensor, dtype: torch.dtype | None = None, rows: Tensor | None = None) -> Tensor:
    """The values of any tensor, in ``dtype`` (None: as stored, of blocks float32, which is exact).

    rows: int64, row i of the result is the stored row ``rows[i]``. ValueError naming tensor and type where its blocks
    are not read, or hold a scale that is NaN or Inf.
    """
    if tensor.dtype == torch.uint8:
        _require_scales(tensor)
        return _dense(tensor.load(), tensor.ggml_type, dtype or torch.float32, rows)
    stored = tensor.load() if rows is None else tensor.load().index_select(0, rows)
    return stored if dtype is None else stored.to(dtype)


@dataclass(frozen=True)
class GgufReader:
    """A `layer.Reader`. rows: layer name -> int64 ``[out]`` for layers whose rows lie in another order in the file:
    row i of the layer is the stored row ``rows[i]`` (gguf_names.row_orders). file: whose layers it reads, None where
    nobody asks."""

    rows: Mapping[str, Tensor] = field(default_factory=dict)
    file: GgufFile | None = None
    method = "gguf"
    title = "GGUF"

    def holds(self, layer: StoredLayer) -> bool:
        """Whether the layer's weight is stored in blocks of codes."""
        weight = layer.tensors.get(KEY)
        return isinstance(weight, GgufTensor) and weight.dtype in (torch.uint8, None)

    def plan(self, layer: StoredLayer) -> LayerPlan:
        """Reads the scales of every block, and nothing else. ValueError naming layer and tensor for another shape, a
        type of blocks that is not read, and a scale that is NaN or Inf."""
        weight = _require_weight(layer)
        chosen = _chosen(weight.ggml_type, _require_scales(weight))
        return LayerPlan(
            layer,
            stored_as=f"GGUF {weight.ggml_type}, {_BITS[weight.ggml_type]} bits, groups of {_group(weight)}",
            tensors={KEY: weight},
            read=partial(_read, chosen, layer.name, self.rows.get(layer.name)),
            format=chosen.format,
            options=chosen.options,
            why_dense=chosen.why_dense,
        )


class _Chosen(NamedTuple):
    """What a layer becomes. packed: ``(raw, rows, name)`` -> the weight."""

    packed: Callable[[Tensor, Tensor | None, str], Any]
    format: str = ""
    options: Mapping[str, Any] = {}
    why_dense: str = ""


def _chosen(ggml_type: str, odd: bool) -> _Chosen:
    """odd: whether a block's scale is negative; of Q4_1, whether its minimum is no whole zero point."""
    group = {"group_size": GROUP}
    if ggml_type == "Q4_0":
        return _Chosen(partial(_int4, ggml_type, not odd), "int4", {**group, "symmetric": not odd})
    if ggml_type == "Q4_1" and not odd:
        return _Chosen(partial(_int4, ggml_type, False), "int4", {**group, "symmetric": False})
    if ggml_type == "MXFP4":
        return _Chosen(_mxfp4, "mxfp4")
    if ggml_type == "Q5_0":
        return _Chosen(partial(_planes, six_planes, 6), "planes", {"num_planes": 6, **group})
    if ggml_type == "Q8_0" and not odd:
        return _Chosen(partial(_planes, eight_planes, 8), "planes", {"num_planes": 8, **group})
    why = _WHY_DENSE.get(ggml_type, f"a scale of {ggml_type} is negative")
    packed = lambda raw, rows, name: _dense(raw, ggml_type, torch.float32, rows)  # noqa: E731
    return _Chosen(packed, why_dense=f"{why}, which no format of this package holds exactly")


def _read(chosen: _Chosen, name: str, rows: Tensor | None, tensors: Mapping[str, Tensor]) -> ReadLayer:
    return ReadLayer(chosen.packed(tensors[KEY], rows, name))


def _group(weight: GgufTensor) -> int:
    return 16 if weight.ggml_type == "Q6_K" else GROUP


def _require_read(tensor: GgufTensor) -> None:
    if tensor.ggml_type not in VALUES:
        raise ValueError(
            f"{tensor.place} is of ggml's {tensor.ggml_type}, which this package does not read: convert the file "
            "first, with `llama-quantize --allow-requantize FILE.gguf OUT.gguf Q8_0`, or to Q4_0 or MXFP4"
        )


def _require_weight(layer: StoredLayer) -> GgufTensor:
    weight = layer.tensors.get(KEY)
    if not isinstance(weight, GgufTensor):
        have = weight.place if weight is not None else "nothing"
        raise TypeError(f"{layer.name}: {KEY} is {have}, expected a tensor of a GGUF file")
    _require_read(weight)
    expected = (layer.out_features, layer.in_features)
    if weight.values_shape != expected:
        raise ValueError(
            f"{layer.name}: {weight.place} has shape {list(weight.values_shape)}, expected {list(expected)}: the "
            "configuration is of another model, or the file is damaged"
        )
    return weight


def _require_scales(tensor: GgufTensor) -> bool:
    """Whether some block is odd, as `_chosen` has it; ValueError for a number that is NaN or Inf, naming row and
    block."""
    _require_read(tensor)
    size, odd = _TYPES[tensor.ggml_type].size, False
    per_row = tensor.shape[-1]
    with mapped(tensor.file) as contents:
        for part in _chunks(tensor.end - tensor.begin, per_row):
            stored = bytearray(contents[tensor.begin + part.start : tensor.begin + part.stop])
            blocks = torch.frombuffer(stored, dtype=torch.uint8).view(-1, size)
            wrong, unlike = _looked_at(tensor.ggml_type, blocks)
            odd = odd or bool(unlike)
            if bool(wrong.any()):
                row, block = divmod(part.start // size + int(wrong.nonzero()[0]), per_row // size)
                raise ValueError(
                    f"{tensor.place} is damaged: the scale of row {row}, block {block} is NaN or Inf; download or "
                    "write the checkpoint again"
                )
    return odd


def _looked_at(ggml_type: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 ``[blocks, size]`` -> which have a scale that is no number, and whether one is odd."""
    if ggml_type == "MXFP4":
        return blocks[:, 0] == NAN_SCALE, torch.tensor(False)
    first, last = SCALE_BYTES[ggml_type]
    numbers = halves(blocks[:, first:last])
    odd = zero_points(numbers) < 0 if ggml_type == "Q4_1" else numbers[:, 0] < 0
    return ~numbers.isfinite().all(-1), odd.any()


def _chunks(total: int, per_row: int) -> Iterator[slice]:
    """Whole rows of ``per_row``, about _CHUNK together."""
    step = max(1, _CHUNK // per_row) * per_row
    return (slice(first, min(first + step, total)) for first in range(0, total, step))


def _blocks(raw: Tensor, size: int, rows: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """raw uint8 ``[out, bytes]`` -> chunks of rows, ``[rows, blocks, size]``, in the order of ``rows``."""
    for part in _chunks(raw.numel(), raw.shape[-1]):
        own = slice(part.start // raw.shape[-1], part.stop // raw.shape[-1])
        chunk = raw[own] if rows is None else raw.index_select(0, rows[own])
        yield own, chunk.unflatten(-1, (-1, size))


def _dense(raw: Tensor, ggml_type: str, dtype: torch.dtype, rows: Tensor | None) -> Tensor:
    ggml, values = _TYPES[ggml_type], VALUES[ggml_type]
    *outer, per_row = raw.shape
    flat = raw.reshape(-1, per_row) if rows is None else raw
    out = torch.empty(flat.shape[0], per_row // ggml.size * ggml.values, dtype=dtype)
    for part, blocks in _blocks(flat, ggml.size, rows):
        out[part] = values(blocks).flatten(-2).to(dtype)
    return out.view(*outer, out.shape[-1])


def _int4(ggml_type: str, symmetric: bool, raw: Tensor, rows: Tensor | None, name: str) -> Int4Weight:
    size, parts = _TYPES[ggml_type].size, int4_parts if ggml_type == "Q4_0" else int4_parts_of_minima
    groups = raw.shape[1] // size
    packed = torch.empty(raw.shape[0], groups * GROUP // 2, dtype=torch.uint8)
    scale = torch.empty(raw.shape[0], groups, dtype=torch.float16)
    zero = torch.empty(raw.shape[0], 0 if symmetric else groups, dtype=torch.uint8)
    for part, blocks in _blocks(raw, size, rows):
        packed[part], scale[part], zeros = parts(blocks)
        if not symmetric:
            zero[part] = zeros
    return Int4Weight(packed, scale, None if symmetric else zero, name)


def _mxfp4(raw: Tensor, rows: Tensor | None, name: str) -> Mxfp4Weight:
    groups = raw.shape[1] // _TYPES["MXFP4"].size
    packed = torch.empty(raw.shape[0], groups * GROUP // 2, dtype=torch.uint8)
    scale = torch.empty(raw.shape[0], groups, dtype=torch.uint8)
    for part, blocks in _blocks(raw, _TYPES["MXFP4"].size, rows):
        packed[part], scale[part] = mxfp4_parts(blocks)
    return Mxfp4Weight(packed, scale, name)


def _planes(
    parts: Callable[[Tensor], tuple[Tensor, Tensor]], count: int, raw: Tensor, rows: Tensor | None, name: str
) -> PlanesWeight:
    size = _TYPES["Q8_0" if count == 8 else "Q5_0"].size
    groups = raw.shape[1] // size
    planes = torch.empty(count, raw.shape[0], groups * GROUP // 8, dtype=torch.uint8)
    scale = torch.empty(raw.shape[0], groups, dtype=torch.float16)
    for part, blocks in _blocks(raw, size, rows):
        planes[:, part], scale[part] = parts(blocks)
    return PlanesWeight(planes, scale, torch.tensor([1 << count], dtype=torch.int32), name)
