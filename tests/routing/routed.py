"""Small models in bit-planes and routers for them, whose choices depend on the query."""

from __future__ import annotations

import copy

import torch
from models import packed, tiny

from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.passes import recorded
from hf_mlspec.routing.router import Router

VOCAB = 61


def pair(seed: int = 0, kind: str = "llama"):
    """A dense float32 model, and the same in bit-planes."""
    dense = tiny(kind, seed=seed, dtype=torch.float32)
    return dense, packed(copy.deepcopy(dense), "planes")


def queries(rows: int, tokens: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def differing(model, seed: int = 5, **options) -> Router:
    """A router that chooses many widths: random outer weights over standardized features."""
    torch.manual_seed(seed)
    blocks = blocks_of(model)
    router = Router(blocks, **options)
    rows = queries(16, 12, seed)
    with torch.no_grad(), recorded(model, blocks, [12] * 16) as found:
        model(input_ids=rows, use_cache=False)
    for own, features in zip(router.of, found.values(), strict=True):
        own.mean.copy_(features.mean(0))
        own.spread.copy_(features.std(0))
        torch.nn.init.normal_(own.outer.weight)
    return router.eval().requires_grad_(False)
