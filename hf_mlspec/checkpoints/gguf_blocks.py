"""What do the bytes of a ggml block mean, as values and as codes of this package?

A block is consecutive values of a row. d, m: float16; q: codes; of 32 values, code j is the low nibble of byte j and
code j + 16 the high one:

    Q4_0   d, 16 bytes of q                       value = d * (q - 8)
    Q4_1   d, m, 16 bytes of q                    d * q + m
    Q5_0   d, 32 fifth bits, 16 bytes of q        d * (q - 16)
    Q5_1   d, m, 32 fifth bits, 16 bytes of q     d * q + m
    Q8_0   d, 32 bytes of signed q                d * q
    MXFP4  E8M0 byte, 16 bytes of q               E2M1(q) * 2^(byte - 127)
    Q4_K   256 values: d, m, 8 pairs of 6-bit integers (s, t), 128 bytes of q      d * s * q - m * t
    Q5_K   the same with 256 fifth bits before the 128 bytes
    Q6_K   256 values: 128 bytes of low nibbles, 64 of upper bits, 16 signed s, d  d * s * (q - 32)

ggml's own quantizers write a negative d of Q4_0 and Q5_0 in every second block, and d = 0 in blocks of zeros. Ours
are above 0. With d = -e, e * (8 - q) = e * ((15 - q) - 7): codes reversed, and 7 as the zero point of the group.
Values are equal; a zero may have the other sign.

Source: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..formats.int4 import Int4Parts
from ..formats.mxfp4 import MAGNITUDES, Mxfp4Parts, scale_values
from ..formats.packing import pack_nibbles
from ..formats.planes.codes import pack_planes

# Where the float16 numbers of a block are: first byte and the one behind the last.
SCALE_BYTES = {
    "Q4_0": (0, 2), "Q4_1": (0, 4), "Q5_0": (0, 2), "Q5_1": (0, 4), "Q8_0": (0, 2), "Q4_K": (0, 4), "Q5_K": (0, 4),
    "Q6_K": (208, 210),
}  # fmt: skip


def halves(stored: Tensor) -> Tensor:
    """uint8 ``[..., 2 n]`` -> float16 ``[..., n]``."""
    return stored.contiguous().view(torch.float16)


def _scale(blocks: Tensor, place: int = 0) -> Tensor:
    """The float16 at a byte of every block, float32 ``[..., 1]``."""
    return halves(blocks[..., place : place + 2]).float()


def _split_nibbles(stored: Tensor) -> Tensor:
    """uint8 ``[..., n]`` -> codes ``[..., 2 n]``: the low nibbles, then the high ones."""
    return torch.cat((stored & 0x0F, stored >> 4), dim=-1)


def _bits(stored: Tensor) -> Tensor:
    """uint8 ``[..., n]`` -> 0 or 1, uint8 ``[..., 8 n]``, the lowest bit of every byte first."""
    return (stored.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _five_bits(low: Tensor, fifth: Tensor) -> Tensor:
    return _split_nibbles(low) | _bits(fifth) << 4


def _values_q4_0(blocks: Tensor) -> Tensor:
    return _scale(blocks) * (_split_nibbles(blocks[..., 2:]).float() - 8)


def _values_q4_1(blocks: Tensor) -> Tensor:
    return _scale(blocks) * _split_nibbles(blocks[..., 4:]).float() + _scale(blocks, 2)


def _values_q5_0(blocks: Tensor) -> Tensor:
    return _scale(blocks) * (_five_bits(blocks[..., 6:], blocks[..., 2:6]).float() - 16)


def _values_q5_1(blocks: Tensor) -> Tensor:
    return _scale(blocks) * _five_bits(blocks[..., 8:], blocks[..., 4:8]).float() + _scale(blocks, 2)


def _values_q8_0(blocks: Tensor) -> Tensor:
    return _scale(blocks) * blocks[..., 2:].contiguous().view(torch.int8).float()


def _values_mxfp4(blocks: Tensor) -> Tensor:
    signed = torch.tensor(MAGNITUDES + tuple(-size for size in MAGNITUDES))
    return signed[_split_nibbles(blocks[..., 1:]).int()] * scale_values()[blocks[..., :1].int()]


def _six_bit_pairs(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes of Q4_K and Q5_K -> the eight s and the eight t, float32 ``[..., 8, 1]``.

    Bytes 0..3 and 4..7 hold the first four s and t; their upper two bits are those of the last four, whose lower four
    bits are the nibbles of bytes 8..11.
    """
    first, second, rest = stored.split(4, dim=-1)
    s = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1)
    t = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    return s.float().unsqueeze(-1), t.float().unsqueeze(-1)


def _values_k(blocks: Tensor, codes: Tensor) -> Tensor:
    """codes: ``[..., 8, 32]``."""
    s, t = _six_bit_pairs(blocks[..., 4:16])
    d, m = _scale(blocks).unsqueeze(-1), _scale(blocks, 2).unsqueeze(-1)
    return (d * s * codes.float() - m * t).flatten(-2)


