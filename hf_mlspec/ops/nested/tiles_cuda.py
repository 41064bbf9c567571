"""In which order do the CUDA kernels read a nested BF16 weight? A permutation of what is on disk; nothing is lost.

    draft_tiles     uint8 [ceil(out / 128), ceil(in / 128), 8704]: two tiles of 64 outputs x 128 inputs, each 4096
                    bytes of nibbles and, as ../tiles_cuda.py has those of MXFP4, 256 scales: S + 128 - shift
    exponent_tiles  uint8 [1, in / 32, 4]: one int32, the shift max(0, largest S - 126), repeated so that the shape
                    tells `in`; what the draft computes is multiplied by 2 to its power
    low_tiles       uint8 [ceil(out / 128), ceil(in / 128), 24576]: the 12 bits v of the same tiles, 12288 bytes each

Tiles, lanes and registers are those of ../tiles_cuda.py. Eight weights of lane 4 r + q, one step of 16 inputs: number
4 h + k is output 16 w + 8 h + r, input 64 f + 16 s + 2 q + 8 (k % 2) + k // 2 (h: 0, 1; k: 0 ... 3). They are

    4 bytes of nibbles [w][f][lane][s]: index of number i at bits 4 i ... 4 i + 2; sign of number k at bit 8 k + 7, of
        number 4 + k at bit 8 k + 3
    2 x 4 low bytes of v [s / 2][w][f][lane][s % 2][h][k], and behind all of them
    4 bytes with the high 4 bits of v [w][f][lane][s][k], number k in the low nibble, number 4 + k in the high one

Beyond the last output or input stand weights of 0. kernels_ext/cuda/nested/nested_linear_format.cuh reads this.
"""

from __future__ import annotations

from torch import Tensor

from ...formats.nested import BLOCK
from ...formats.packing import pack_nibbles, unpack_nibbles
from ..tiles_cuda import (
    CODE_BYTES,
    PAIR_INPUTS,
    PAIR_OUTPUTS,
    exponents_in_pairs,
    exponents_of_pairs,
    in_pairs,
    num_pairs,
    pairs_at_once,
)
from .tiles import require_on_disk

