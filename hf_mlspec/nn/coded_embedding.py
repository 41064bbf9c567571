"""What do embeddings have in common whose rows are codes: how rows are asked for, and what they refuse?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class NoTableError(ValueError, AttributeError):
    """The weight of a table was asked for that has codes; hasattr() is told that there is none."""


class CodedEmbedding(nn.Module):
    """Rows looked up in codes and rounded to bfloat16. What one adds says where they come from, `_rows`.

    num_embeddings, embedding_dim, padding_idx: as of nn.Embedding. embed_scale: what rows are multiplied by (Gemma's),
    None for nothing.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    embed_scale: float | None
    dtype = torch.bfloat16
    weightless = ""  # why there is no `weight`, and the remedy

    def forward(self, input_ids: Tensor) -> Tensor:
        """Integers of any shape -> bfloat16 ``[..., in]``. IndexError on the CPU for an id outside of the table."""
        if input_ids.device.type == "cpu" and input_ids.numel() and not torch.compiler.is_compiling():
            low, high = torch.aminmax(input_ids)
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(f"token {int(low if low < 0 else high)} is outside of the {self.num_embeddings} rows")
        scale = 1.0 if self.embed_scale is None else self.embed_scale
        return self._rows(input_ids.reshape(-1).int(), scale).view(*input_ids.shape, self.embedding_dim)

    def _rows(self, ids: Tensor, scale: float) -> Tensor:
        """ids int32 ``[n]`` -> bfloat16 ``[n, in]``, times `scale`."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # resize_token_embeddings
            raise NoTableError(f"{type(self).__name__} has no weight of its own{self.weightless}")
        return super().__getattr__(name)

    def _said(self, where: str = "") -> str:
        """For `extra_repr`."""
        scale = "" if self.embed_scale is None else f", embed_scale={self.embed_scale:g}"
        return f"{self.num_embeddings}, {self.embedding_dim}{where}{scale}"


def is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding that a CodedEmbedding can stand for: transformers' own, plain or scaled."""
    kind = type(module)
    gemma = kind.__module__.startswith("transformers.models.gemma") and kind.__name__.endswith("ScaledWordEmbedding")
    return (kind is nn.Embedding or gemma) and module.max_norm is None
