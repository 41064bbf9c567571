"""What does an outline say that a model computes? In float32, by plain torch: no decoder takes part.

Rows of tokens at given positions, without a cache. `probe.py` holds what this computes against a class's own modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nn.linear import is_dense, is_transposed
from ...ops import activated
from ...ops.compiled_decoder import ACTIVATIONS, Sizes
from .description import NORMS
from .parts import Block, Norm, Outline, UnknownArchitecture

_AT_ONCE = 16384  # outputs of a linear: a head in float32 may be larger than the model


def embedded(outline: Outline, ids: Tensor, positions: Tensor) -> Tensor:
    """What the first layer reads ``[rows, tokens, hidden]``; ids, positions int64 ``[rows, tokens]``."""
    found = outline.embedding[ids].float() * outline.sizes.embedding_scale
    return found if outline.positions is None else found + outline.positions[positions].float()


def layer_output(outline: Outline, index: int, x: Tensor, tables: list[tuple[Tensor, Tensor]]) -> Tensor:
    """x ``[rows, tokens, hidden]`` of layer `index` -> what it hands on. tables: cos and sin ``[rows, tokens, half]``
    of every kind of layer."""
    sizes, block = outline.sizes, outline.blocks[index]
    norms = dict(zip(NORMS, block.norms, strict=True))
    attended = _attention(sizes, block, norms, _normed(norms["attention"], x, sizes), tables[block.rope_table])
    attended = _normed(norms["attention_out"], attended, sizes)
    read = x if sizes.parallel else x + attended
    inner = _normed(norms["mlp_out"], _mlp(sizes, block.modules, _normed(norms["mlp"], read, sizes)), sizes)
    return x + attended + inner


def logits_of(outline: Outline, x: Tensor) -> Tensor:
    """What the last layer hands on ``[rows, tokens, hidden]`` -> logits."""
    logits = product(outline.head, _normed(outline.final_norm, x, outline.sizes))
    return _capped(logits, outline.sizes.logit_softcap)


def product(linear: nn.Module, x: Tensor) -> Tensor:
    """A dense linear of any dtype. UnknownArchitecture for another one."""
    if not (is_dense(linear) or is_transposed(linear)):
        raise UnknownArchitecture(f"a probe reads dense linears, and there is a {type(linear).__name__}")
    weight = linear.weight.detach()
    rows = weight.t() if is_transposed(linear) else weight
    found = torch.cat([x @ part.float().t() for part in rows.split(_AT_ONCE)], dim=-1)
    bias = getattr(linear, "bias", None)
    return found if bias is None else found + bias.detach().float()


def _normed(norm: Norm | None, x: Tensor, sizes: Sizes) -> Tensor:
    if norm is None:
        return x
    if sizes.norms_have_mean:
        return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, sizes.norm_eps)
    found = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + sizes.norm_eps) * norm.weight
    return found if norm.bias is None else found + norm.bias


def _capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap if cap else x


def _mlp(sizes: Sizes, modules: dict[str, nn.Module], x: Tensor) -> Tensor:
    if sizes.no_mlp:
        return torch.zeros_like(x)
    if sizes.plain_mlp:
        return product(modules["down"], activated(product(modules["up"], x), ACTIVATIONS[sizes.activation]))
    gate, up = (product(modules["gate_up"], x).chunk(2, dim=-1) if "gate_up" in modules
                else (product(modules["gate"], x), product(modules["up"], x)))
    return product(modules["down"], activated(gate, ACTIVATIONS[sizes.activation]) * up)


def _heads(sizes: Sizes, modules: dict[str, nn.Module], x: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[rows, tokens, heads, head_dim]``."""
    heads, kv, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    if "qkv_by_head" in modules:
        found = product(modules["qkv_by_head"], x).unflatten(-1, (kv, heads // kv + 2, dim))
        return found[..., :-2, :].flatten(2, 3), found[..., -2, :], found[..., -1, :]
    parts = (product(modules["qkv"], x).split([heads * dim, kv * dim, kv * dim], dim=-1) if "qkv" in modules
             else [product(modules[name], x) for name in "qkv"])
    return tuple(part.unflatten(-1, (-1, dim)) for part in parts)


def _attention(
    sizes: Sizes, block: Block, norms: dict[str, Norm | None], x: Tensor, table: tuple[Tensor, Tensor]
) -> Tensor:
    q, k, v = _heads(sizes, block.modules, x)
    q, k = (_normed_and_turned(sizes, norm, part, table) for norm, part in ((norms["q"], q), (norms["k"], k)))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(sizes.heads // sizes.kv_heads, dim=1) for part in (k, v))
    scores = _capped(q @ k.transpose(2, 3) * sizes.attention_scale, sizes.attention_softcap)
    behind = torch.arange(x.shape[1], device=x.device)
    behind = behind[:, None] - behind
    hidden = (behind < 0) | (behind >= block.window if block.window else behind < 0)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return product(block.modules["o"], (weights @ v).transpose(1, 2).flatten(2))


def _normed_and_turned(sizes: Sizes, norm: Norm | None, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Heads, normed one by one or all at once, as the norm has elements, and rotated."""
    if sizes.norms_behind_rotation:
        return _normed(norm, _turned(sizes, x, *table), sizes)
    if norm is not None and norm.weight.numel() != sizes.head_dim:
        return _turned(sizes, _normed(norm, x.flatten(2), sizes).view_as(x), *table)
    return _turned(sizes, _normed(norm, x, sizes), *table)


def _turned(sizes: Sizes, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first `rotary_dim` elements of every head, an element with its neighbour or with the one half a head on."""
    turned, rest = x[..., : sizes.rotary_dim], x[..., sizes.rotary_dim :]
    cos, sin = cos[:, :, None], sin[:, :, None]
    one, other = turned.unflatten(-1, (-1, 2)).unbind(-1) if sizes.rotates_pairs else turned.chunk(2, dim=-1)
    found = one * cos - other * sin, other * cos + one * sin
    turned = torch.stack(found, dim=-1).flatten(-2) if sizes.rotates_pairs else torch.cat(found, dim=-1)
    return torch.cat([turned, rest], dim=-1)
