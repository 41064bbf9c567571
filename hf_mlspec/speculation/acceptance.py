"""Which drafted tokens does a level keep, and what does it put after them? Pure functions of their arguments.

Greedy comparison, and speculative sampling as in Leviathan et al. 2023 (Fast Inference from Transformers via
Speculative Decoding, algorithm 1) and Chen et al. 2023 (Accelerating LLM Decoding with Speculative Sampling, theorem
1), for a batch of ragged drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accept_greedy(tokens: Tensor, lengths: Tensor, best: Tensor) -> Tensor:
    """How many drafted tokens equal the checker's own choice before the first that does not.

    tokens int64 `[batch, k]`, lengths int64 `[batch]`, best int64 `[batch, k + 1]` -> int64 `[batch]`. The token that
    follows the accepted ones is `best[r, accepted[r]]`.
    """
    valid = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    return _leading_true((tokens == best[:, :-1]) & valid)


def accept_row(guesses: Sequence[int], best: Sequence[int]) -> int:
    """`accept_greedy` of one row that lies on the host: best holds at least one choice more than there are guesses."""
    return next((n for n, (guess, own) in enumerate(zip(guesses, best, strict=False)) if guess != own), len(guesses))


def accept_sampled(
    tokens: Tensor, lengths: Tensor, draft_probs: Tensor | None, probs: Tensor, uniforms: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling: the accepted tokens and the next one follow `probs` exactly, whatever drew the draft.

    tokens:      int64 `[batch, k]`, of which lengths `[batch]` are valid.
    draft_probs: float32 `[batch, k, vocab]`, what each token was really drawn from; None: point masses.
    probs:       float32 `[batch, k + 1, vocab]`, the checker's distribution at every position.
    uniforms:    float32 `[batch, k]` in [0, 1).  noise: float32 `[batch, vocab]`, exponentially distributed.
    Returns accepted int64 `[batch]` and the token after them int64 `[batch]`: drawn from max(0, p - q) where a token
    was rejected, from p where none was.
    """
    p = probs[:, :-1].gather(2, tokens[..., None])[..., 0]
    q = 1.0 if draft_probs is None else draft_probs.gather(2, tokens[..., None])[..., 0]
    valid = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    accepted = _leading_true((uniforms * q < p) & valid)
    return accepted, _after(tokens, lengths, draft_probs, probs, noise, accepted)


def _after(tokens, lengths, draft_probs, probs, noise, accepted) -> Tensor:
    """The token at the first position that was not accepted."""
    rows = torch.arange(len(accepted), device=accepted.device)
    here = probs[rows, accepted]  # [batch, vocab]
    if tokens.shape[1] == 0:
        return draw(here, noise)
    at = accepted.clamp(max=tokens.shape[1] - 1)
    if draft_probs is None:
        drawn_from = torch.zeros_like(here).scatter_(1, tokens[rows, at][:, None], float("inf"))
    else:
        drawn_from = draft_probs[rows, at]
    residual = (here - drawn_from).clamp_(min=0)
    # p == q up to rounding leaves nothing to draw from; such a rejection has probability 0 in exact arithmetic.
    rejected = (accepted < lengths) & (residual.sum(dim=1) > 0)
    return draw(torch.where(rejected[:, None], residual, here), noise)


def draw(weights: Tensor, noise: Tensor) -> Tensor:
    """A token per row with probability proportional to weights `[batch, vocab]`: an exponential race."""
    return (weights / noise).argmax(dim=-1)


def _leading_true(flags: Tensor) -> Tensor:
    return flags.long().cumprod(dim=1).sum(dim=1)
