"""What does a router see of a query? The input of the block itself, its mean over the query's tokens.

QAQ, Eq. 2: h_j is the hidden state that block j gets in the very pass that is to be routed. No second prefill is
needed, and a block's choice knows what the widths before it did.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pooled(hidden: Tensor, lengths: list[int], block: str) -> Tensor:
    """hidden ``[batch, tokens, features]`` -> float32 ``[batch, features]``: the mean of the first lengths[r] tokens
    of row r, each row on its own, so that no neighbour and no padding changes its bits.

    FloatingPointError naming the block where a mean is NaN or infinite.
    """
    found = torch.stack([row[:length].float().mean(0) for row, length in zip(hidden, lengths, strict=True)])
    if not bool(torch.isfinite(found).all()):
        row = int((~torch.isfinite(found)).any(1).nonzero()[0])
        raise FloatingPointError(
            f"the input of {block} is NaN or infinite in row {row}: no width can be chosen from it; the model's "
            "weights hold NaN, or its arithmetic overflows: check the checkpoint, or load it in bfloat16 or float32"
        )
    return found