def _k_nibbles(stored: Tensor) -> Tensor:
    """128 bytes -> ``[..., 8, 32]``: 32 bytes hold the low nibbles of one group and the high ones of the next."""
    return _split_nibbles(stored.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)


def _values_q4_k(blocks: Tensor) -> Tensor:
    return _values_k(blocks, _k_nibbles(blocks[..., 16:]))


def _values_q5_k(blocks: Tensor) -> Tensor:
    fifth = _bits(blocks[..., 16:48]).unflatten(-1, (32, 8)).transpose(-1, -2)  # byte j: element j of all 8 groups
    return _values_k(blocks, _k_nibbles(blocks[..., 48:]) | fifth << 4)


def _values_q6_k(blocks: Tensor) -> Tensor:
    """Halves of 128 values: 64 bytes of low nibbles, 32 bytes with the upper two bits of four values each."""
    low = _split_nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    pairs = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3
    codes = (low | pairs.flatten(-2) << 4).flatten(-2).float() - 32
    s = blocks[..., 192:208].contiguous().view(torch.int8).float().unsqueeze(-1)
    return (_scale(blocks, 208).unsqueeze(-1) * s * codes.unflatten(-1, (16, 16))).flatten(-2)


# uint8 ``[..., bytes of a block]`` -> float32 ``[..., values of a block]``, ggml's own bit for bit; only zeros of
# MXFP4 may have another sign.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _values_q4_0, "Q4_1": _values_q4_1, "Q5_0": _values_q5_0, "Q5_1": _values_q5_1, "Q8_0": _values_q8_0,
    "MXFP4": _values_mxfp4, "Q4_K": _values_q4_k, "Q5_K": _values_q5_k, "Q6_K": _values_q6_k,
}  # fmt: skip


def _positive(d: Tensor) -> Tensor:
    """float16 of any sign -> above 0; a block of zeros gets 1."""
    return torch.where(d == 0, torch.ones_like(d), d.abs())


def int4_parts(blocks: Tensor) -> Int4Parts:
    """Blocks of Q4_0, uint8 ``[rows, groups, 18]`` -> int4 in groups of 32, with zero points 7 or 8."""
    d = halves(blocks[..., :2])  # [rows, groups, 1]
    negative = d < 0
    codes = _split_nibbles(blocks[..., 2:])
    codes = torch.where(negative, 15 - codes, codes).masked_fill_(d == 0, 8)
    zeros = 8 - negative.to(torch.uint8)
    return Int4Parts(pack_nibbles(codes.flatten(-2)), _positive(d).squeeze(-1), zeros.squeeze(-1))


def zero_points(numbers: Tensor) -> Tensor:
    """float16 d and m ``[..., 2]`` of Q4_1 -> int8 ``[...]``: z where m = -z * d for an integer z from 0 to 15 and
    d > 0, or both are 0; else -1. Then d * q + m is (q - z) * d, exactly: float32 holds 15 bits of either."""
    d, m = numbers.float().unbind(-1)
    z = torch.where(d > 0, -m / d, 0.0).round().clamp(0, 15)  # NaN and Inf stay what they are, and fit nowhere
    return torch.where((d >= 0) & (z * d == -m), z, -1.0).to(torch.int8)


def int4_parts_of_minima(blocks: Tensor) -> Int4Parts:
    """Blocks of Q4_1 that all have zero points, uint8 ``[rows, groups, 20]`` -> int4 in groups of 32."""
    d, zeros = halves(blocks[..., :2]), zero_points(halves(blocks[..., :4])).to(torch.uint8)
    codes = torch.where(d == 0, zeros.unsqueeze(-1), _split_nibbles(blocks[..., 4:]))
    return Int4Parts(pack_nibbles(codes.flatten(-2)), _positive(d).squeeze(-1), zeros)


def mxfp4_parts(blocks: Tensor) -> Mxfp4Parts:
    """Blocks of MXFP4, uint8 ``[rows, groups, 17]`` -> the same codes in this package's order."""
    return Mxfp4Parts(pack_nibbles(_split_nibbles(blocks[..., 1:]).flatten(-2)), blocks[..., 0].clone())


def eight_planes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of Q8_0 with d >= 0, uint8 ``[rows, groups, 34]`` -> planes ``[8, rows, in / 8]`` of q + 128, scales."""
    d = halves(blocks[..., :2])
    codes = (blocks[..., 2:] ^ 128).masked_fill_(d == 0, 128)
    return pack_planes(codes.flatten(-2), 8), _positive(d).squeeze(-1)


def six_planes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of Q5_0, uint8 ``[rows, groups, 22]`` -> planes ``[6, rows, in / 8]`` of the codes 32 + (q - 16), or
    32 - (q - 16) where d < 0, and scales. Five planes have no code for 16 - 0."""
    d = halves(blocks[..., :2])
    codes = _five_bits(blocks[..., 6:], blocks[..., 2:6])
    codes = torch.where(d < 0, 48 - codes, 16 + codes).masked_fill_(d == 0, 32)
    return pack_planes(codes.flatten(-2), 6), _positive(d).squeeze(-1)
