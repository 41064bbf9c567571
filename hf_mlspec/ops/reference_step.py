"""What do the ops of a step compute, in plain torch and with the ops of single rows?

On the CPU this is how a step runs: row by row through ``rms_norm``, ``rope_write`` and ``ragged_attention``, whose
compiled kernels give a token the same bits whatever stands beside it. On a device without kernels lengths are read
back for every call, so nothing here can be captured.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import operands_step

_ACTIVATIONS = (  # by their numbers in operands_step.ACTIVATIONS
    F.silu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.gelu,
    F.relu,
)
_WORD = (1 << 32) - 1
# Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LARGEST_BELOW_ONE = 1 - 2.0**-24


def embed_rows(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    """Rows of the table, times scale; ids outside it (-1: no token) count as the nearest one inside."""
    operands_step.check_embed_rows(ids, table, scale)
    rows = table[ids.long().clamp(0, len(table) - 1)]
    return rows if scale == 1 else (rows.float() * scale).to(table.dtype)


def gated(gate_up: Tensor, activation: int) -> Tensor:
    """act(gate) * up, rounded once. In float64: torch's float32 functions round the last elements of a tensor in
    another way than those before, so an element's bits would depend on the number of rows."""
    operands_step.check_gated(gate_up, activation)
    gate, up = gate_up.double().chunk(2, dim=1)
    return (_ACTIVATIONS[activation](gate) * up).float().to(gate_up.dtype)


def rope_write_rows(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    starts: Tensor,
    counts: Tensor,
    keys: Tensor,
    values: Tensor,
    heads: int,
) -> Tensor:
    """Rotated q; k, normed and rotated, and v stand in slots starts[r] + t of the cache. What the norm of a head gives
    is rounded to qkv.dtype before it is rotated, as between two modules."""
    operands_step.check_rope_write_rows(qkv, q_norm, k_norm, eps, cos, sin, starts, counts, keys, values, heads)
    kv_heads, dim = keys.shape[1], keys.shape[3]
    q, k, v = qkv.unflatten(2, (-1, dim)).split([heads, kv_heads, kv_heads], dim=2)
    q, k = _normed(q, q_norm, eps), _normed(k, k_norm, eps)
    rotated = torch.zeros_like(q, memory_format=torch.contiguous_format)
    limit = min(keys.shape[2], len(cos))
    for row, start, count in _real_rows("rope_write_rows", starts, counts, qkv.shape[1], limit):
        one, tokens = slice(row, row + 1), slice(0, count)
        parts = q[one, tokens], k[one, tokens], v[one, tokens]
        rotated[one, tokens] = torch.ops.mlspec.rope_write(*parts, cos, sin, [start], keys[one], values[one])
    return rotated


def ragged_attention_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal grouped-query attention of real tokens over their row's slots, zeros for padding."""
    operands_step.check_ragged_attention_rows(q, keys, values, starts, counts, scale, window, softcap)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, start, count in _real_rows("ragged_attention_rows", starts, counts, q.shape[1], keys.shape[2]):
        one, tokens = slice(row, row + 1), slice(0, count)
        lanes = keys[one], values[one]
        out[one, tokens] = torch.ops.mlspec.ragged_attention(q[one, tokens], *lanes, [start], scale, window, softcap)
    return out


def choose_rows(
    logits: Tensor, softcap: float, seed: Tensor | None, streams: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The token of the largest logit, or of the largest logit + noise, and its softmax probability; -1 and NaN where a
    logit is NaN."""
    operands_step.check_choose_rows(logits, softcap, seed, streams, positions)
    scores = logits.float()
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if seed is None:
        tokens = logits.argmax(dim=1)  # of what was not capped: the cap only makes ties
    else:
        tokens = (scores + gumbel_noise(seed, streams, positions, logits.shape[1])).argmax(dim=1)
    confidence = scores.double().softmax(dim=1).gather(1, tokens[:, None])[:, 0].float()
    bad = logits.isnan().any(dim=1)
    return tokens.masked_fill(bad, -1).int(), confidence.masked_fill(bad, torch.nan)


def gumbel_noise(seed: Tensor, streams: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Float32 ``[n, vocab]``: Gumbel noise of every token of the vocabulary at a position of a stream, a pure function
    of (seed, stream, position, token). Word i of a Philox block is that of token 4 * block + i."""
    blocks = torch.arange(-(-vocab // 4), device=seed.device)
    counter = (blocks, positions.long()[:, None] & _WORD, streams.long()[:, None] & _WORD, torch.zeros_like(blocks))
    words = torch.stack(_philox(torch.broadcast_tensors(*counter), seed.long()), dim=-1).flatten(1)[:, :vocab]
    # -log(uniform) is taken near 0 of 1 - uniform, where float32 is fine: there lie the largest noises.
    rest = ((words.float() + 0.5) * 2.0**-32).clamp(max=_LARGEST_BELOW_ONE)
    return -torch.log(-torch.log1p(-rest))


def _philox(counter: tuple[Tensor, ...], seed: Tensor) -> tuple[Tensor, ...]:
    """Four words (int64 holding 0 .. 2^32 - 1) of each counter of four words; the key is the seed's two words."""
    keys = [seed & _WORD, seed >> 32 & _WORD]
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


def _normed(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return heads if weight is None else torch.ops.mlspec.rms_norm(heads.contiguous(), weight, eps, None)[0]


def _real_rows(op: str, starts: Tensor, counts: Tensor, width: int, limit: int):
    """(row, start, real tokens) of the rows that have any; ValueError where they reach beyond `limit`."""
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        real = min(count, width)
        if real > 0 and not 0 <= start <= limit - real:
            raise ValueError(
                f"{op}: row {row} has its {real} tokens from slot {start} on, slots and positions are 0 to {limit - 1}"
            )
        if real > 0:
            yield row, start, real
