"""What does a router see of a query? The input of the block itself, its mean over the query's tokens.

QAQ, Eq. 2: h_j is the hidden state that block j gets in the very pass that is to be routed. No second prefill is
needed, and a block's choice knows what the widths before it did.

A step behind the query sees that mean moved towards the token's own input. A mean over all tokens so far would hardly
move behind a long query, and would have to be taken back with every rejected draft; this one follows from the query
and the token alone, so that a check of many tokens sees what steps of one saw.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pooled(hidden: Tensor, lengths: list[int], block: str) -> Tensor:
    """hidden ``[batch, tokens, features]`` -> float32 ``[batch, features]``: the mean of the first lengths[r] tokens
    of row r, each row on its own, so that no neighbour and no padding changes its bits.

    FloatingPointError naming the block where a mean is NaN or infinite.
    """
    found = [row[:length].float().mean(0) for row, length in zip(hidden, lengths, strict=True)]
    return require_finite(found[0][None] if len(found) == 1 else torch.stack(found), block)


def moved(mean: Tensor, own: Tensor, share: float, block: str) -> Tensor:
    """Means of queries, float32 ``[features]`` or ``[tokens, features]``, and inputs of tokens behind them ``[tokens,
    features]`` -> float32 ``[tokens, features]``: the mean, moved by ``share`` towards each. Errors as `pooled`."""
    return require_finite(torch.lerp(mean.expand(own.shape), own.float(), share), block)


def require_finite(found: Tensor, block: str) -> Tensor:
    """``found``; FloatingPointError naming the block where a row of it is NaN or infinite."""
    if math.isfinite(float(found.sum())):  # NaN and infinities stay in a sum; it alone may overflow
        return found
    if not bool(torch.isfinite(found).all()):
        row = int((~torch.isfinite(found)).any(1).nonzero()[0])
        raise FloatingPointError(
            f"the input of {block} is NaN or infinite in row {row}: no width can be chosen from it; the model's "
            "weights hold NaN, or its arithmetic overflows: check the checkpoint, or load it in bfloat16 or float32"
        )
    return found
