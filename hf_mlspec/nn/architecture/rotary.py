"""Which rotary tables does a decoder need, and how far may they reach?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

FIRST_POSITIONS = 1024


def rope_tables(rotary: nn.Module, kinds: list[str | None], positions: int) -> list[tuple[Tensor, Tensor]]:
    """cos and sin float32 ``[positions, rotary_dim / 2]`` of every kind, from a model's own rotary embedding, where
    that lies."""
    device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
    ids = torch.arange(positions, device=device)[None]
    like = torch.zeros(1, 1, 1, device=device)  # float32: the tables are not rounded to the model's dtype
    tables = []
    for kind in kinds:
        cos, sin = rotary(like, ids) if kind is None else rotary(like, ids, kind)
        half = cos.shape[-1] // 2
        tables.append((cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()))
    if device.type == "cuda":  # calls on other streams will read them
        torch.cuda.current_stream(device).synchronize()
    return tables


def rotary_border(model: nn.Module) -> int | None:
    """The length past which a rotary embedding changes its frequencies, None where it never does."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    borders = [
        one.get("original_max_position_embeddings") or model.config.max_position_embeddings
        for one in (rope, *(value for value in rope.values() if isinstance(value, dict)))
        if one.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(borders, default=None)


def grown_positions(count: int, have: int, border: int | None) -> int:
    """How many positions rotary tables should have that must reach ``count``: twice as many as now, not past the
    border."""
    if count <= have:
        return have
    wanted = max(count, 2 * have, FIRST_POSITIONS)
    return wanted if border is None else min(wanted, border)
