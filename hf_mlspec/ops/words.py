"""How do 4-bit codes of other libraries come to run along the inputs, two a byte?

Their words have them along the outputs, or in another order of the inputs.

A compiled kernel moves every byte once (kernels_ext/cpu/words/). In plain torch a square of fields in as many words is
transposed by exchanging fields between pairs of words, first neighbours, then those two apart, and so on (Warren,
Hacker's Delight, section 7-3). Here a "word" is a whole block of a matrix, so that an exchange is six operations on
much memory at once, in a cache; what is left is to move words of 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .operator import Operands, operator

_MULTIPLE = 16  # of inputs
_IN_FLIGHT = 1 << 20  # bytes of codes: they stay in a core's second cache
# Bits of a field -> a word of 64 bits with every second field set, the lowest first.
_FIELDS = {4: 0x0F0F0F0F0F0F0F0F, 8: 0x00FF00FF00FF00FF, 16: 0x0000FFFF0000FFFF, 32: 0x00000000FFFFFFFF}


def _exchange(low: Tensor, high: Tensor, bits: int) -> None:
    """The upper fields of ``low`` and the lower ones of ``high``, int64, change places."""
    moved = low >> bits
    moved ^= high
    moved &= _FIELDS[bits]
    high ^= moved
    moved <<= bits
    low ^= moved


def _transpose_square(words: Tensor, smallest: int) -> None:
    """int64 ``[n, ...]``, fields of ``smallest`` bits, n = 8: field i of word k and field k of word i change places,
    in every 8 fields of a word."""
    for apart in (1, 2, 4):
        pairs = words.view(-1, 2, apart, *words.shape[1:])
        _exchange(pairs[:, 0], pairs[:, 1], smallest * apart)


def _check_awq(given: Operands) -> None:
    _require_words(given)
    _require_inputs(given, given.words.shape[0])


@operator(_check_awq, lambda given: given.words.new_empty((given.words.shape[1] * 8, given.words.shape[0] // 2),
                                                          dtype=torch.uint8))  # fmt: skip
def _pack_awq(words: Tensor) -> Tensor:
    in_features, num_words = words.shape
    out = torch.empty(num_words + num_words % 2, 8, in_features // 2, dtype=torch.uint8, device=words.device)
    step = max(1, _IN_FLIGHT // (8 * in_features)) * 2
    for first in range(0, num_words, step):
        part = _filled_up(words[:, first : first + step], 2)
        # [pair of inputs, one of the pair, 16 inputs, words of 64 bits]
        held = part.unflatten(0, (-1, 8, 2)).permute(1, 2, 0, 3).contiguous().view(torch.int64)
        _exchange(held[:, 0], held[:, 1], 4)  # bytes of two inputs: of the even nibbles, of the odd ones
        _transpose_square(held, 8)  # words of 16 inputs
        rows = out[first : first + part.shape[1]].view(torch.int64).unflatten(0, (-1, 2)).unflatten(2, (2, 2, 2))
        # [word, half of it, nibble's bit 1, bit 0, bit 2, 16 inputs]
        rows.copy_(held.unflatten(0, (2, 2, 2)).permute(5, 0, 2, 3, 1, 4))
    return _whole(out[:num_words].flatten(0, 1))


def _check_gptq(given: Operands) -> None:
    _require_words(given)
    inputs = given.words.shape[0] * 8
    _require_inputs(given, inputs)
    if given.order is not None:
        given.require_part("order", torch.int64, (inputs,))


@operator(_check_gptq, lambda given: given.words.new_empty((given.words.shape[1], given.words.shape[0] * 4),
                                                           dtype=torch.uint8))  # fmt: skip
def _pack_gptq(words: Tensor, order: Tensor | None) -> Tensor:
    if order is None:
        return words.t().contiguous().view(torch.uint8)
    if bool(((order < 0) | (order >= len(order))).any()):
        raise ValueError(f"pack_gptq: order names inputs that are none of {len(order)}")
    eighths, out_features = words.shape
    missing = -out_features % 16
    out = torch.empty(out_features + missing, eighths * 4, dtype=torch.uint8, device=words.device)
    # Rows of inputs lie by their places in a word; they are wanted as [pair of inputs, one of the pair, 16 inputs].
    places = (order % 8 * eighths + order // 8).view(-1, 8, 2).permute(1, 2, 0).flatten()
    step = max(1, _IN_FLIGHT // (64 * eighths)) * 16
    for first in range(0, out_features, step):
        part = _filled_up(words[:, first : first + step], 16)
        # Eight runs of columns, nibble i of a word is a column of run i: [input of 8, 8 inputs, words of 64 bits]
        held = part.unflatten(1, (8, -1)).permute(1, 0, 2).contiguous().view(torch.int64)
        _transpose_square(held, 4)
        held = held.flatten(0, 1).index_select(0, places).view(8, 2, eighths // 2, -1)
        _exchange(held[:, 0], held[:, 1], 4)
        _transpose_square(held, 8)
        rows = out[first : first + part.shape[1]].view(torch.int64).unflatten(0, (4, 2, -1, 2))
        # [nibble's upper bits, its bit 0, word, half of it, 16 inputs]
        rows.copy_(held.unflatten(0, (2, 4)).permute(1, 2, 4, 0, 3))
    return _whole(out[:out_features])


def _require_words(given: Operands) -> None:
    given.require_dtype("words", torch.int32)
    if given.words.ndim != 2:
        raise ValueError(f"{given.op}: words has shape {list(given.words.shape)}, expected two axes")
    given.require_contiguous("words")


def _require_inputs(given: Operands, inputs: int) -> None:
    if inputs % _MULTIPLE:
        raise ValueError(f"{given.op}: words have {inputs} inputs, expected a multiple of {_MULTIPLE}")


def _filled_up(words: Tensor, multiple: int) -> Tensor:
    missing = -words.shape[1] % multiple
    return pad(words, (0, missing)) if missing else words


def _whole(rows: Tensor) -> Tensor:
    """In memory of its own size."""
    return rows if rows.untyped_storage().nbytes() == rows.nbytes else rows.clone()


def pack_gptq_words(words: Tensor, order: Tensor | None = None) -> Tensor:
    """GPTQ's int32 ``[in / 8, out]``, eight inputs a word, the first in the lowest bits -> uint8 ``[out, in / 2]``,
    two inputs a byte, the first in the low nibble. order: int64 ``[in]``, input ``order[i]`` is at place i; None: as
    they come. 16 divides ``in``. In new memory; TypeError or ValueError for what does not fit. Source: the layout of
    AutoGPTQ's ``qweight``."""
    return _pack_gptq(words, order)


def pack_awq_words(words: Tensor) -> Tensor:
    """AWQ's int32 ``[in, out / 8]``, whose nibbles are columns 0, 2, 4, 6, 1, 3, 5, 7 -> uint8 ``[out, in / 2]``, two
    inputs a byte, the first in the low nibble. 16 divides ``in``. In new memory; TypeError or ValueError for what does
    not fit. Source: the layout of AutoAWQ's ``qweight`` in its version "gemm"."""
    return _pack_awq(words)
