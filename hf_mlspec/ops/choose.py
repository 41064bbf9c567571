"""Which token does a row of logits give? The likeliest, or a draw whose noise every level of a chain shares."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .operator import CACHE_FLOATS, Operands, operator

_WORD = (1 << 32) - 1
# Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LARGEST_BELOW_ONE = 1 - 2.0**-24


def _check(given: Operands) -> None:
    given.require_float("logits", CACHE_FLOATS)
    logits = given.logits
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(
            f"{given.op}: logits has shape {list(logits.shape)}, expected [n, vocab] with a vocab of 1 or more"
        )
    if not 0 <= given.softcap < math.inf:
        raise ValueError(f"{given.op}: softcap is {given.softcap}, expected 0 (none) or a positive number")
    names = [name for name in ("positions", "seed", "streams") if vars(given)[name] is not None]
    if names and len(names) < 3:
        raise ValueError(f"{given.op}: {' and '.join(names)} given alone; noise needs seed, streams and positions")
    if names:
        given.require_dtype("seed", torch.int64)
        if given.seed.ndim != 1 or len(given.seed) not in (1, len(logits)):
            raise ValueError(f"{given.op}: seed has shape {list(given.seed.shape)}, expected [1], or one for each of "
                             f"{len(logits)} rows of logits")
        given.require_numbers("streams", len(logits))
        given.require_numbers("positions", len(logits))


@operator(_check, lambda given: tuple(
    given.logits.new_empty(len(given.logits), dtype=dtype) for dtype in (torch.int32, torch.float32)
))  # fmt: skip
def _choose_rows(
    logits: Tensor, softcap: float, seed: Tensor | None, streams: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if seed is None:
        tokens = logits.argmax(dim=1)  # of what was not capped: the cap only makes ties
    else:
        drawn = (scores + gumbel_noise(seed, streams, positions, logits.shape[1])).argmax(dim=1)
        tokens = torch.where(streams < 0, logits.argmax(dim=1), drawn)
    confidence = scores.double().softmax(dim=1).gather(1, tokens[:, None])[:, 0].float()
    bad = logits.isnan().any(dim=1)
    return tokens.masked_fill(bad, -1).int(), confidence.masked_fill(bad, torch.nan)


def choose_rows(
    logits: Tensor,
    softcap: float = 0.0,
    seed: Tensor | None = None,
    streams: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """float32 or bfloat16 ``[n, vocab]`` -> tokens int32 ``[n]``, confidence float32 ``[n]``: their softmax
    probability.

    Logits are capped to ``softcap * tanh(logit / softcap)`` unless that is 0. Without a seed the token of the largest
    logit, the first of equals. With seed int64 ``[1]`` or ``[n]``, streams and positions int32 ``[n]``: that of the
    largest logit plus Gumbel noise, a draw from the softmax; a row whose stream is negative has no noise. The noise is
    a pure function of (seed, stream, position, token): all levels of a chain share it (speculation/sampling.py). A row
    with a NaN gets token -1 and confidence NaN.
    """
    return _choose_rows(logits, softcap, seed, streams, positions)


def gumbel_noise(seed: Tensor, streams: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Float32 ``[n, vocab]``: Gumbel noise of every token of the vocabulary at a position of a stream, a pure function
    of (seed, stream, position, token). Word i of a Philox block is that of token 4 * block + i."""
    blocks = torch.arange(-(-vocab // 4), device=seed.device)
    counter = (blocks, positions.long()[:, None] & _WORD, streams.long()[:, None] & _WORD, torch.zeros_like(blocks))
    words = torch.stack(philox(torch.broadcast_tensors(*counter), seed.long()[:, None]), dim=-1).flatten(1)[:, :vocab]
    # -log(uniform) is taken near 0 of 1 - uniform, where float32 is fine: there lie the largest noises.
    rest = ((words.float() + 0.5) * 2.0**-32).clamp(max=_LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-rest))


def philox(counter: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor, ...]:
    """Four words (int64 holding 0 .. 2^32 - 1) of each counter of four words; the key is the seed's two words."""
    keys = [seed & _WORD, seed >> 32 & _WORD]  # of all counters, or a column: one for each line of them
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        low, high = _multiply(a, _MULTIPLIERS[0]), _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = high[0] ^ b ^ keys[0], high[1], low[0] ^ d ^ keys[1], low[1]
        keys = [key + step & _WORD for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return a, b, c, d


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two words, in pieces that int64 holds."""
    low = word * (factor & 0xFFFF)
    total = word * (factor >> 16) + (low >> 16)
    return total >> 16, (total << 16 | low & 0xFFFF) & _WORD
