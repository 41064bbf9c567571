"""Which blocks of a GGUF file hold one of this package's weights, with every value the same?

    int4, symmetric, groups of 32, 64 or 128             Q4_0; a larger group's scale is repeated for every 32
    int4 whose zero points are all 7 or 8                Q4_0; a group of 7 has a negative scale and its codes reversed
    int4 with other zero points                          Q4_1, where float16 holds -zero * scale for every group
    MXFP4                                                MXFP4
    bit-planes that are 0 at the middle code             Q4_0 of 2 to 4 planes, Q8_0 of 5 to 8

The layouts are in gguf_blocks.py. Anything else is one ValueError that names the layer and says what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..formats import Mxfp4Weight, PackedWeight, PlanesWeight
from ..formats.packing import unpack_nibbles
from .gguf_blocks import VALUES
from .gguf_file import GGML_TYPES
from .writing import codes_of, groups_of

GROUP = 32
TITLE = "GGUF"
SIZES = {ggml.name: ggml.size for ggml in GGML_TYPES.values()}
_CHUNK = 1 << 20  # values in flight
_REMEDY = "quantize the model with symmetric=True, or convert to compressed-tensors"


def ggml_type_of(weight: PackedWeight) -> str:
    """``"Q4_0"`` and so on; reads the zero points. ValueError naming the layer, and what to do, where none holds every
    value."""
    if isinstance(weight, Mxfp4Weight):
        return "MXFP4"
    groups = groups_of(weight, None)
    if groups.size % GROUP:
        raise ValueError(f"{weight.name} has groups of {groups.size}: {TITLE} blocks hold {GROUP}, use group_size=32")
    if isinstance(weight, PlanesWeight):
        return "Q4_0" if groups.bits <= 4 else "Q8_0"
    if weight.symmetric or bool(((groups.zero == 7) | (groups.zero == 8)).all()):
        return "Q4_0"
    exact = -groups.zero.float() * groups.scale.float()  # 15 bits at most
    wrong = (exact.half().float() != exact).nonzero()
    if len(wrong):
        row, group = wrong[0].tolist()
        raise ValueError(
            f"{weight.name}: row {row}, group {group} has the zero point {int(groups.zero[row, group])} and the scale "
            f"{float(groups.scale[row, group]):g}, float16 does not hold their product, as {TITLE}'s Q4_1 needs: "
            + _REMEDY
        )
    return "Q4_1"


def block_rows(weight: PackedWeight, ggml_type: str, rows: Tensor | None = None) -> Iterator[Tensor]:
    """The blocks, uint8 ``[some rows, bytes of a row]``, chunk by chunk; rows: int64 ``[out]``, stored row i is row
    ``rows[i]`` of the weight. ValueError naming the layer where a chunk would be read as other values."""
    rows = torch.arange(weight.out_features) if rows is None else rows
    for part in rows.split(max(1, _CHUNK // weight.in_features)):
        chosen = _rows(weight, part)
        raw = _encode(chosen, ggml_type)  # [rows, blocks, bytes]
        if not torch.equal(VALUES[ggml_type](raw).flatten(-2), chosen.dequantize(torch.float32)):
            raise ValueError(f"{weight.name}: {TITLE} blocks of {ggml_type} would hold other values than the model")
        yield raw.flatten(-2)


def _rows(weight: PackedWeight, rows: Tensor) -> PackedWeight:
    if isinstance(weight, PlanesWeight):
        return replace(weight, weight_planes=weight.weight_planes[:, rows], weight_scale=weight.weight_scale[rows])
    names = [f"weight_{part}" for part in weight.PARTS._fields if getattr(weight, f"weight_{part}") is not None]
    return replace(weight, **{name: getattr(weight, name)[rows] for name in names})


def _encode(weight: PackedWeight, ggml_type: str) -> Tensor:
    """uint8 ``[rows, blocks, bytes of a block]``."""
    if isinstance(weight, Mxfp4Weight):
        codes = unpack_nibbles(weight.weight_packed).unflatten(-1, (-1, GROUP))
        return torch.cat((weight.weight_scale.unsqueeze(-1), _halves(codes)), dim=-1)
    groups = groups_of(weight, None)
    codes = codes_of(weight, None).unflatten(-1, (-1, GROUP))
    repeats = groups.size // GROUP
    scale = groups.scale.repeat_interleave(repeats, -1).unsqueeze(-1)  # [rows, blocks, 1]
    zero = groups.zero.repeat_interleave(repeats, -1).unsqueeze(-1)
    if ggml_type == "Q8_0":
        return torch.cat((_bytes(scale), (codes.int() - zero.int()).to(torch.int8).view(torch.uint8)), dim=-1)
    if ggml_type == "Q4_1":
        least = (-zero.float() * scale.float()).half()
        return torch.cat((_bytes(scale), _bytes(least), _halves(codes)), dim=-1)
    if isinstance(weight, PlanesWeight):
        return torch.cat((_bytes(scale), _halves(codes + 8 - zero)), dim=-1)
    turned = zero == 7
    return torch.cat((_bytes(torch.where(turned, -scale, scale)), _halves(torch.where(turned, 15 - codes, codes))), -1)


def _halves(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 ``[..., 32]`` -> 16 bytes, the first half in the low nibbles."""
    low, high = codes.split(GROUP // 2, dim=-1)
    return low | high << 4


def _bytes(numbers: Tensor) -> Tensor:
    """float16 ``[..., 1]`` -> uint8 ``[..., 2]``."""
    return numbers.contiguous().view(torch.uint8)
