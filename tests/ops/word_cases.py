"""Which words of 4-bit codes must every instruction set move alike? Checks that run in other processes, too."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mlspec import ops

NIBBLES = torch.arange(0, 32, 4)
COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of the nibbles of AWQ's words
# Inputs and outputs: less than a block of any kernel, whole blocks, and what is left behind them on either axis.
SIZES = [(16, 8), (32, 8), (32, 16), (64, 24), (96, 40), (128, 264), (128, 128), (1056, 136), (256, 512), (208, 1016)]


def codes_of(out_features: int, in_features: int) -> Tensor:
    generator = torch.Generator().manual_seed(out_features + in_features)
    return torch.randint(0, 16, (out_features, in_features), generator=generator)


def words_of(codes: Tensor) -> Tensor:
    """int64 ``[..., 8 n]`` -> int32 ``[..., n]``, the first in the lowest bits."""
    return (codes.unflatten(-1, (-1, 8)) << NIBBLES).sum(-1).to(torch.uint32).view(torch.int32)


def gptq_words(codes: Tensor) -> Tensor:
    """``[out, in]`` -> int32 ``[in / 8, out]``."""
    return words_of(codes).t().contiguous()


def awq_words(codes: Tensor) -> Tensor:
    """``[out, in]`` -> int32 ``[in, out / 8]``."""
    return words_of(codes.t().unflatten(-1, (-1, 8))[..., COLUMNS].flatten(-2)).contiguous()


def packed(codes: Tensor) -> Tensor:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)


def order_of(inputs: int) -> Tensor:
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(1))


def check_words() -> None:
    for inputs, outputs in SIZES:
        codes, order = codes_of(outputs, inputs), order_of(inputs)
        assert torch.equal(ops.pack_awq_words(awq_words(codes)), packed(codes)), (inputs, outputs)
        for fewer in (codes, codes[3:], codes[:1]):
            words = gptq_words(fewer)
            assert torch.equal(ops.pack_gptq_words(words), packed(fewer)), (inputs, fewer.shape)
            assert torch.equal(ops.pack_gptq_words(words, order), packed(fewer[:, order])), (inputs, fewer.shape)
