"""Which operators does a step of a whole model on a device need? Their rows' lengths are device tensors.

In all of them int32 ``starts`` and ``counts`` ``[batch]`` say where a row stands: token t of row r has position and
cache slot ``starts[r] + t`` and is real where ``t < counts[r]``; the others are padding. For padding nothing is
written, and its results are zeros. As lengths are read on the device, these ops only enqueue and can be captured; what
would be an error on the CPU (a real token behind the last slot or position) is padding there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands_step

# As in schema.py. "float" below: float32 or bfloat16; CUDA kernels take bfloat16 alone.
SCHEMAS: dict[str, str] = {
    # ids int32 [n]; table float [vocab, hidden] -> [n, hidden], times scale unless that is 1.
    "embed_rows": "(Tensor ids, Tensor table, float scale) -> Tensor",
    # gate_up float [n, 2 I], gate first; activation of operands_step.ACTIVATIONS -> act(gate) * up [n, I].
    "gated": "(Tensor gate_up, int activation) -> Tensor",
    # qkv float [batch, width, (heads + 2 kv_heads) * dim]; q_norm, k_norm float32 [dim]; cos, sin float32 [positions,
    # rotary / 2]; keys, values float [batch, kv_heads, slots, dim] -> rotated q [batch, width, heads, dim].
    "rope_write_rows": (
        "(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, Tensor cos, Tensor sin, Tensor starts, Tensor counts,"
        " Tensor(a!) keys, Tensor(b!) values, int heads) -> Tensor"
    ),
    # q float [batch, width, heads, dim] -> [batch, width, heads, dim].
    "ragged_attention_rows": (
        "(Tensor q, Tensor keys, Tensor values, Tensor starts, Tensor counts, float scale, int window, float softcap)"
        " -> Tensor"
    ),
    # logits float [n, vocab]; seed int64 [1], streams and positions int32 [n], or none of them -> tokens int32 [n],
    # confidence float32 [n].
    "choose_rows": (
        "(Tensor logits, float softcap, Tensor? seed, Tensor? streams, Tensor? positions) -> (Tensor, Tensor)"
    ),
}


def fake_embed_rows(ids: Tensor, table: Tensor, scale: float) -> Tensor:
    operands_step.check_embed_rows(ids, table, scale)
    return table.new_empty((len(ids), table.shape[1]))


def fake_gated(gate_up: Tensor, activation: int) -> Tensor:
    operands_step.check_gated(gate_up, activation)
    return gate_up.new_empty((len(gate_up), gate_up.shape[1] // 2))


def fake_rope_write_rows(
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
    operands_step.check_rope_write_rows(qkv, q_norm, k_norm, eps, cos, sin, starts, counts, keys, values, heads)
    return qkv.new_empty((*qkv.shape[:2], heads, keys.shape[3]))


def fake_ragged_attention_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    counts: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    operands_step.check_ragged_attention_rows(q, keys, values, starts, counts, scale, window, softcap)
    return q.new_empty(q.shape)


def fake_choose_rows(
    logits: Tensor, softcap: float, seed: Tensor | None, streams: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    operands_step.check_choose_rows(logits, softcap, seed, streams, positions)
    count = logits.shape[:1]
    return logits.new_empty(count, dtype=torch.int32), logits.new_empty(count, dtype=torch.float32)
