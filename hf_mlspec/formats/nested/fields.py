"""How do a 4-bit draft and the exact BF16 weight share their bits?

A block is 32 consecutive BF16 weights along the last (input) axis. It stores one exponent byte, and per weight a
nibble and a 12-bit field: 16.25 bits, of which the draft reads 4.25.

    BF16 word   15     14 ... 7      6 ... 0            S     = max(largest exponent of the block, 31)    1 byte
                sign   exponent e    mantissa m         base  = S - 31

    nibble      3      2 1 0                            sign, and the index of the draft's magnitude in a codebook
    field v     11 ... 7      6 ... 0                   base > 0: (e - base) << 7 | m where e > base, 0 for zero
                e - base      m                         base = 0: e << 7 | m, verbatim (also zeros and subnormals)

    exact = sign, then 15 bits: 0 where v is 0, else v + (base << 7); as numbers: v read as BF16, times 2^base
    draft = (-1)^sign * codebook[index] * 2^(S - 132)                                       (codebooks.py)

Nonzero weights with e <= base, below 2^-30 of the block's largest, are escapes: v = 0, and place and value go to a
sparse list. A field of 1..127 with base > 0 never occurs.

Example: a block's largest weight is 0.75 (e = 126), so S = 126 and base = 95. Its weight -0.3125 is sign 1, e = 125,
m = 32: v = 30 << 7 | 32 = 3872. In units of 2^(126 - 132) it is 20: index 4 of "lloyd_max" (22), nibble 1100, draft
-22 / 64 = -0.34375. Rebuilt: 3872 + (95 << 7) = 125 << 7 | 32.

The three bits of the index carry nothing the exact value needs, so that they may be chosen freely: by distance here,
by what they do to the layer's output in error_feedback.py. Near this idea: BitNest (arXiv 2610.02800), a 4-bit nibble
of an 8-bit weight; SPEQ (arXiv 2510.18525), floating point bits shared for drafts, with hardware for it; NestedFP
(arXiv 2506.02024), FP16 out of two FP8 planes; Any-Precision LLM (arXiv 2402.10517), planes of integer codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..packing import pack_nibbles, unpack_nibbles
from .codebooks import FIELDS, indices_of_fields, require_codebook

BLOCK = 32
SMALLEST_SCALE, LARGEST_SCALE = 31, 254
MANTISSA_BITS = 7
UNIT_EXPONENT = 132  # a level of a codebook is worth 2^(S - 132)
_MAGNITUDE, _INFINITY, _SIGN = 0x7FFF, 0x7F80, -0x8000
_FIRST_NORMAL = 1 << MANTISSA_BITS
_CHUNK = (1 << 15) - 1  # elements in flight, below torch's grain: why is said in int4.py
_GPU_CHUNK = 1 << 24  # on a GPU launches cost more than memory: temporaries of 0.3 GB
_WHY_NOT = {
    torch.float16: "the 12 bits kept beside a draft hold BF16's mantissa and 5 bits of its exponent; beside FP16's "
    "mantissa of 10 bits only two exponent bits would be left: convert it to bfloat16 first, which rounds it",
    torch.float32: "nested weights are exact for BF16 only: cast it to bfloat16 first, which rounds it",
}


class Nested(NamedTuple):
    """A split weight ``[out, in]``. Shapes and dtypes are those on disk (weight.py)."""

    packed: Tensor  # uint8 [out, in / 2]: nibbles, low first
    scale: Tensor  # uint8 [out, in / 32]: S
    low: Tensor  # uint8 [out, in]: the low 8 bits of v
    high: Tensor  # uint8 [out, in / 2]: its high 4 bits, low nibble first
    escape_index: Tensor  # int64 [n]: row * in + column, ascending
    escape_value: Tensor  # bfloat16 [n]


def require_nestable(weight: Tensor, name: str = "weight") -> None:
    """TypeError unless ``weight`` is bfloat16; ValueError unless it is ``[out, in]`` with in a multiple of 32."""
    if weight.dtype != torch.bfloat16:
        why = _WHY_NOT.get(weight.dtype, "only bfloat16 weights can be nested")
        raise TypeError(f"{name} is {weight.dtype}: {why}")
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        size = f"in_features is {weight.shape[1]}" if weight.ndim == 2 else "expected [out, in]"
        raise ValueError(
            f"{name} has shape {list(weight.shape)}: {size}, nested blocks are {BLOCK} weights along it; leave this "
            "layer in BF16"
        )


def split(weight: Tensor, codebook: Tensor, name: str = "weight") -> Nested:
    """bfloat16 ``[out, in]`` and a codebook uint8 ``[8]`` -> its parts; ``join`` gives the same bits back.

    Works in chunks of rows: temporaries under 1 MB (on a GPU 0.3 GB). TypeError and ValueError as
    ``require_nestable``; ValueError naming ``name``, row and column of a NaN or Inf.
    """
    require_nestable(weight, name)
    require_codebook(codebook)
    out_features, in_features = weight.shape
    bytes_of = weight.new_empty
    packed = bytes_of((out_features, in_features // 2), dtype=torch.uint8)
    scale = bytes_of((out_features, in_features // BLOCK), dtype=torch.uint8)
    low, high = bytes_of((out_features, in_features), dtype=torch.uint8), torch.empty_like(packed)
    nearest, escapes = indices_of_fields(codebook).to(weight.device), []
    for part in _row_chunks(weight):
        words, blocks, field, scale[part] = _fields(weight, part, name)
        index = nearest.index_select(0, field.flatten().int()).view(words.shape)
        packed[part] = pack_nibbles(index | (words < 0).to(torch.uint8) << 3)
        low_bytes, high_bytes = field.flatten(-2).view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        low[part], high[part] = low_bytes, pack_nibbles(high_bytes)
        escapes += _escapes(part, words, blocks, field)
    return Nested(packed, scale, low, high, *_as_one(weight, escapes))


def find_escapes(weight: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """The places int64 ``[n]`` (row * in + column, ascending) and values bfloat16 ``[n]`` of a weight's escapes, and
    nothing else of ``split``, whose errors these are."""
    require_nestable(weight, name)
    found = [escape for part in _row_chunks(weight) for escape in _escapes(part, *_fields(weight, part, name)[:3])]
    return _as_one(weight, found)


def _escapes(part: slice, words: Tensor, blocks: Tensor, field: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Places and values of a chunk's escapes; an empty list without."""
    if int(field.count_nonzero()) == int(blocks.count_nonzero()):
        return []
    places = ((field == 0) & (blocks != 0)).flatten().nonzero().flatten()
    return [(places + part.start * words.shape[1], words.flatten()[places].view(torch.bfloat16))]


