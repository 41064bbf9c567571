"""In plain torch: do gates within products of experts, and a norm within routing, change nothing?"""

from __future__ import annotations

import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.formats import mxfp4
from hf_mlspec.ops.expert_plans import plan_of

EXPERTS = torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32)
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
WEIGHT = torch.randn(3, 128, 64, generator=torch.Generator().manual_seed(2)).bfloat16() / 8


def mxfp4_tiles() -> list[torch.Tensor]:
    tiles = [ops.prepack_mxfp4(*mxfp4.quantize(own.float())) for own in WEIGHT]
    return [torch.stack(parts) for parts in zip(*tiles, strict=True)]


@pytest.mark.parametrize("activation", [0, 1, 4])
def test_gate_before_up_is_gated_as_apart(activation):
    plan, bias = plan_of(EXPERTS, 3), torch.randn(3, 128)
    how = X, WEIGHT, bias, EXPERTS, plan
    found = ops.dense_expert_rows(*how, 0.0, 0.0, activation)
    assert torch.equal(found, ops.gated(ops.dense_expert_rows(*how), activation))
    how = X, *mxfp4_tiles(), bias, EXPERTS, plan, 128, 8
    apart = ops.gated(ops.mxfp4_expert_rows(*how), activation)
    assert torch.equal(ops.mxfp4_expert_rows(*how, 0.0, 0.0, activation), apart)


@pytest.mark.parametrize(("weight", "how", "message"), [
    (WEIGHT, (0.0, 0.0, 5), "activation is 5, choose -1 or one of"),
    (WEIGHT, (1.7, 7.0, 0), "activation is 0 for 128 outputs with limit 7.0: gate before up"),
    (WEIGHT[:, :127], (0.0, 0.0, 0), "activation is 0 for 127 outputs"),
])  # fmt: skip
def test_gates_that_cannot_be_are_named(weight, how, message):
    with pytest.raises(ValueError, match=f"dense_expert_rows: {message}"):
        ops.dense_expert_rows(X, weight.contiguous(), None, EXPERTS, plan_of(EXPERTS, 3), *how)


def test_a_row_is_normed_and_routed_at_once_as_apart():
    draw = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, 1, 64, generator=draw).bfloat16()
    weight, router = torch.randn(64, generator=draw), torch.randn(7, 64, generator=draw).bfloat16()
    for how in ((6, 2, 1, None, 1, 1, 1.0), (6, 2, 1, torch.zeros(6), 3, 2, 2.5)):
        normed, total, *routed = ops.norm_route_row(x, residual, weight, 1e-6, router, None, *how)
        expected = ops.rms_norm(x, weight, 1e-6, residual)
        assert torch.equal(normed, expected[0])
        assert torch.equal(total, expected[1])
        apart = ops.route_rows(normed, router, None, *how)
        assert all(torch.equal(one, other) for one, other in zip(routed, apart, strict=True))


def test_rows_that_are_not_one_are_named():
    with pytest.raises(ValueError, match=r"norm_route_row: x has shape \[3, 64\], expected \[1, hidden\]"):
        ops.norm_route_row(X, X, torch.ones(64), 1e-6, X, None, 3, 2, 1, None, 1, 1, 1.0)
