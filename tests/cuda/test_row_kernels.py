"""Do the kernels over rows on a GPU compute what the references do, each row for itself?"""

from __future__ import annotations

import pytest
import torch
from linear_cases import DEVICE, check_captured_products, poison
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.ops.operator import REFERENCES

BF16_STEP = 2.0**-8


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def close(ours: Tensor, exact: Tensor, floor: float = 1e-5) -> None:
    """Within one rounding to bfloat16 and a little of float32."""
    error = (ours.double().cpu() - exact.double().cpu()).abs()
    bound = 1.01 * BF16_STEP * exact.double().cpu().abs() + floor
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 8, 40, 100, 1001, 2048, 4096, 5120, 8192, 16384, 16392, 20000])
def test_rms_norm(width, weight_dtype):
    x, residual = seeded(5, width), seeded(5, width, seed=1)
    weight = (1 + seeded(width, seed=2).float() / 4).to(weight_dtype)
    for other in (None, residual):
        poison((5, width), (5, width))
        normed, total = ops.rms_norm(x, weight, 1e-5, other)
        assert torch.equal(total, x if other is None else (x.float() + other.float()).bfloat16())
        wide = total.double()
        close(normed, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double())
        for r in range(5):
            one = slice(r, r + 1)
            alone = ops.rms_norm(x[one], weight, 1e-5, None if other is None else other[one])
            assert torch.equal(alone[0], normed[one])
        order = torch.randperm(width, generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
        poison((5, width), (5, width))
        ordered, same = ops.rms_norm_in_order(x, weight, 1e-5, other, order)
        assert torch.equal(ordered, normed[:, order.long()])
        assert torch.equal(same, total)


def test_rms_norm_takes_rows_as_they_lie():
    x, weight = seeded(4, 6, 64), torch.ones(64, device=DEVICE)
    dense = ops.rms_norm(x, weight, 1e-5)[0]
    assert torch.equal(ops.rms_norm(x.transpose(0, 1), weight, 1e-5)[0], dense.transpose(0, 1))
    shifted = torch.empty(4 * 6 * 64 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(4, 6, 64)
    assert torch.equal(ops.rms_norm(shifted.copy_(x), weight, 1e-5)[0], dense)


@pytest.mark.parametrize("activation", [0, 1, 2, 3])
@pytest.mark.parametrize(("n", "width"), [(1, 8), (3, 7), (2, 513), (5, 14336), (70, 64)])
def test_gated(n, width, activation):
    gate_up = seeded(n, 2 * width) * 4
    gate_up[0, 0] = -200
    poison((n, width))
    y = ops.gated(gate_up, activation)
    close(y, REFERENCES["gated"](gate_up.cpu().float(), activation), floor=1e-4)
    assert torch.equal(ops.gated(gate_up[n - 1 :], activation), y[n - 1 :])
    order = torch.randperm(width, generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    poison((n, width))
    assert torch.equal(ops.gated_in_order(gate_up, activation, order), y[:, order.long()])
    if activation == 0:
        assert torch.equal(ops.silu_mul(*(t.contiguous() for t in gate_up.chunk(2, dim=1))), y)


@pytest.mark.parametrize("n", [1, 5, 300])
@pytest.mark.parametrize("width", [1, 8, 1001, 4096, 14336])
def test_ordered_rows(n, width):
    x, order = seeded(n, width), torch.randperm(width, generator=torch.Generator().manual_seed(1)).int().to(DEVICE)
    poison((n, width))
    assert torch.equal(ops.ordered_rows(x, order), x[:, order.long()])
    wide = torch.full((n, width + 3), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, 3:] = x
    assert torch.equal(ops.ordered_rows(wide[:, 3:], order), x[:, order.long()])
    beyond = order.clone()
    beyond[0] = 2**31 - 1
    poison((n, width))
    assert torch.equal(ops.ordered_rows(x, beyond)[:, 0], x[:, width - 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [7, 64, 4096, 5000])
def test_embed_rows(width, dtype):
    table, ids = seeded(50, width).to(dtype), torch.tensor([0, 49, 3, -1, 50, 3], dtype=torch.int32, device=DEVICE)
    for scale in (1.0, 61.5):
        poison((6, width))
        expected = REFERENCES["embed_rows"](ids.cpu(), table.cpu(), scale)
        assert torch.equal(ops.embed_rows(ids, table, scale).cpu(), expected)


def rotation(dim: int, half: int, heads: int, kv_heads: int, width: int, *, norms: bool, batch: int = 3):
    """qkv, norms, eps, cos, sin, starts, counts and a cache of 40 slots."""
    qkv = seeded(batch, width, (heads + 2 * kv_heads) * dim)
    weights = [1 + seeded(dim, seed=s).float() / 4 if norms else None for s in (1, 2)]
    angle = torch.rand(64, half, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 6
    starts = torch.tensor(([0, 17, 40 - width] * batch)[:batch], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor(([width, width - 1, width + 3] * batch)[:batch], dtype=torch.int32, device=DEVICE)
    cache = [torch.full((batch, kv_heads, 40, dim), 7.0, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    return qkv, *weights, 1e-6, angle.cos(), angle.sin(), starts, counts, *cache, heads


SHAPES = [(128, 64, 8, 2), (64, 32, 3, 1), (96, 48, 4, 4), (80, 10, 2, 1), (16, 5, 2, 2), (256, 128, 4, 1),
          (32, 0, 2, 1)]  # fmt: skip


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("dim", "half", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("width", [1, 9])
def test_rope_write_rows(dim, half, heads, kv_heads, width, norms):
    operands = rotation(dim, half, heads, kv_heads, width, norms=norms)
    there = [t.cpu() if isinstance(t, Tensor) else t for t in operands]
    poison((3, width, heads, dim))
    q = ops.rope_write_rows(*operands)
    expected = REFERENCES["rope_write_rows"](*there)
    # Where the norm's rounding falls the other way, a rotated element moves by a step of its larger partner.
    for ours, theirs in ((q, expected), (operands[8], there[8])):
        assert torch.allclose(ours.float().cpu(), theirs.float(), rtol=2 * BF16_STEP, atol=0.04 if norms else 1e-5)
    assert torch.equal(operands[9].cpu(), there[9])
    assert torch.equal(operands[8].cpu() == 7, there[8] == 7)  # sentinels: nothing else was written
    assert q[1, width - 1 :].eq(0).all()


def test_rope_of_a_token_alone_has_the_same_bits():
    for norms in (False, True):
        whole = rotation(128, 64, 8, 2, 9, norms=norms)
        q = ops.rope_write_rows(*whole)
        for row in range(3):
            for t in range(9):
                alone = rotation(128, 64, 8, 2, 9, norms=norms)
                qkv, norm, starts, counts = alone[0][row : row + 1, t : t + 1], alone[1:6], alone[6], alone[7]
                ones = (counts[row : row + 1] > t).int()
                caches = [cache[row : row + 1] for cache in alone[8:10]]
                one = ops.rope_write_rows(qkv, *norm, starts[row : row + 1] + t, ones, *caches, 8)
                assert torch.equal(one[0, 0], q[row, t])
                if t < counts[row]:
                    slot = starts[row] + t
                    assert torch.equal(caches[0][0, :, slot], whole[8][row, :, slot])


def test_rope_leaves_alone_what_lies_behind_the_cache():
    operands = list(rotation(64, 32, 2, 1, 9, norms=False))
    operands[6] = torch.tensor([-1, 39, 2**31 - 5], dtype=torch.int32, device=DEVICE)
    q = ops.rope_write_rows(*operands)
    assert q[1, 1:].eq(0).all()
    assert q[2].eq(0).all()
    assert q[0, 0].eq(0).all()
    assert operands[8][2].eq(7).all()
    assert operands[8][1, :, :39].eq(7).all()
    few = operands[4][:5].contiguous(), operands[5][:5].contiguous()
    operands[4:6], operands[6] = few, torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert ops.rope_write_rows(*operands)[0, 5:].eq(0).all()


def test_no_rows():
    empty = seeded(0, 64)
    assert [t.shape for t in ops.rms_norm(empty, torch.ones(64, device=DEVICE), 1e-5, empty)] == [(0, 64), (0, 64)]
    assert ops.gated(empty, 0).shape == (0, 32)
    assert ops.silu_mul(empty, empty).shape == (0, 64)
    assert ops.embed_rows(torch.empty(0, dtype=torch.int32, device=DEVICE), seeded(3, 8), 1.0).shape == (0, 8)
    assert ops.choose_rows(empty)[0].shape == (0,)


def test_norm_is_that_of_the_reference_for_a_nan():
    x = seeded(3, 64)
    x[1, 5] = torch.nan
    y = ops.rms_norm(x, torch.ones(64, device=DEVICE), 1e-5)[0]
    assert torch.equal(y.isnan().cpu(), REFERENCES["rms_norm"](x.cpu(), torch.ones(64), 1e-5, None)[0].isnan())


@pytest.mark.parametrize(("n", "inputs", "outputs", "ranks"), [
    (1, 64, 96, [4]), (2, 4096, 700, [16, 0, 3]), (3, 200, 33, [1, 5]), (7, 1032, 300, [9]), (8, 64, 513, [2, 2]),
    (13, 4096, 6144, [16, 16, 16]), (24, 8192, 1000, [64]), (41, 512, 260, [32, 7]), (300, 96, 40, [1]),
])  # fmt: skip
def test_low_rank_added(n, inputs, outputs, ranks):
    """Each row for itself, whatever the others; linears without a pair, with smaller ones and of one rank."""
    draw = torch.Generator(DEVICE).manual_seed(n)
    y, x = seeded(n, outputs), seeded(n, inputs, seed=1)
    down = torch.randn(sum(ranks), inputs, generator=draw, device=DEVICE) / inputs**0.5
    up = torch.zeros(max(ranks), outputs, device=DEVICE)
    first = torch.zeros(outputs, dtype=torch.int32, device=DEVICE)
    at, each = 0, outputs // len(ranks)
    for i, rank in enumerate(ranks):
        mine = slice(i * each, outputs if i == len(ranks) - 1 else (i + 1) * each)
        up[:rank, mine] = torch.randn(up[:rank, mine].shape, generator=draw, device=DEVICE)
        first[mine], at = at, at + rank
    poison((n, 2 * sum(ranks)))
    between = ops.low_rank_between(x, down)
    exact = REFERENCES["low_rank_between"](x.float().cpu(), down.cpu())
    torch.testing.assert_close(between.cpu(), exact, atol=2e-5, rtol=1e-5)
    poison((n, outputs))
    found = ops.low_rank_added(y, between, up, first)
    exact = REFERENCES["low_rank_added"](y.double().float().cpu(), between.cpu(), up.cpu(), first.cpu())
    close(found, exact, 2e-5)

    def of(rows: slice) -> torch.Tensor:
        return ops.low_rank_added(y[rows], ops.low_rank_between(x[rows], down), up, first)

    for r in sorted({0, n // 2, n - 1}):
        assert torch.equal(of(slice(r, r + 1)), found[r : r + 1])
    for r in range(0, n - n % 5, 5):
        assert torch.equal(of(slice(r, r + 5)), found[r : r + 5])
    wild = first.clone()
    wild[0], wild[-1] = -7, 1 << 30  # no such ranks: the nearest ones
    near = REFERENCES["low_rank_added"](y.float().cpu(), between.cpu(), up.cpu(), wild.cpu())
    close(ops.low_rank_added(y, between, up, wild), near, 2e-5)
    assert ops.low_rank_added(y[:0], ops.low_rank_between(x[:0], down), up, first).shape == (0, outputs)
    weight, bias = seeded(outputs, inputs, seed=2), seeded(outputs, seed=3)
    for own, places in ((None, first), (bias, wild)):
        poison((n, outputs))
        beside = ops.low_rank_added(ops.bf16_linear(x, weight, own), between, up, places)
        assert torch.equal(ops.adapted_linear(x, weight, own, between, up, places), beside)
    with pytest.raises(ValueError, match="between has shape"):
        ops.low_rank_added(y, between[:, :0], up, first)
    with pytest.raises(TypeError, match="up is "):
        ops.adapted_linear(x, weight, None, between, up.bfloat16(), first)


@pytest.mark.parametrize("n", [1, 8, 9, 30, 33])
def test_captured_adapted_linears(n):
    """In a graph, where a kernel starts while the one in front of it ends."""
    width, rank = 1024, 16
    draw = torch.Generator(DEVICE).manual_seed(n)
    weight = (0.8 * torch.randn(width, width, generator=draw, device=DEVICE) / width**0.5).bfloat16()
    down = torch.randn(rank, width, generator=draw, device=DEVICE) / width**0.5
    up = 0.6 * torch.randn(rank, width, generator=draw, device=DEVICE) / rank**0.5
    first = torch.zeros(width, dtype=torch.int32, device=DEVICE)

    def multiply(x: Tensor) -> Tensor:
        return ops.adapted_linear(x, weight, None, ops.low_rank_between(x, down), up, first)

    check_captured_products(multiply, seeded(n, width), seeded(n, width, seed=1))
