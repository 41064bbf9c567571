"""Are gated delta nets of rows what their equations say, behind states that lag, and is what does not fit refused?"""

from __future__ import annotations

import pytest
import torch
from delta_cases import CALLS, LENGTH, SIZES, Rows, added_exact, added_numbers, exact, numbers

from hf_mlspec import ops
from hf_mlspec.ops.delta import AT_END, AT_START, KEEP


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_those_of_the_equations_whatever_was_taken_back(dtype, behind):
    qkvz, ba, net = numbers(dtype)
    rows, whole = Rows(qkvz, ba, net, behind=behind), Rows(qkvz, ba, net).feed([0, 0], [LENGTH] * 2, AT_END)
    for r in range(2):
        wanted = exact(qkvz[r], ba[r], net)
        assert float((whole[r] - wanted).norm() / wanted.norm()) < (1e-5 if dtype == torch.float32 else 4e-3)
    for starts, counts, settles in CALLS:
        for r, found in enumerate(rows.feed(starts, counts, settles)):
            assert torch.equal(found, whole[r][starts[r] : starts[r] + counts[r]])


@pytest.mark.parametrize("normed", [4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_mamba_are_those_of_the_equations_whatever_was_taken_back(dtype, normed):
    tokens, _, net = added_numbers(dtype, normed=normed)
    rows, whole = Rows(tokens, None, net), Rows(tokens, None, net).feed([0, 0], [LENGTH] * 2, AT_END)
    for r in range(2):
        wanted = added_exact(tokens[r], net)
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
    given = [qkvz, ba, *net[:5], kept, kept, kept, rows.states, rows.inputs, SIZES, KEEP, 0, None, None, SIZES[3]]
    for place, wrong, said in (
        (0, qkvz[:, :, 1:], "qkvz has shape"), (1, ba[:, :, 1:], "ba has shape"), (12, [2, 3, 12, 8], "sizes is"),
        (11, rows.inputs[:, :2], "window of as many tokens as taps"), (10, rows.states[:1], "states has shape"),
        (13, 3, "settles is 3, choose one of"), (7, kept[:1], "starts has shape"), (14, 17, "behind is 17"),
        (1, None, "a gated delta net has ba"), (16, net.rate, "a gated delta net has ba"), (17, 4, "normed is 4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            ops.delta_rows(*given[:place], wrong, *given[place + 1 :])


def test_gates():
    x, gates = torch.randn(3, 7), torch.randn(3, 9)[:, 2:]
    assert torch.equal(ops.sigmoid_gated(x, gates), (x.double() * torch.sigmoid(gates.double())).float())
    with pytest.raises(ValueError, match="gates has shape"):
        ops.sigmoid_gated(x, gates[:2])
