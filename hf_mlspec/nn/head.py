"""What does an EAGLE-3 head compute from hidden states of its target and the tokens behind them?

EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3): hidden states of a few layers are joined and brought to the
head's width; beside the embedding of the next token they are what one decoder layer (rarely more) reads. What that
gives predicts the token after, over a vocabulary that may be smaller than the target's, and takes the place of the
hidden states where the head reads its own draft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from .head_nodes import Column, HeadNodes
from .linear import is_dense

RopeTables = Callable[[int], tuple[Tensor, Tensor]]  # positions -> cos, sin float32 [positions, rotary_dim / 2]


@dataclass(frozen=True)
class HeadShape:
    """Sizes and rules of a head.

    taps: the layers in front of which the target's hidden states, `target_hidden` wide, are taken (`Tap.layers`).
    vocab: tokens of the target. draft_vocab: those of them that the head drafts. norm_before_residual: the residual
    stream of the first layer begins behind the norm of the hidden states. norm_before_fc: the joined states are
    normed; fc_norm: each one of them is. norm_output: the draft goes on from what the last norm gives. head_norms:
    queries and keys are normed head by head (Qwen3).
    """

    hidden: int
    target_hidden: int
    taps: tuple[int, ...]
    vocab: int
    draft_vocab: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    head_norms: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class HeadNorm(nn.Module):
    """An RMS norm."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x.contiguous(), self.weight, self.eps)[0]