LARGEST_SCALE = 158  # the multiplier 2^(S - 31) is a bfloat16
DRAFT_BYTES = 2 * CODE_BYTES + PAIR_OUTPUTS * (PAIR_INPUTS // BLOCK)  # of two tiles
LOW_BYTES = 2 * 3 * CODE_BYTES
_SCALE_BIAS, _UNSHIFTED = 128, 126
_SIGN_OF = [4, 0, 5, 1, 6, 2, 7, 3]  # whose sign stands beside the index of number 0 ... 7
_SIGN_AT = [1, 3, 5, 7, 0, 2, 4, 6]  # the inverse


def is_packed(draft_tiles: Tensor) -> bool:
    """Whether a weight is in these tiles, not in those of the CPU, whose pieces are 256 bytes."""
    return draft_tiles.ndim == 3 and draft_tiles.shape[2] == DRAFT_BYTES


def in_features(draft_tiles: Tensor, exponent_tiles: Tensor) -> int:
    """Of a weight from ``pack``."""
    return exponent_tiles.shape[1] * BLOCK


def pack(packed: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The planes of formats/nested/ -> draft_tiles, exponent_tiles, low_tiles.

    TypeError where a plane is not uint8; ValueError where their shapes are not those of one weight, or where a weight
    is 2^32 or larger: its tensor stays BF16.
    """
    require_on_disk(packed, scale, low, high)
    largest = scale.amax() if scale.numel() else scale.new_tensor(0)
    if int(largest) > LARGEST_SCALE:
        raise ValueError(
            f"prepack_nested: {int((scale > LARGEST_SCALE).sum())} of {scale.numel()} exponent bytes are above "
            f"{LARGEST_SCALE} (the largest is {int(largest)}): the CUDA kernels take nested weights below 2^32; leave "
            "this layer in BF16"
        )
    scales, shifts = exponents_in_pairs(scale, _SCALE_BIAS, _UNSHIFTED, _SCALE_BIAS)
    draft, low_tiles = _pack(packed, scales, low, high)
    return draft, shifts, low_tiles


def unpack(
    draft_tiles: Tensor, exponent_tiles: Tensor, low_tiles: Tensor, out_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inverse of ``pack``, bit for bit. ValueError for shapes that are no tiles of ``out_features`` outputs."""
    _require_tiles(draft_tiles, exponent_tiles, low_tiles, out_features)
    scale = exponents_of_pairs(draft_tiles, exponent_tiles, out_features, _SCALE_BIAS)
    packed, low, high = _unpack(draft_tiles, low_tiles, out_features, in_features(draft_tiles, exponent_tiles))
    return packed, scale, low, high


def _pack(packed: Tensor, scales: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    pairs, chunks, _, size = scales.shape
    draft = packed.new_empty(pairs, chunks, 2, CODE_BYTES + size)
    draft[..., CODE_BYTES:] = scales
    fields = packed.new_empty(pairs, chunks, 2, 3 * CODE_BYTES)
    step = pairs_at_once(packed, chunks)
    for first in range(0, pairs, step):
        rows, part = slice(first * PAIR_OUTPUTS, (first + step) * PAIR_OUTPUTS), slice(first, first + step)
        draft[part, ..., :CODE_BYTES] = _nibble_words(_placed(unpack_nibbles(packed[rows])))
        fields[part, ..., : 2 * CODE_BYTES] = _low_words(_placed(low[rows]))
        fields[part, ..., 2 * CODE_BYTES :] = _high_words(_placed(unpack_nibbles(high[rows])))
    return draft.flatten(2), fields.flatten(2)


def _unpack(draft: Tensor, fields: Tensor, out_features: int, in_features: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs, chunks, size = draft.shape
    low = draft.new_empty(pairs * PAIR_OUTPUTS, in_features)
    packed, high = (draft.new_empty(pairs * PAIR_OUTPUTS, in_features // 2) for _ in range(2))
    step = pairs_at_once(draft, chunks)
    for first in range(0, pairs, step):
        rows, part = slice(first * PAIR_OUTPUTS, (first + step) * PAIR_OUTPUTS), slice(first, first + step)
        words = draft[part].unflatten(-1, (2, size // 2))[..., :CODE_BYTES]
        more = fields[part].unflatten(-1, (2, 3 * CODE_BYTES))
        packed[rows] = pack_nibbles(_rows(_of_nibble_words(words), in_features))
        low[rows] = _rows(_of_low_words(more[..., : 2 * CODE_BYTES]), in_features)
        high[rows] = pack_nibbles(_rows(_of_high_words(more[..., 2 * CODE_BYTES :]), in_features))
    if len(low) == out_features:
        return packed, low, high
    return packed[:out_features].clone(), low[:out_features].clone(), high[:out_features].clone()


def _placed(rows: Tensor) -> Tensor:
    """``[outputs, in]`` -> ``[p m w h r c f s t q e]``, input 64 f + 16 s + 8 t + 2 q + e of chunk c; zeros beyond."""
    return in_pairs(rows, PAIR_INPUTS, 0).unflatten(-1, (2, 4, 2, 4, 2))


def _rows(placed: Tensor, in_features: int) -> Tensor:
    """The inverse: ``[outputs, in_features]``."""
    return placed.reshape(placed.shape[0] * PAIR_OUTPUTS, -1)[:, :in_features]


def _nibble_words(placed: Tensor) -> Tensor:
    """``[p, c, m, 4096]``."""
    numbers = placed.permute(0, 5, 1, 2, 6, 4, 9, 7, 3, 10, 8).flatten(-3)  # [p c m w f r q s, 4 h + k], k = 2 e + t
    return pack_nibbles((numbers & 7) | (numbers >> 3)[..., _SIGN_OF] << 3).flatten(3)


def _of_nibble_words(words: Tensor) -> Tensor:
    nibbles = unpack_nibbles(words.unflatten(-1, (4, 2, 8, 4, 4, 4)))
    numbers = (nibbles & 7) | (nibbles >> 3)[..., _SIGN_AT] << 3
    return numbers.unflatten(-1, (2, 2, 2)).permute(0, 2, 3, 8, 5, 1, 4, 7, 10, 6, 9)


def _low_words(placed: Tensor) -> Tensor:
    """``[p, c, m, 8192]``."""
    steps = placed.unflatten(7, (2, 2))  # [p m w h r c f s/2 s%2 t q e]
    return steps.permute(0, 5, 1, 7, 2, 6, 4, 10, 8, 3, 11, 9).flatten(3)


def _of_low_words(words: Tensor) -> Tensor:
    steps = words.unflatten(-1, (2, 4, 2, 8, 4, 2, 2, 2, 2))  # [p c m s/2 w f r q s%2 h e t]
    return steps.permute(0, 2, 4, 9, 6, 1, 5, 3, 8, 11, 7, 10).flatten(7, 8)


def _high_words(placed: Tensor) -> Tensor:
    """``[p, c, m, 4096]``."""
    return pack_nibbles(placed.permute(0, 5, 1, 2, 6, 4, 9, 7, 10, 8, 3).flatten(3))


def _of_high_words(words: Tensor) -> Tensor:
    halves = unpack_nibbles(words).unflatten(-1, (4, 2, 8, 4, 4, 2, 2, 2))  # [p c m w f r q s e t h]
    return halves.permute(0, 2, 3, 10, 5, 1, 4, 7, 9, 6, 8)


def _require_tiles(draft: Tensor, exponent: Tensor, low: Tensor, out_features: int) -> None:
    blocks = exponent.shape[1] if exponent.ndim == 3 else -1
    pairs, chunks = num_pairs(out_features, blocks * BLOCK)
    wanted = ((pairs, chunks, DRAFT_BYTES), (1, blocks, 4), (pairs, chunks, LOW_BYTES))
    parts = (("draft_tiles", draft), ("exponent_tiles", exponent), ("low_tiles", low))
    if any(tensor.shape != shape for (_, tensor), shape in zip(parts, wanted, strict=True)):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in parts)
        raise ValueError(
            f"unprepack_nested: {shapes} are not the tiles of {out_features} outputs on a GPU, {list(wanted[0])}, "
            f"[1, in / {BLOCK}, 4] and {list(wanted[2])}"
        )
