"""How does Python build and call the compiled decoder? One object per model, one call per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .library import KernelError, why_not_compiled
from .operands_step import ACTIVATIONS

BF16, F32, MXFP4, INT4 = range(4)  # mlspec::WeightFormat
MAX_HEAD_DIM = 512  # mlspec::kMaxHeadDim


@dataclass(frozen=True)
class Weight:
    """A linear layer as the compiled decoder reads it; the tensors stay where they are.

    format: BF16 or F32 (weight ``[out, in]``), MXFP4 or INT4 (tiles of ``ops.prepack_*``). bias: float32 ``[out]``.
    activation_bits: 16, 8 or 4, for the 4-bit formats.
    """

    format: int
    weight: Tensor
    in_features: int
    out_features: int
    scale: Tensor | None = None
    zero: Tensor | None = None
    bias: Tensor | None = None
    group_size: int = 0
    activation_bits: int = 16


@dataclass(frozen=True)
class Sizes:
    """Sizes and numbers of a decoder; `activation` is a key of ACTIVATIONS, soft caps are 0 where there are none."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    embeddings: int
    rotary_dim: int
    activation: str
    norm_eps: float
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0


def has_compiled_decoder() -> bool:
    """Whether the compiled library is loaded and holds the decoder."""
    return why_not_compiled() is None and _class() is not None


def compiled_decoder(sizes: Sizes, kv_dtype: torch.dtype, embedding: Tensor, final_norm: Tensor):
    """A decoder without layers; see kernels_ext/bindings_decoder.cpp. KernelError without the compiled library."""
    if not has_compiled_decoder():
        raise KernelError(f"no compiled decoder: {why_not_compiled()}")
    dims = [sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate, sizes.vocab]
    dims += [sizes.embeddings, sizes.rotary_dim, ACTIVATIONS[sizes.activation], int(kv_dtype == torch.bfloat16)]
    numbers = [sizes.norm_eps, sizes.embedding_scale, sizes.attention_scale]
    numbers += [sizes.attention_softcap, sizes.logit_softcap]
    return _class()(dims, numbers, embedding.detach(), final_norm)


def set_linear(decoder, name: str, weight: Weight) -> None:
    """Give the newest layer its linear `name` (q, k, v, o, gate, up, down), or the decoder its head."""
    decoder.set_linear(
        name,
        weight.format,
        weight.in_features,
        weight.out_features,
        weight.weight,
        weight.scale,
        weight.zero,
        weight.bias,
        weight.group_size,
        weight.activation_bits,
    )


def _class():
    try:
        return torch.classes.mlspec.Decoder
    except RuntimeError:  # a library of an earlier version
        return None