def _as_one(weight: Tensor, escapes: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    none = weight.new_empty(0, dtype=torch.int64), weight.new_empty(0)
    indices, values = zip(none, *escapes, strict=True)
    return torch.cat(indices), torch.cat(values)


def count_fields(weight: Tensor, name: str = "weight") -> Tensor:
    """How many weights have each exponent byte and field, int64 ``[256, 4096]``: what codebooks.fit takes. Errors as
    ``split``."""
    require_nestable(weight, name)
    counts = torch.zeros(256 * FIELDS, dtype=torch.int64, device=weight.device)
    for part in _row_chunks(weight):
        _, _, field, scale = _fields(weight, part, name)
        counts += torch.bincount((field.int() + scale.int().unsqueeze(-1) * FIELDS).flatten(), minlength=256 * FIELDS)
    return counts.view(256, FIELDS)


def _row_chunks(rows: Tensor) -> Iterator[slice]:
    step = max(1, (_GPU_CHUNK if rows.is_cuda else _CHUNK) // max(rows.shape[1], 1))
    return (slice(first, min(first + step, len(rows))) for first in range(0, len(rows), step))


def _fields(weight: Tensor, part: slice, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words int16 ``[rows, in]``, magnitudes and fields int16 ``[rows, in / 32, 32]``, S int16 ``[rows, in / 32]``."""
    words = weight[part].contiguous().view(torch.int16)
    blocks = (words & _MAGNITUDE).unflatten(-1, (-1, BLOCK))
    top = blocks.amax(-1)  # words of non-negative floats order like the floats; Inf and NaN come out on top
    if (top >= _INFINITY).any():
        row, column = (blocks.flatten(-2) >= _INFINITY).nonzero()[0].tolist()
        raise ValueError(
            f"{name} holds {weight[part][row, column].item()} at row {part.start + row}, column {column}: repair the "
            "checkpoint or leave this layer in BF16"
        )
    scale = (top >> MANTISSA_BITS).clamp_(min=SMALLEST_SCALE)
    base = scale - SMALLEST_SCALE
    field = blocks - (base << MANTISSA_BITS).unsqueeze(-1)
    field.masked_fill_(field < (base.clamp(max=1) << MANTISSA_BITS).unsqueeze(-1), 0)  # zeros and escapes
    return words, blocks, field, scale


def join(
    packed: Tensor,
    scale: Tensor,
    low: Tensor,
    high: Tensor,
    escape_index: Tensor | None = None,
    escape_value: Tensor | None = None,
) -> Tensor:
    """The parts of ``split`` -> the very bfloat16 ``[out, in]`` they came from; the escapes may be None or empty.

    The parts are taken as they are: NestedWeight.validate looks for damage.
    """
    weight = low.new_empty(low.shape, dtype=torch.int16)
    for part in _row_chunks(low):
        base = (scale[part].to(torch.int16) - SMALLEST_SCALE) << MANTISSA_BITS
        field = fields_of(low[part], high[part])
        blocks = field.unflatten(-1, (-1, BLOCK))
        magnitude = torch.where(blocks == 0, 0, blocks + base.unsqueeze(-1)).flatten(-2)
        weight[part] = magnitude | (unpack_nibbles(packed[part]) >> 3).to(torch.int16) * _SIGN
    if escape_index is not None and escape_index.numel():
        weight.view(-1)[escape_index] = escape_value.view(torch.int16)
    return weight.view(torch.bfloat16)


def fields_of(low: Tensor, high: Tensor) -> Tensor:
    """The 12-bit fields, int16 ``[out, in]``, of their two planes."""
    return low.to(torch.int16) | (unpack_nibbles(high).to(torch.int16) << 8)


def dequantize_draft(
    packed: Tensor, scale: Tensor, codebook: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """uint8 ``[out, in / 2]``, ``[out, in / 32]``, ``[8]`` -> the draft's ``dtype`` ``[out, in]``: exact in float32
    and bfloat16, float16 rounds once."""
    exact = dtype if dtype in (torch.bfloat16, torch.float64) else torch.float32
    levels = draft_levels(codebook).to(exact)
    out = packed.new_empty((len(packed), packed.shape[1] * 2), dtype=dtype)
    for part in _row_chunks(out):
        blocks = levels[unpack_nibbles(packed[part]).int()].unflatten(-1, (-1, BLOCK))
        out[part] = (blocks * draft_scales(scale[part]).to(exact).unsqueeze(-1)).flatten(-2).to(dtype)
    return out


def draft_levels(codebook: Tensor) -> Tensor:
    """int8 ``[16]``: the units of each nibble, sign included."""
    levels = codebook.to(torch.int8)
    return torch.cat([levels, -levels])


def draft_scales(scale: Tensor) -> Tensor:
    """float32 2^(S - 132) of every exponent byte, in which the draft's levels count; never subnormal."""
    return ((scale.int() + (127 - UNIT_EXPONENT)) << 23).view(torch.float32)
