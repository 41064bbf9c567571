"""Are gated delta nets of rows what their equations say, behind states that lag, and is what does not fit refused?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.ops.delta import AT_END, AT_START, KEEP

SIZES, TAPS, WINDOW, LENGTH = [2, 4, 12, 8], 4, 16, 40
CHANNELS, VALUES = 2 * 2 * 12 + 4 * 8, 4 * 8


def numbers(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, tuple]:
    """Of two rows all tokens, and the net."""
    torch.manual_seed(0)
    qkvz, ba = torch.randn(2, LENGTH, CHANNELS + VALUES), torch.randn(2, LENGTH, 8)
    net = torch.randn(TAPS, CHANNELS) / 2, -torch.rand(4) - 0.1, torch.randn(4), torch.rand(8) + 0.5, 1e-6
    return qkvz.to(dtype), ba.to(dtype), net


def exact(qkvz: Tensor, ba: Tensor, net: tuple) -> Tensor:
    """All tokens of a row in float64, S as in the paper: S (I - beta k k^T) decay + beta v k^T."""
    qkvz, ba, (taps, rate, shift, norm, eps) = qkvz.double(), ba.double(), net
    x = F.pad(qkvz[:, :CHANNELS], (0, 0, TAPS - 1, 0))
    x = F.silu(sum(x[tap : tap + LENGTH] * taps[tap] for tap in range(TAPS)))
    q, k, v = (part.unflatten(1, shape) for part, shape in zip(x.split([24, 24, 32], 1), [(2, 12), (2, 12), (4, 8)],
                                                                strict=True))  # fmt: skip
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta, decay = torch.sigmoid(ba[:, :4]), torch.exp(rate * F.softplus(ba[:, 4:] + shift))
    out = torch.empty(LENGTH, 4, 8, dtype=torch.float64)
    for head in range(4):
        state = torch.zeros(8, 12, dtype=torch.float64)
        for t in range(LENGTH):
            key = k[t, head // 2]
            forget = torch.eye(12) - beta[t, head] * torch.outer(key, key)
            state = decay[t, head] * state @ forget + beta[t, head] * torch.outer(v[t, head], key)
            out[t, head] = state @ (q[t, head // 2] / 12**0.5)
    out = out / (out.square().mean(-1, keepdim=True) + eps).sqrt() * norm
    return (out * F.silu(qkvz[:, CHANNELS:].unflatten(1, (4, 8)))).flatten(1)


class Rows:
    """Two rows that are fed from any token that their states reach."""

    def __init__(self, qkvz: Tensor, ba: Tensor, net: tuple):
        self.given, self.net = (qkvz, ba), net
        self.states = torch.zeros(2, 4, 12, 8, device=qkvz.device)
        self.inputs = torch.zeros(2, WINDOW, CHANNELS + 8, dtype=qkvz.dtype, device=qkvz.device)
        self.marks = torch.zeros(2, dtype=torch.int32, device=qkvz.device)

    def feed(self, starts: list[int], counts: list[int], settles: int) -> list[Tensor]:
        """What tokens starts[r] .. give."""
        device, width = self.marks.device, max(counts) + 1
        qkvz, ba = (torch.zeros(2, width, all.shape[2], dtype=all.dtype, device=device) for all in self.given)
        for r, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for padded, all in zip((qkvz, ba), self.given, strict=True):
                padded[r, :count] = all[r, start : start + count]
        first, given = (torch.tensor(one, dtype=torch.int32, device=device) for one in (starts, counts))
        kept = first, given, self.marks, self.states, self.inputs
        out = ops.delta_rows(qkvz, ba, *self.net, *kept, SIZES, settles)
        assert not out[0, counts[0] :].any()
        assert not out[1, counts[1] :].any()
        if settles != KEEP:
            self.marks = torch.where(given > 0, first + (given if settles == AT_END else 0), self.marks)
        return [line[:count] for line, count in zip(out, counts, strict=True)]


# (starts, counts, settles) of calls: a prompt, steps, checks of which less is kept, drafts, a row that rests.
CALLS = [
    ([0, 0], [20, 3], AT_END), ([20, 3], [1, 4], AT_START), ([21, 5], [5, 0], AT_START), ([24, 5], [1, 1], KEEP),
    ([25, 6], [2, 1], KEEP), ([24, 5], [4, 3], AT_START), ([24, 8], [3, 9], AT_START), ([27, 10], [13, 30], AT_END),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_those_of_the_equations_whatever_was_taken_back(dtype):
    qkvz, ba, net = numbers(dtype)
    rows, whole = Rows(qkvz, ba, net), Rows(qkvz, ba, net).feed([0, 0], [LENGTH] * 2, AT_END)
    for r in range(2):
        wanted = exact(qkvz[r], ba[r], net)
        assert float((whole[r] - wanted).norm() / wanted.norm()) < (1e-5 if dtype == torch.float32 else 4e-3)
    for starts, counts, settles in CALLS:
        for r, found in enumerate(rows.feed(starts, counts, settles)):
            assert torch.equal(found, whole[r][starts[r] : starts[r] + counts[r]])


def test_a_row_without_its_state_is_not_a_number_and_one_that_begins_anew_is():
    rows = Rows(*numbers())
    first = rows.feed([0, 0], [20, 10], AT_END)
    lost, found = rows.feed([19, 10], [1, 1], KEEP)
    assert lost.isnan().all()
    assert not found.isnan().any()
    assert rows.feed([37, 10], [1, 1], KEEP)[0].isnan().all()  # the inputs of some in between are no more
    assert torch.equal(rows.feed([0, 10], [5, 1], AT_START)[0], first[0][:5])


def test_what_does_not_fit_is_named():
    qkvz, ba, net = numbers()
    rows, kept = Rows(qkvz, ba, net), torch.zeros(2, dtype=torch.int32)
    given = [qkvz, ba, *net, kept, kept, kept, rows.states, rows.inputs, SIZES, KEEP]
    for place, wrong, said in (
        (0, qkvz[:, :, 1:], "qkvz has shape"), (1, ba[:, :, 1:], "ba has shape"), (12, [2, 3, 12, 8], "sizes is"),
        (11, rows.inputs[:, :2], "window of as many tokens as taps"), (10, rows.states[:1], "states has shape"),
        (13, 3, "settles is 3, choose one of"), (7, kept[:1], "starts has shape"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            ops.delta_rows(*given[:place], wrong, *given[place + 1 :])


def test_gates():
    x, gates = torch.randn(3, 7), torch.randn(3, 9)[:, 2:]
    assert torch.equal(ops.sigmoid_gated(x, gates), (x.double() * torch.sigmoid(gates.double())).float())
    with pytest.raises(ValueError, match="gates has shape"):
        ops.sigmoid_gated(x, gates[:2])
