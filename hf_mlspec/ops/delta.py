"""How do the tokens of rows go through a recurrent layer, behind states that lag behind them? And heads through gates.

Gated Delta Networks (arXiv 2412.06464), as Qwen3-Next and Qwen3.5 have them, and Mamba-2 (arXiv 2405.21060).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator import CACHE_FLOATS, Operands, operator

KEEP, AT_START, AT_END = range(3)  # mlspec_state_rule


def _check_kind(given: Operands, channels: int, values: int) -> bool:
    """-> whether it is Mamba-2; also of what shape qkvz is."""
    additive, (_, value_heads, _, value_dim) = given.skip is not None, given.sizes
    if additive == (given.ba is not None) or (given.bias is not None and not additive):
        raise ValueError(f"{given.op}: a gated delta net has ba, Mamba-2 skip and perhaps bias")
    whole = channels + values + (value_heads if additive else 0)
    if given.qkvz.ndim != 3 or given.qkvz.shape[2] != whole:
        raise ValueError(f"{given.op}: qkvz has shape {list(given.qkvz.shape)}, expected [batch, width, {whole}]")
    if given.normed < 1 or values % given.normed or not (additive or given.normed == value_dim):
        expected = f"a divisor of {values}" if additive else value_dim
        raise ValueError(f"{given.op}: normed is {given.normed}, expected {expected}")
    return additive


def _check_delta_rows(given: Operands) -> None:
    given.require_float("qkvz", CACHE_FLOATS)
    sizes = given.sizes
    if len(sizes) != 4 or min(sizes) < 1 or sizes[1] % sizes[0]:
        raise ValueError(
            f"{given.op}: sizes is {sizes}, expected key heads, value heads that they divide, and the elements of both"
        )
    key_heads, value_heads, key_dim, value_dim = sizes
    values = value_heads * value_dim
    channels, gates = 2 * key_heads * key_dim + values, 2 * value_heads
    additive = _check_kind(given, channels, values)
    batch, width, _ = given.qkvz.shape
    if given.taps.ndim != 2 or given.inputs.ndim != 3 or given.inputs.shape[1] < len(given.taps):
        raise ValueError(
            f"{given.op}: taps has shape {list(given.taps.shape)} and inputs {list(given.inputs.shape)}, expected "
            f"[taps, {channels}] and [{batch}, window, {channels + gates}] with a window of as many tokens as taps"
        )
    given.require_part("qkvz", given.qkvz.dtype, given.qkvz.shape)
    if additive:
        given.require_part("skip", torch.float32, (value_heads,))
        if given.bias is not None:
            given.require_part("bias", torch.float32, (channels,))
    else:
        given.require_part("ba", given.qkvz.dtype, (batch, width, gates))
    given.require_part("taps", torch.float32, (len(given.taps), channels))
    for name, count in (("rate", value_heads), ("shift", value_heads), ("norm", values if additive else value_dim)):
        given.require_part(name, torch.float32, (count,))
    for name in ("starts", "counts", "marks"):
        given.require_numbers(name, batch)
    given.require_part("states", torch.float32, (batch, value_heads, key_dim, value_dim))
    given.require_part("inputs", given.qkvz.dtype, (batch, given.inputs.shape[1], channels + gates))
    given.require_choice("settles", (KEEP, AT_START, AT_END))
    if not 0 <= given.behind <= given.inputs.shape[1]:
        raise ValueError(f"{given.op}: behind is {given.behind}, expected 0 to {given.inputs.shape[1]}")


@operator(_check_delta_rows, lambda given: given.qkvz.new_empty(
    (*given.qkvz.shape[:2], given.sizes[1] * given.sizes[3])
), writes=("states", "inputs"), composed_on_cpu=True)  # fmt: skip
def delta_rows(
    qkvz: Tensor, ba: Tensor | None, taps: Tensor, rate: Tensor, shift: Tensor, norm: Tensor, eps: float,
    starts: Tensor, counts: Tensor, marks: Tensor, states: Tensor, inputs: Tensor, sizes: list[int], settles: int,
    behind: int, bias: Tensor | None, skip: Tensor | None, normed: int,
) -> Tensor:  # fmt: skip
    """qkvz float32 or bfloat16 ``[batch, width, channels + values]``: queries, keys, values, gates; ba ``[batch,
    width, 2 value_heads]`` -> what heads give, normed and gated, ``[batch, width, values]``, zeros for padding.

    Token t of row r is its token starts[r] + t, padding from counts[r] on. states float32 ``[batch, value_heads,
    key_dim, value_dim]``: of each row that behind its first marks[r] tokens, at most starts[r] of them; nobody reads
    one of 0 tokens. inputs ``[batch, window, channels + 2 value_heads]``: of token p in place p % window; those from
    marks[r] - taps + 1 on are there, and the tokens up to starts[r] run again. Where starts[r] is 0, marks[r] counts
    as 0. A row without such a state gives NaN. settles: whether the state stays (KEEP), becomes that behind starts[r]
    tokens (AT_START) or behind all (AT_END), or that of `behind` tokens fewer, unless it is of more already; the
    caller sets marks for it.

    taps float32 ``[taps, channels]``, of the oldest token first; rate, shift ``[value_heads]``, norm ``[value_dim]``
    as of a `DeltaNet`; sizes: key heads, value heads, elements of both; normed: value_dim. On a GPU qkvz is bfloat16.

    With skip ``[value_heads]`` it is Mamba-2: qkvz ``[batch, width, values + channels + value_heads]`` has gates, then
    values, keys (B) and queries (C), then time steps, and there is no ba; norm is ``[values]``, behind the gates, over
    ``normed`` elements each; bias ``[channels]`` of the convolution, or none.
    """
    if skip is not None:
        parts = [values := sizes[1] * sizes[3], values, sizes[0] * sizes[2], sizes[0] * sizes[2], sizes[1]]
        gates, v, k, q, ba = qkvz.split(parts, dim=2)
        qkvz = torch.cat([v, k, q, gates], dim=2)
    out = qkvz.new_zeros((*qkvz.shape[:2], sizes[1] * sizes[3]))
    for row, (start, count, mark) in enumerate(zip(starts.tolist(), counts.tolist(), marks.tolist(), strict=True)):
        count, mark = min(count, qkvz.shape[1]), mark if start else 0
        if count > 0:
            net = taps, rate, shift, norm, eps, sizes, bias, skip, normed
            own = states[row], inputs[row]
            settled = (None, start, start + count)[settles]
            settled = None if settled is None else settled - behind
            _delta_row(qkvz[row, :count], ba[row, :count], net, start, mark, own, settled, out[row])
    return out


def _delta_row(
    qkvz: Tensor, ba: Tensor, net: tuple, start: int, mark: int, own: tuple[Tensor, Tensor], settled: int | None,
    out: Tensor,
) -> None:  # fmt: skip
    """One row, token by token: torch's functions give the same bits for the same shape. settled: of how many tokens
    the state is kept."""
    (taps, rate, shift, norm, eps, sizes, bias, skip, normed), (state, inputs) = net, own
    channels, window, kept = taps.shape[1], len(inputs), taps.shape[1] + ba.shape[1]
    reached = 0 <= mark <= start and (not start or start - mark + len(taps) - 1 <= window)
    mark = mark if reached else start
    current = torch.zeros_like(state) if mark == 0 else state.clone()
    current = current if reached else torch.full_like(state, torch.nan)

    def token_at(p: int) -> Tensor:
        one = torch.cat([qkvz[p - start, :channels], ba[p - start]]) if p >= start else inputs[p % window, :kept]
        return one.float()

    for p in range(mark, start + len(qkvz)):
        if p == settled and mark < p:
            state.copy_(current)
        own_taps = [token_at(p - len(taps) + 1 + tap)[:channels] * taps[tap] for tap in range(len(taps))
                    if p - len(taps) + 1 + tap >= 0]  # fmt: skip
        x = torch.stack(own_taps if bias is None else [bias, *own_taps]).sum(0)
        step = _step if skip is None else _added_step
        current, said = step(current, x * torch.sigmoid(x), token_at(p)[channels:], rate, shift, sizes)
        if p >= start:
            gates = F.silu(qkvz[p - start, channels:].float()).view_as(said)
            if skip is None:
                own = said * torch.rsqrt(said.square().mean(-1, keepdim=True) + eps) * norm
                out[p - start] = (own * gates).flatten()
                continue
            values = x[: said.numel()]
            own = ((said + (values * torch.sigmoid(values)).view_as(said) * skip[:, None]) * gates).view(-1, normed)
            out[p - start] = (own * torch.rsqrt(own.square().mean(-1, keepdim=True) + eps)).flatten() * norm
    if settled == start + len(qkvz):
        state.copy_(current)
    for p in range(max(start, start + len(qkvz) - window), start + len(qkvz)):
        inputs[p % window, :kept] = torch.cat([qkvz[p - start, :channels], ba[p - start]])


def _added_step(
    state: Tensor, x: Tensor, steps: Tensor, rate: Tensor, shift: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """The same of Mamba-2, whose state takes values as they are."""
    key_heads, value_heads, key_dim, value_dim = sizes
    v, k, q = x.split([value_heads * value_dim, key_heads * key_dim, key_heads * key_dim])
    each = value_heads // key_heads
    q, k = (part.view(key_heads, key_dim).repeat_interleave(each, dim=0)[:, :, None] for part in (q, k))
    steps = F.softplus(steps + shift)
    decay, taken = torch.exp(rate * steps)[:, None, None], v.view(value_heads, 1, value_dim) * steps[:, None, None]
    state = state * decay + k * taken
    return state, (state * q).sum(1)


def _step(
    state: Tensor, x: Tensor, ba: Tensor, rate: Tensor, shift: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """The state behind one more token, x its channels, and what its heads give ``[value_heads, value_dim]``."""
    key_heads, value_heads, key_dim, value_dim = sizes
    q, k, v = x.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim])
    each = value_heads // key_heads
    q, k = (part.view(key_heads, key_dim) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(each, dim=0)[:, :, None] for part in (q / key_dim**0.5, k))
    b, a = ba.split(value_heads)
    decay = torch.exp(rate * F.softplus(a + shift))[:, None, None]
    state = state * decay
    change = (v.view(value_heads, 1, value_dim) - (state * k).sum(1, keepdim=True)) * torch.sigmoid(b)[:, None, None]
    state = state + k * change
    return state, (state * q).sum(1)


def _check_sigmoid_gated(given: Operands) -> None:
    given.require_float("x", CACHE_FLOATS)
    if given.x.ndim != 2:
        raise ValueError(f"{given.op}: x has shape {list(given.x.shape)}, expected [n, width]")
    given.require_same("gates", "x")


@operator(_check_sigmoid_gated, lambda given: given.x.new_empty(given.x.shape), composed_on_cpu=True)
def sigmoid_gated(x: Tensor, gates: Tensor) -> Tensor:
    """x, gates float32 or bfloat16 ``[n, width]`` -> ``x * sigmoid(gates)``, rounded once. On a GPU x is bfloat16.
    Here in float64, as `gated`."""
    return (x.double() * torch.sigmoid(gates.double())).float().to(x.dtype)
