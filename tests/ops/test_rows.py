"""Do the ops over rows and over the ragged cache compute what their references do, each token for itself?"""

import cases
import pytest
import torch

from hf_mlspec import ops
from hf_mlspec.ops import library

needs_kernel = pytest.mark.skipif(
    library.kernel_of("rms_norm", "cpu") == "reference", reason="the compiled library is not built"
)


def test_quantize_rows():
    cases.check_quantize_rows()


@needs_kernel
@pytest.mark.parametrize(
    "check", [cases.check_rms_norm, cases.check_silu_mul, cases.check_rope_write, cases.check_ragged_attention]
)
def test_against_the_reference(check):
    check()


def test_gaps_between_lanes_stay_as_they_are():
    """A cache cut out of a larger tensor: nothing beyond its lanes is written."""
    q, k, v, cos, sin, starts, keys, values = cases.cache_operands(torch.float32, torch.bfloat16)
    whole = torch.full((3, 4, 3, 150, 40), 7.0, dtype=torch.bfloat16)
    lanes = whole[:, 1, :2], whole[:, 2, 1:]
    lanes[0].copy_(keys), lanes[1].copy_(values)
    rotated = ops.rope_write(q, k, v, cos, sin, starts, *lanes)
    assert torch.equal(rotated, ops.rope_write(q, k, v, cos, sin, starts, keys, values))
    assert torch.equal(lanes[0], keys)
    assert torch.equal(lanes[1], values)
    assert whole[:, [0, 3]].eq(7).all()
    assert whole[:, 1, 2].eq(7).all()
    assert whole[:, 2, 0].eq(7).all()
    y = ops.ragged_attention(q, keys, values, starts, 0.2)
    assert torch.equal(ops.ragged_attention(q, *lanes, starts, 0.2), y)


@needs_kernel
def test_slots_after_a_token_are_never_looked_at():
    q, starts, keys, values = (cases.cache_operands(torch.float32, torch.float32)[i] for i in (0, 5, 6, 7))
    y = ops.ragged_attention(q, keys, values, starts, 0.2)
    for row, start in enumerate(starts):
        keys[row, :, start + q.shape[1] :] = torch.nan
        values[row, :, start + q.shape[1] :] = torch.nan
    assert torch.equal(ops.ragged_attention(q, keys, values, starts, 0.2), y)


def test_no_tokens():
    x = torch.zeros(0, 64)
    assert [t.shape for t in ops.rms_norm(x, torch.ones(64), 1e-5, x)] == [(0, 64), (0, 64)]
    assert ops.silu_mul(x, x).shape == (0, 64)
    assert [t.shape for t in ops.quantize_rows(x, 32)] == [(0, 64), (0, 2)]
    q, k, v, cos, sin, starts, keys, values = cases.cache_operands(torch.float32, torch.float32)
    before = keys.clone()
    assert ops.rope_write(q[:, :0], k[:, :0], v[:, :0], cos, sin, starts, keys, values).shape == (3, 0, 6, 40)
    assert torch.equal(keys, before)
    assert ops.ragged_attention(q[:, :0], keys, values, starts, 1.0).shape == (3, 0, 6, 40)


def test_without_a_residual_the_sum_is_x_itself():
    x = cases.seeded(2, 8)
    assert ops.rms_norm(x, torch.ones(8), 1e-5)[1] is x
