"""What does the MTP layer of a checkpoint compute from the last hidden state of its target and the token behind it?

Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the hidden state behind the last layer and the
embedding of the next token, each normed, are brought to the model's width; one more decoder layer of the target's own
kind reads them, and the target's output head predicts the token after. What the layer gives, normed, takes the place
of the hidden state where it reads its own draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class MtpShape:
    """Sizes of an MTP layer. taps: the number of the target's layers, behind which it reads (`Tap.layers`).

    key_dim, value_dim: of a head's keys and values, which there are kv_heads of.
    """

    taps: tuple[int, ...]
    hidden: int
    vocab: int
    kv_heads: int
    key_dim: int
    value_dim: int
    num_layers: int = 1

    @property
    def target_hidden(self) -> int:
        """Elements of a hidden state: those of its own."""
        return self.hidden

    @property
    def head_dim(self) -> int:
        """Elements that a format of keys and values can group: those of the narrower ones."""
        return min(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class OfTarget:
    """What an MTP layer reads of its target's. rotary: a copy, since some remember the longest row they saw."""

    norm: nn.Module
    embedding: nn.Module
    head: nn.Module
    rotary: nn.Module


class MtpHead(nn.Module):
    """An MTP layer, ready to draft for its target.

    block: a decoder layer of the target's class, whose attention reads the plan of the running pass. norms: as
    the target's. embed_tokens, lm_head: its own ones where the checkpoint's differ from the target's, else None.
    config: of the block. name: what messages call it.
    """

    targets = None  # it drafts all tokens of the target

    def __init__(self, shape: MtpShape, block: nn.Module, norms: list[nn.Module], config: Any, name: str):
        super().__init__()
        self.shape, self.config, self.name = shape, config, name
        self.block = block
        self.enorm, self.hnorm, self.post_norm = norms
        self.eh_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None
        self._shared: tuple[OfTarget, ...] = ()  # no part of this module

    def share(self, target: OfTarget) -> None:
        """Read what is the target's; it stays the target's."""
        self._shared = (target,)

    @property
    def embedding(self) -> nn.Module:
        """Its own, or the target's."""
        return self.embed_tokens if self.embed_tokens is not None else self._shared[0].embedding

    @property
    def outputs(self) -> nn.Module:
        """The output head: its own, or the target's."""
        return self.lm_head if self.lm_head is not None else self._shared[0].head

    @property
    def dtype(self) -> torch.dtype:
        """Of its keys and values."""
        return self.enorm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.enorm.weight.device

    def join(self, states: Tensor) -> Tensor:
        """Hidden states behind the target's last layer `[batch, tokens, 1, hidden]` -> those behind its last norm."""
        return self._shared[0].norm(states[:, :, 0].to(self.dtype)).to(self.device)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Each token beside the hidden state before it -> what predicts the token after, `[batch, tokens, hidden]`.

        tokens, positions int64 `[batch, tokens]`, hidden of `join` or of an earlier call. cache: where the running
        plan puts keys and values.
        """
        own, table = self._shared[0], self.embedding
        if type(table) is nn.Embedding:
            tokens = tokens.clamp(0, table.num_embeddings - 1)
        embedded = table(tokens).to(self.device, self.dtype)
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden.to(self.dtype))], dim=-1))
        places = positions[None].expand(3, -1, -1) if hasattr(own.rotary, "mrope_section") else positions
        rotation = own.rotary(joined, position_ids=places)
        found = self.block(
            joined,
            attention_mask=None,
            position_embeddings=rotation,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return self.post_norm(found[0] if isinstance(found, tuple) else found)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[batch, hidden]` of `forward` -> float32 `[batch, vocab]`."""
        return self.outputs(hidden).float().to(hidden.device)

    own_logits = logits

    def extra_repr(self) -> str:
        """What it computes with beside its own modules; costs are kept by it."""
        return f"{self.shape}, of its target: {[self.embedding, self.outputs]}" if self._shared else str(self.shape)
