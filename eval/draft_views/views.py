"""What does attention read that sees a part of the keys and values, or fewer bits of them?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

FIRST = 64  # tokens that a window leaves in view
LEVELS = (0.25, 0.875, 1.375, 2.0, 2.75, 3.75, 4.75, 6.375)  # of a nested weight (formats/nested)
BLOCK = 32
CHUNK = 1024  # query tokens at once: what is masked takes memory by chunk and not by text


def int8(states: Tensor) -> Tensor:
    """`[..., head_dim]` through codes of 8 bits, a scale for each head of a token."""
    scale = (states.float().abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (torch.round(states.float() / scale) * scale).to(states.dtype)


def nested(states: Tensor) -> Tensor:
    """`[..., head_dim]` through 4-bit codes, a power of two for each block of 32 elements."""
    levels = torch.tensor(LEVELS, device=states.device)
    size = min(BLOCK, states.shape[-1])
    blocks = states.float().unflatten(-1, (-1, size))
    unit = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30))) - 2)
    code = ((blocks.abs() / unit).unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[code] * unit * blocks.sign()).flatten(-2).to(states.dtype)


@dataclass
class Views:
    """Attention that keeps the keys and values it is given (`keeps`) or reads kept ones, in one way."""

    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    keeps: bool = True
    window: int = 0
    codes: Callable[[Tensor], Tensor] = lambda states: states

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
               scaling: float, **_: object) -> tuple[Tensor, None]:
        """As transformers calls it: query `[1, heads, tokens, head_dim]` -> `[1, tokens, heads, head_dim]`."""
        if self.keeps:
            self.kept[module.layer_idx] = key, value
        key, value = (self.codes(states) for states in self.kept[module.layer_idx])
        groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
        key, value = (states.float().repeat_interleave(groups, 1) for states in (key, value))
        parts = []
        for first in range(0, tokens, CHUNK):
            last = min(first + CHUNK, tokens)
            parts.append(F.scaled_dot_product_attention(
                query[:, :, first:last].float(), key[:, :, :last], value[:, :, :last],
                attn_mask=self.seen(first, last, key.device), scale=scaling))
        return torch.cat(parts, 2).to(query.dtype).transpose(1, 2).contiguous(), None

    def seen(self, first: int, last: int, device: torch.device) -> Tensor:
        """bool `[last - first, last]`: which tokens each of the tokens from `first` on sees."""
        slot, own = torch.arange(last, device=device), torch.arange(first, last, device=device)[:, None]
        seen = slot <= own
        return seen & ((slot < FIRST) | (slot > own - self.window)) if self.window else seen
