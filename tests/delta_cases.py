"""Which gated delta net do the tests run, over which calls, and what are its tokens by the equations?"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.ops.delta import AT_END, AT_START, KEEP

WINDOW, LENGTH = 16, 40
SIZES = [2, 4, 12, 8]  # key heads, value heads, elements of both


class Net(NamedTuple):
    """The numbers of a net, as `ops.delta_rows` takes them."""

    taps: Tensor
    rate: Tensor
    shift: Tensor
    norm: Tensor
    eps: float
    bias: Tensor | None = None
    skip: Tensor | None = None
    normed: int | None = None  # None: elements of a head


def added_numbers(
    dtype: torch.dtype = torch.float32, sizes: list[int] = SIZES, taps: int = 4, normed: int = 16, device: str = "cpu"
) -> tuple[Tensor, None, Net]:
    """Of two rows all tokens, and a layer of Mamba-2."""
    torch.manual_seed(0)
    heads, values = sizes[1], sizes[1] * sizes[3]
    channels = 2 * sizes[0] * sizes[2] + values
    tokens = torch.randn(2, LENGTH, values + channels + heads)
    net = [torch.randn(taps, channels) / 2, -torch.rand(heads) - 0.1, torch.randn(heads), torch.rand(values) + 1]
    net, more = [part.to(device) for part in net], [torch.randn(channels) / 4, torch.randn(heads)]
    return tokens.to(device, dtype), None, Net(*net, 1e-6, *(part.to(device) for part in more), normed)


def added_exact(tokens: Tensor, net: Net, sizes: list[int] = SIZES) -> Tensor:
    """All tokens of a row of Mamba-2 in float64: a state, its step and what it says as in the paper, one by one."""
    keys, heads, dim, width = sizes
    tokens, count, values = tokens.double(), len(net.taps), heads * width
    gates, x, steps = tokens.split([values, net.taps.shape[1], heads], 1)
    x = F.pad(x, (0, 0, count - 1, 0))
    x = F.silu(sum(x[tap : tap + LENGTH] * net.taps[tap] for tap in range(count)) + net.bias)
    v, k, q = x.split([values, keys * dim, keys * dim], 1)
    v, k, q = v.unflatten(1, (heads, width)), k.unflatten(1, (keys, dim)), q.unflatten(1, (keys, dim))
    steps = F.softplus(steps + net.shift)
    out = torch.empty(LENGTH, heads, width, dtype=torch.float64)
    for head in range(heads):
        state, own = torch.zeros(width, dim, dtype=torch.float64), head // (heads // keys)
        for t in range(LENGTH):
            taken = steps[t, head] * torch.outer(v[t, head], k[t, own])
            state = torch.exp(net.rate[head] * steps[t, head]) * state + taken
            out[t, head] = state @ q[t, own] + net.skip[head] * v[t, head]
    out = (out.flatten(1) * F.silu(gates)).view(LENGTH, -1, net.normed)
    return (out / (out.square().mean(-1, keepdim=True) + net.eps).sqrt()).flatten(1) * net.norm


def numbers(
    dtype: torch.dtype = torch.float32, sizes: list[int] = SIZES, taps: int = 4, device: str = "cpu"
) -> tuple[Tensor, Tensor, Net]:
    """Of two rows all tokens, and the net."""
    torch.manual_seed(0)
    values = sizes[1] * sizes[3]
    channels = 2 * sizes[0] * sizes[2] + values
    qkvz, ba = torch.randn(2, LENGTH, channels + values), torch.randn(2, LENGTH, 2 * sizes[1])
    net = torch.randn(taps, channels) / 2, -torch.rand(sizes[1]) - 0.1, torch.randn(sizes[1]), torch.rand(sizes[3]) + 1
    return qkvz.to(device, dtype), ba.to(device, dtype), Net(*(part.to(device) for part in net), 1e-6)


def exact(qkvz: Tensor, ba: Tensor, net: Net) -> Tensor:
    """All tokens of a row in float64, S as in the paper: S (I - beta k k^T) decay + beta v k^T."""
    (keys, heads, dim, width), count = SIZES, len(net.taps)
    qkvz, ba, channels = qkvz.double(), ba.double(), net.taps.shape[1]
    x = F.pad(qkvz[:, :channels], (0, 0, count - 1, 0))
    x = F.silu(sum(x[tap : tap + LENGTH] * net.taps[tap] for tap in range(count)))
    q, k, v = x.split([keys * dim, keys * dim, heads * width], 1)
    q, k, v = q.unflatten(1, (keys, dim)), k.unflatten(1, (keys, dim)), v.unflatten(1, (heads, width))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta, decay = torch.sigmoid(ba[:, :heads]), torch.exp(net.rate * F.softplus(ba[:, heads:] + net.shift))
    out = torch.empty(LENGTH, heads, width, dtype=torch.float64)
    for head in range(heads):
        state, own = torch.zeros(width, dim, dtype=torch.float64), head // (heads // keys)
        for t in range(LENGTH):
            forget = torch.eye(dim) - beta[t, head] * torch.outer(k[t, own], k[t, own])
            state = decay[t, head] * state @ forget + beta[t, head] * torch.outer(v[t, head], k[t, own])
            out[t, head] = state @ (q[t, own] / dim**0.5)
    out = out / (out.square().mean(-1, keepdim=True) + net.eps).sqrt() * net.norm
    return (out * F.silu(qkvz[:, channels:].unflatten(1, (heads, width)))).flatten(1)


class Rows:
    """Two rows that are fed from any token that their states reach."""

    def __init__(self, qkvz: Tensor, ba: Tensor | None, net: Net, sizes: list[int] = SIZES, behind: int = 0):
        self.given, self.net, self.sizes, self.behind = (qkvz, ba), net, sizes, behind
        self.states = torch.zeros(2, *sizes[1:], device=qkvz.device)
        kept = net.taps.shape[1] + 2 * sizes[1]
        self.inputs = torch.zeros(2, WINDOW, kept, dtype=qkvz.dtype, device=qkvz.device)
        self.marks = torch.zeros(2, dtype=torch.int32, device=qkvz.device)

    def feed(self, starts: list[int], counts: list[int], settles: int) -> list[Tensor]:
        """What tokens starts[r] .. give."""
        device, width = self.marks.device, max(counts) + 1
        qkvz, ba = (None if all is None else torch.zeros(2, width, all.shape[2], dtype=all.dtype, device=device)
                    for all in self.given)  # fmt: skip
        for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for padded, all in zip((qkvz, ba), self.given, strict=True):
                if all is not None:
                    padded[r, :count] = all[r, start : start + count]
        first, given = (torch.tensor(one, dtype=torch.int32, device=device) for one in (starts, counts))
        kept = first, given, self.marks, self.states, self.inputs
        *net, bias, skip, normed = self.net
        added = bias, skip, normed or self.sizes[3]
        out = ops.delta_rows(qkvz, ba, *net, *kept, self.sizes, settles, self.behind, *added)
        assert not out[0, counts[0] :].any()
        assert not out[1, counts[1] :].any()
        if settles != KEEP:
            held = torch.where(first > 0, self.marks, 0)
            reached = torch.maximum(first + (given if settles == AT_END else 0) - self.behind, held)
            self.marks = torch.where(given > 0, reached, self.marks)
        return [line[:count] for line, count in zip(out, counts, strict=True)]


# (starts, counts, settles) of calls: a prompt, steps, checks of which less is kept, drafts, a row that rests.
CALLS = [
    ([0, 0], [20, 3], AT_END), ([20, 3], [1, 4], AT_START), ([21, 5], [5, 0], AT_START), ([24, 5], [1, 1], KEEP),
    ([25, 6], [2, 1], KEEP), ([24, 5], [4, 3], AT_START), ([24, 8], [3, 9], AT_START), ([27, 10], [13, 30], AT_END),
]  # fmt: skip