class HeadLayer(nn.Module):
    """A decoder layer; the first one reads embedding and hidden state side by side."""

    def __init__(self, shape: HeadShape, first: bool):
        super().__init__()
        self.shape, width = shape, shape.hidden
        self.hidden_norm = HeadNorm(width, shape.norm_eps) if first else None
        self.input_norm, self.mlp_norm = HeadNorm(width, shape.norm_eps), HeadNorm(width, shape.norm_eps)
        outputs, bias = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.attention_bias
        self.qkv = nn.Linear(width * (2 if first else 1), outputs, bias=bias)
        self.o = nn.Linear(shape.heads * shape.head_dim, width, bias=bias)
        self.q_norm, self.k_norm = (
            HeadNorm(shape.head_dim, shape.norm_eps) if shape.head_norms else None for _ in range(2)
        )
        self.gate_up = nn.Linear(width, 2 * shape.intermediate, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.intermediate, width, bias=shape.mlp_bias)

    def forward(self, embedded: Tensor | None, hidden: Tensor, lanes: tuple) -> Tensor:
        """embedded: of the first layer alone; both `[batch, tokens, hidden]`. lanes: keys, values, starts, tables, and
        of tokens that are nodes of trees their columns."""
        residual = hidden
        if self.hidden_norm is None:
            inputs = self.input_norm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self.shape.norm_before_residual else hidden
            inputs = torch.cat([self.input_norm(embedded), normed], dim=-1)
        hidden = residual + product(self.o, self._attend(product(self.qkv, inputs), lanes))
        gate, up = product(self.gate_up, self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + product(self.down, ops.silu_mul(gate.contiguous(), up.contiguous()))

    def _attend(self, qkv: Tensor, lanes: tuple) -> Tensor:
        keys, values, starts, cos, sin, *columns = lanes
        shape, scale = self.shape, self.shape.head_dim**-0.5
        if qkv.is_cuda:
            where = torch.tensor([starts, [qkv.shape[1]] * len(starts)], dtype=torch.int32).to(qkv.device)
            norms = [norm and norm.weight.float() for norm in (self.q_norm, self.k_norm)]
            q = ops.rope_write_rows(qkv, *norms, shape.norm_eps, cos, sin, *where, keys, values, shape.heads)
            return ops.ragged_attention_rows(q, keys, values, *where, scale, 0, 0.0).flatten(2)
        heads = qkv.unflatten(2, (-1, shape.head_dim)).split([shape.heads, shape.kv_heads, shape.kv_heads], dim=2)
        q, k, v = (one.contiguous() for one in heads)
        q, k = (one if norm is None else norm(one) for one, norm in ((q, self.q_norm), (k, self.k_norm)))
        if columns:
            return self._attend_nodes((q, k, v), lanes[:2], (cos, sin), *columns)
        q = ops.rope_write(q, k, v, cos, sin, starts, keys, values)
        return ops.ragged_attention(q, keys, values, starts, scale).flatten(2)

    def _attend_nodes(
        self, qkv: tuple, lanes: tuple, tables: tuple, nodes: HeadNodes, columns: list[Column], layer: int
    ) -> Tensor:
        """One column after the other, each behind the tokens of its own branches."""
        found, scale = [], self.shape.head_dim**-0.5
        for place, column in enumerate(columns):
            q, k, v = (one[:, place : place + 1].contiguous() for one in qkv)
            with nodes.at(column, layer, *lanes):
                q = ops.rope_write(q, k, v, *tables, column.starts, *lanes)
                found.append(ops.ragged_attention(q, *lanes, column.starts, scale))
        return torch.cat(found, dim=1).flatten(2)


class EagleHead(nn.Module):
    """A trained head, ready to draft for its target.

    rope: its rotary tables. embedding: the target's, or one of its own (then a part of the module). targets: int64
    `[draft_vocab]`, which of the target's tokens each of its own is, None: the same. name: what messages call it.
    """

    def __init__(self, shape: HeadShape, rope: RopeTables, targets: Tensor | None, name: str):
        super().__init__()
        self.shape, self.rope, self.name = shape, rope, name
        self.config = SimpleNamespace(name_or_path=name, _attn_implementation="")
        width, joined = shape.hidden, len(shape.taps) * shape.target_hidden
        self.input_norm = HeadNorm(joined, shape.norm_eps) if shape.norm_before_fc else None
        norms = [HeadNorm(shape.target_hidden, shape.norm_eps) for _ in shape.taps] if shape.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(joined, width, bias=False)
        self.layers = nn.ModuleList(HeadLayer(shape, first=i == 0) for i in range(shape.num_layers))
        self.norm = HeadNorm(width, shape.norm_eps)
        self.lm_head = nn.Linear(width, shape.draft_vocab, bias=False)
        self.embed_tokens: nn.Module | None = None
        self.register_buffer("targets", targets)
        self._shared: tuple[nn.Module, ...] = ()

    def share_embedding(self, table: nn.Module) -> None:
        """Read the target's embedding; it stays the target's."""
        self._shared = (table,)

    @property
    def embedding(self) -> nn.Module:
        """Its own, or the target's."""
        return self.embed_tokens if self.embed_tokens is not None else self._shared[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of its keys and values."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weights lie."""
        return self.norm.weight.device

    @property
    def sizes(self) -> HeadShape:
        """What its cache is made for (engines/rows.py)."""
        return self.shape

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        return self.shape.num_layers

    def join(self, states: Tensor) -> Tensor:
        """Hidden states of the target `[batch, tokens, taps, target_hidden]` -> `[batch, tokens, hidden]`."""
        states = states.to(self._computed_in)
        if self.fc_norm:
            normed = (norm(state) for norm, state in zip(self.fc_norm, states.unbind(2), strict=True))
            states = torch.stack(list(normed), dim=2)
        joined = states.flatten(2)
        return product(self.fc, joined if self.input_norm is None else self.input_norm(joined))

    def forward(
        self, tokens: Tensor, hidden: Tensor, kv: Tensor, starts: list[int], rope: tuple, *trees: object
    ) -> Tensor:
        """Each token beside the hidden state before it -> what predicts the token after, `[batch, tokens, hidden]`.

        tokens int64 `[batch, tokens]`, hidden of `join` or of an earlier call. kv `[layers, 2, batch, kv_heads, slots,
        head_dim]`: written from slot starts[r] of row r on. rope: tables for every slot. trees: where the tokens are
        nodes of trees, their `HeadNodes` and columns (head_nodes.py), on a CPU.
        """
        own, cos_sin = hidden.to(self._computed_in), rope
        embedded = self._embedded(tokens) if self.layers else None
        for index, layer in enumerate(self.layers):
            columns = (*trees, index) if trees else ()
            own = layer(embedded, own, (*kv[index].unbind(0), starts, *cos_sin, *columns))
        return self.norm(own) if self.shape.norm_output else own

    def logits(self, hidden: Tensor) -> Tensor:
        """`[batch, hidden]` of `forward` -> float32 `[batch, vocab]`, -inf for tokens that it does not draft."""
        found = self.own_logits(hidden)
        if self.targets is None:
            return found
        whole = found.new_full((len(found), self.shape.vocab), float("-inf"))
        return whole.index_copy_(1, self.targets, found)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """The same over its own tokens, float32 `[batch, draft_vocab]`."""
        return product(self.lm_head, hidden if self.shape.norm_output else self.norm(hidden)).float()

    @property
    def _computed_in(self) -> torch.dtype:
        """Float32 on a CPU, whose kernels multiply bfloat16 weights by it; elsewhere the weights' dtype."""
        return torch.float32 if self.device.type == "cpu" else self.dtype

    def _embedded(self, tokens: Tensor) -> Tensor:
        table = self.embedding
        if type(table) is nn.Embedding:
            tokens = tokens.clamp(0, table.num_embeddings - 1)
            return F.embedding(tokens, table.weight).to(self._computed_in)
        return table(tokens).to(self._computed_in)


def product(linear: nn.Module, x: Tensor) -> Tensor:
    """A dense linear by our kernels, whose bits do not depend on the rows beside; others as they compute."""
    if is_dense(linear) and x.dtype in (torch.float32, torch.bfloat16):
        if linear.weight.dtype == torch.bfloat16:
            return ops.bf16_linear(x, linear.weight, linear.bias)
        if linear.weight.dtype == torch.float32:
            return ops.f32_linear(x, linear.weight, linear.bias)
    return linear(x)
