"""Do low-rank pairs beside a linear add what their products give, and is what does not fit them refused by name?"""

from __future__ import annotations

import cases
import pytest
import torch

from hf_mlspec import ops


def pairs() -> tuple[torch.Tensor, ...]:
    """Columns of the first linear have a pair of rank 2, those of the second none, of the third one of rank 1."""
    x, down, up = cases.seeded(3, 8), cases.seeded(3, 8), cases.seeded(2, 6)
    up[:, 2:4], up[1, 4:] = 0, 0
    return x, down, up, torch.tensor([0, 0, 0, 0, 2, 2], dtype=torch.int32)


def test_low_rank_pairs_beside_a_linear():
    y, (x, down, up, first) = cases.seeded(3, 6), pairs()
    inner = x.double() @ down.double().T
    exact = y.double()
    exact[:, :2] += inner[:, :2] @ up[:, :2].double()
    exact[:, 4:] += inner[:, 2:] * up[0, 4:].double()
    between = ops.low_rank_between(x, down)
    torch.testing.assert_close(between.double(), inner, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ops.low_rank_added(y, between, up, first).double(), exact, atol=1e-6, rtol=1e-6)


def test_beside_a_bfloat16_weight_they_have_the_bits_of_both_steps():
    x, down, up, first = pairs()
    x, weight, bias = x.bfloat16(), cases.seeded(6, 8).bfloat16(), cases.seeded(6)
    between = ops.low_rank_between(x, down)
    both = ops.low_rank_added(ops.bf16_linear(x, weight, bias), between, up, first)
    assert torch.equal(ops.adapted_linear(x, weight, bias, between, up, first), both)
    assert ops.adapted_linear(x[:0], weight, None, between[:0], up, first).shape == (0, 6)


def test_what_does_not_fit_is_refused_by_name():
    y, (x, down, up, first) = cases.seeded(3, 6), pairs()
    between, weight = ops.low_rank_between(x, down), cases.seeded(6, 8).bfloat16()
    for op, wrong, words in (
        (ops.low_rank_between, (x.double(), down), "x is torch.float64"),
        (ops.low_rank_between, (x, down.double()), "down is torch.float64"),
        (ops.low_rank_added, (y, between.double(), up, first), "between is torch.float64"),
        (ops.low_rank_added, (y, between, up.long(), first), "up is torch.int64"),
        (ops.low_rank_added, (y, between, up, first.long()), "first is torch.int64"),
        (ops.adapted_linear, (x, weight, None, between, up, first), "x is torch.float32"),
        (ops.adapted_linear, (x.bfloat16(), weight.float(), None, between, up, first), "weight is torch.float32"),
    ):
        with pytest.raises(TypeError, match=words):
            op(*wrong)
    for op, wrong, words in (
        (ops.low_rank_between, (x[:, :4], down), r"x has shape \[3, 4\], expected \[3, 8\]"),
        (ops.low_rank_between, (x, down[0]), r"down has shape \[8\], expected \[ranks, in\]"),
        (ops.low_rank_added, (y[0], between, up, first), r"y has shape \[6\], expected \[n, out\]"),
        (ops.low_rank_added, (y, between[:2], up, first), r"between has shape \[2, 3\], expected \[3, 3\]"),
        (ops.low_rank_added, (y, between[:, :0], up, first), r"between has shape \[3, 0\], expected \[n, ranks\]"),
        (ops.low_rank_added, (y, between, up[:0], first), r"up has shape \[0, 6\], expected \[rank, out\]"),
        (ops.low_rank_added, (y, between, up[:, :4], first), r"up has shape \[2, 4\], expected \[2, 6\]"),
        (ops.low_rank_added, (y, between, up, first[:4]), r"first has shape \[4\], expected \[6\]"),
        (ops.adapted_linear, (x[0].bfloat16(), weight, None, between, up, first), r"x has shape \[8\], expected"),
        (ops.adapted_linear, (x.bfloat16(), weight, y[0, :4], between, up, first), r"bias has shape \[4\]"),
    ):
        with pytest.raises(ValueError, match=words):
            op(*wrong)
