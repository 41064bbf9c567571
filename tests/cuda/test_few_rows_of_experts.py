"""On Hopper: have products of experts of a few rows, by warps, the bits of those of many, by blocks?"""

from __future__ import annotations

import pytest
import torch
from expert_cases import FORMATS, ExpertCase, some_experts
from linear_cases import DEVICE, poison

from hf_mlspec import ops

pytestmark = pytest.mark.usefixtures("kernels_are_required")
PACKED = [form for form in FORMATS if form.group_size]


@pytest.mark.parametrize("form", PACKED, ids=lambda form: form.name)
@pytest.mark.parametrize(("out", "size"), [(192, 2048), (64, 128), (130, 2944), (320, 384), (96, 7168)])
def test_a_row_among_few_is_that_among_many(form, out, size):
    """Long rows, whose ring turns around, short ones, outputs that end within a tile; rows too long for few tokens."""
    case = ExpertCase(form, 6, out, size, 300)
    experts, bias = some_experts(300, 6, 2), torch.randn(6, out, device=DEVICE)
    gates = [(), (1.702, 7.0), *([(0.0, 0.0, 0)] if out % 64 == 0 else [])]
    for gate in gates:
        whole = case.multiply(case.x, experts, None, bias, gate)
        for count in (1, 2, 5, 8, 12):
            rows = case.x[:count].contiguous()
            own = experts[:count].contiguous()
            poison((2 * count, out))
            found = case.multiply(rows, own, ops.plan_rows(own, 6), bias, gate)
            assert torch.equal(found, whole[: 2 * count]), (count, gate)
            each = rows.repeat_interleave(2, dim=0).contiguous()
            assert torch.equal(case.multiply(each, own, ops.plan_rows(own, 6), bias, gate), whole[: 2 * count])


def test_captured_products_that_begin_early_have_the_same_bits():
    """A graph of two products one behind the other, replayed with other tokens."""
    up, down = (ExpertCase(PACKED[0], 6, out, size, 8) for out, size in ((256, 512), (512, 128)))
    experts = some_experts(1, 6, 2)
    plan, x = ops.plan_rows(experts, 6), up.x[:1].clone()

    def work() -> torch.Tensor:
        return down.multiply(up.multiply(x, experts, plan, None, (0.0, 0.0, 0)), experts, plan)

    work()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        with torch.cuda.graph(graph, stream=stream):
            out = work()
    torch.cuda.synchronize()
    for row in range(8):
        x.copy_(up.x[row : row + 1])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, work()), row
