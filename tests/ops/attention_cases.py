"""Which calls must give a token's attention the same bits? Checks that run on every instruction set."""

from __future__ import annotations

import itertools

import torch
from cases import CACHE_DTYPES, check_attention_values, kept_as, seeded
from torch import Tensor

from hf_mlspec import ops

PROMPT = 300  # tokens: more than four chunks of slots, and no multiple of anything
WIDTHS = (1, 2, 9, 64)
# heads, kv_heads, head_dim: several heads to a key head, one, odd ones; and head sizes that are no multiple of 32
SHAPES = ((14, 2, 64), (3, 3, 40), (5, 1, 33), (8, 2, 128), (2, 1, 512))
# window, softcap, draft_window; of 5 slots, of all but a few, and one that ends a layer's own
RULES = (
    *((0, 0.0, 0), (70, 0.0, 0), (5, 2.0, 0)),
    *((0, 0.0, 5), (0, 2.0, 130), (0, 0.0, 1), (90, 0.0, 40), (250, 0.0, 100)),
)


# Two elements of a head share a byte of uint8 rows.
CACHES = [(shape, dtype) for shape in SHAPES for dtype in CACHE_DTYPES if dtype != torch.uint8 or shape[2] % 2 == 0]


def prompt(shape: tuple[int, int, int], dtype: torch.dtype, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q float32, keys and values of `dtype`, of a whole prompt: every slot is some token's."""
    heads, kv_heads, dim = shape
    q = 3 * seeded(batch, PROMPT, heads, dim)  # scores that tell slots apart
    keys, values = (kept_as(dtype, seeded(batch, kv_heads, PROMPT, dim, seed=s)) for s in (1, 2))
    return q, keys, values


def in_steps(width: int, q: Tensor, keys: Tensor, values: Tensor, *rule) -> Tensor:
    """Attention of the first row, `width` tokens a call."""
    parts = [
        ops.ragged_attention(q[:1, t : t + width], keys[:1], values[:1], [t], *rule) for t in range(0, PROMPT, width)
    ]
    return torch.cat(parts, 1)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """torch.equal, for which 0 is -0 and NaN is not NaN, of the bits."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check_widths() -> None:
    for (shape, dtype), rule in itertools.product(CACHES, RULES):
        q, keys, values = prompt(shape, dtype)
        rule = (shape[2] ** -0.5, *rule)
        whole = ops.ragged_attention(q, keys, values, [0], *rule)
        check_attention_values(whole, q, keys, values, [0], *rule)
        for width in WIDTHS:
            assert same_bits(in_steps(width, q, keys, values, *rule), whole), (shape, dtype, rule, width)


def check_batches_and_threads() -> None:
    """Rows of different lengths in one call, on any number of threads, are rows alone on one thread."""
    for dtype in CACHE_DTYPES:
        q, keys, values = prompt((6, 2, 64), dtype, batch=4)
        starts, width = [0, 291, 77, 128], 9
        torch.set_num_threads(1)
        alone = [
            ops.ragged_attention(q[r : r + 1, :width], keys[r : r + 1], values[r : r + 1], [start], 0.1)
            for r, start in enumerate(starts)
        ]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert same_bits(ops.ragged_attention(q[:, :width], keys, values, starts, 0.1), torch.cat(alone)), threads


def check_later_tokens_that_are_not_finite() -> None:
    """What stands in a later token's slot, were it Inf or NaN, reaches no earlier token of the same call."""
    for (shape, dtype), bad in itertools.product(CACHES, (torch.inf, -torch.inf, torch.nan)):
        q, keys, values = prompt(shape, dtype)
        clean = ops.ragged_attention(q, keys, values, [0], 0.1)
        for token in (1, 63, 64, 170, 299):
            for cache in (keys, values):
                dirty = cache.clone()
                dirty[:, :, token] = kept_as(dtype, torch.full((shape[2],), bad))
                lanes = (dirty, values) if cache is keys else (keys, dirty)
                y = ops.ragged_attention(q, *lanes, [0], 0.1)
                assert same_bits(y[:, :token], clean[:, :token]), (shape, dtype, bad, token)
                if cache is values:
                    assert not torch.isfinite(y[:, token:]).any()
                for t in {token - 1, token, min(token + 1, PROMPT - 1)}:
                    one = ops.ragged_attention(q[:, t : t + 1], *lanes, [t], 0.1)
                    assert torch.equal(one.isnan(), y[:, t : t + 1].isnan()), (shape, dtype, bad, token, t)
                    assert torch.equal(one.nan_to_num(), y[:, t : t + 1].nan_to_num()), (shape, dtype, bad, token, t)


def check_all() -> str:
    check_widths()
    check_batches_and_threads()
    check_later_tokens_that_are_not_finite()
    return "ok"
