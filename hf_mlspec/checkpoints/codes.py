"""How do integer codes lie in the words of other people's files, and in which order do they want their inputs?"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.damage import misplaced
from ..formats.packing import pack_nibbles, unpack_nibbles

ROWS = 1 << 22  # codes in flight: what is unpacked for a moment stays small beside the tensor


def as_bytes(words: Tensor) -> Tensor:
    """int32 ``[..., n]`` -> uint8 ``[..., 4 n]``: the bytes of the words, whatever the strides."""
    return words.reshape(-1).contiguous().view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * 4)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 ``[..., words]`` -> uint8 codes ``[..., count]``: a stream of ``bits`` bits each, lowest first, codes that
    lie across two words included (GPTQ of 2, 3, 4 and 8 bits, compressed-tensors of any width)."""
    rows = words.reshape(-1, words.shape[-1])
    out = torch.empty(rows.shape[0], count, dtype=torch.uint8, device=words.device)
    step = max(1, ROWS // max(count, 1))
    for first in range(0, rows.shape[0], step):
        stream = as_bytes(rows[first : first + step])
        out[first : first + step] = _unpacked(stream, bits)[:, :count]
    return out.view(*words.shape[:-1], count)


def _unpacked(stream: Tensor, bits: int) -> Tensor:
    """uint8 bytes ``[rows, n]`` -> their codes, and a few zeros behind them."""
    if bits == 8:
        return stream
    if bits == 4:
        return unpack_nibbles(stream)
    missing = -stream.shape[-1] % bits
    eights = torch.nn.functional.pad(stream, (0, missing)).unflatten(-1, (-1, bits))  # `bits` bytes hold eight codes
    wide = torch.nn.functional.pad(eights, (0, 8 - bits)).contiguous().view(torch.int64)
    shifts = torch.arange(8, device=stream.device) * bits
    return (wide >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[..., n]`` -> int32 ``[..., ceil(n * bits / 32)]``: the inverse of `unpack_words`."""
    rows, words = codes.reshape(-1, codes.shape[-1]), -(-codes.shape[-1] * bits // 32)
    out = torch.empty(rows.shape[0], words, dtype=torch.int32, device=codes.device)
    step = max(1, ROWS // max(codes.shape[-1], 1))
    for first in range(0, rows.shape[0], step):
        stream = _packed(rows[first : first + step], bits)
        missing = words * 4 - stream.shape[-1]
        stream = torch.nn.functional.pad(stream, (0, missing)) if missing > 0 else stream[..., : words * 4]
        out[first : first + step] = stream.contiguous().view(torch.int32)
    return out.view(*codes.shape[:-1], words)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes ``[rows, n]`` -> their bytes, and a few zeros behind them."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8))
    if bits == 8:
        return padded
    if bits == 4:
        return pack_nibbles(padded)
    shifts = torch.arange(8, device=codes.device) * bits
    wide = (padded.unflatten(-1, (-1, 8)).to(torch.int64) << shifts).sum(-1, keepdim=True)
    return wide.view(torch.uint8)[..., :bits].flatten(-2)


def require_order(order: Tensor, in_features: int, what: str) -> None:
    """ValueError, which begins with ``what``, unless ``order`` is a permutation of the inputs."""
    if order.ndim != 1 or order.numel() != in_features:
        raise ValueError(f"{what} has shape {list(order.shape)}, expected [{in_features}]")
    wrong = int(misplaced(order).sum())
    if wrong:
        raise ValueError(
            f"{what} is no permutation of {in_features} inputs: {wrong} entries are none of them or there more than "
            "once; write or download the checkpoint again"
        )


def order_of_groups(groups: Tensor, group_size: int, what: str) -> Tensor | None:
    """The group of every input ``[in]`` -> int64 ``[in]``, the inputs group by group; None where they are so already.

    ValueError, which begins with ``what``, for a group without exactly ``group_size`` inputs; the last may have what
    is left.
    """
    num_groups = -(-groups.numel() // group_size)
    wide = groups.long()
    if wide.numel() and (int(wide.min()) < 0 or int(wide.max()) >= num_groups):
        raise ValueError(
            f"{what} names groups {int(wide.min())} to {int(wide.max())}, there are {num_groups} of {group_size} "
            "inputs"
        )
    sizes = torch.bincount(wide, minlength=num_groups)
    expected = torch.full_like(sizes, group_size)
    expected[-1] = groups.numel() - (num_groups - 1) * group_size
    if not torch.equal(sizes, expected):
        wrong = int((sizes != expected).nonzero()[0])
        raise ValueError(
            f"{what} is no assignment of inputs to groups of {group_size}: group {wrong} has {int(sizes[wrong])} "
            "inputs"
        )
    order = torch.argsort(wide, stable=True)
    return None if torch.equal(order, torch.arange(order.numel())) else order


def gathered_nibbles(packed: Tensor, order: Tensor) -> Tensor:
    """uint8 ``[out, in / 2]``, columns in another order: column j of the result is column ``order[j]``."""
    out = torch.empty_like(packed)
    step = max(1, ROWS // max(order.numel(), 1))
    for first in range(0, packed.shape[0], step):
        part = slice(first, first + step)
        out[part] = pack_nibbles(unpack_nibbles(packed[part]).index_select(-1, order))
    return out
