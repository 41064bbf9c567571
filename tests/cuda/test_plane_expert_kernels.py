"""On a GPU: are products of experts in bit-planes those of their first planes, with bits that are a row's own?"""

from __future__ import annotations

import pytest
import torch
from decoder_cases import check_bits_of_rows, check_captured_chain
from decoders import random_model
from expert_cases import some_experts
from linear_cases import DEVICE, poison
from torch import Tensor, nn

from hf_mlspec import ops
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats.planes import PlanesWeight
from hf_mlspec.nn.expert_modules import is_experts
from hf_mlspec.nn.plane_experts import PlaneExperts
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "moe_intermediate_size": 64}
SIZES = [(64, 128), (200, 96), (192, 160), (130, 1056)]  # outputs, inputs


class Case:
    """Experts ``[count, out, in]`` in planes."""

    def __init__(self, out: int, size: int, rows: int, planes: int | str = 8, group: int = 32, count: int = 6):
        draw = torch.Generator(DEVICE).manual_seed(out * size)
        weight = torch.randn(count, out, size, generator=draw, device=DEVICE) / size**0.5
        weight = weight * torch.logspace(-2, 2, count, device=DEVICE)[:, None, None]
        self.weights = [PlanesWeight.from_dense(one, planes, group) for one in weight]
        tiles = [ops.prepack_planes(one.weight_planes, one.weight_scale) for one in self.weights]
        self.tiles = [torch.stack(parts) for parts in zip(*tiles, strict=True)]
        self.x = torch.randn(rows, size, generator=draw, device=DEVICE).bfloat16()
        self.out, self.count, self.group = out, count, group
        self.zero, self.stored = self.weights[0].zero_doubled, self.weights[0].num_planes

    def multiply(
        self, x: Tensor, experts: Tensor, planes: int, bias: Tensor | None = None, clamp: tuple = ()
    ) -> Tensor:
        plan = ops.plan_rows(experts, self.count)
        how = self.out, self.group, self.zero, planes, *clamp
        return ops.plane_expert_rows(x, *self.tiles, bias, experts, plan, *how)


@pytest.mark.parametrize("stored", [8, 5, "int3", "ternary", 1])
@pytest.mark.parametrize("rows", [1, 9, 40, 300])
@pytest.mark.parametrize(("out", "size"), SIZES)
def test_products_are_those_of_the_first_planes(out, size, rows, stored):
    case, experts = Case(out, size, rows, stored), some_experts(rows, 6, 2)
    pairs = experts.flatten().long()
    for planes in range(1, case.stored + 1):
        poison((len(pairs), out))
        found = case.multiply(case.x, experts, planes).double()
        for expert in pairs.unique().tolist():
            own = (pairs == expert).nonzero().flatten()
            dense = case.weights[expert].dequantize(torch.float32, planes).double()
            wide = case.x[own // 2].double()
            exact, magnitude = wide @ dense.T, wide.abs() @ dense.abs().T
            bound = 2.0**-24 * (size / 8 + 16) * magnitude + 2.0**-8 * exact.abs()
            assert ((found[own] - exact).abs() <= bound).all(), (planes, expert)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("planes", [8, 4, 3])
def test_bits_are_a_rows_own_gated_or_not(group, planes):
    case, experts = Case(192, 256, 400, 8, group), some_experts(400, 6, 2)
    bias = torch.randn(6, 192, device=DEVICE)
    whole = case.multiply(case.x, experts, planes, bias)
    for count in (1, 2, 8, 9, 33, 200):
        assert torch.equal(case.multiply(case.x[:count].contiguous(), experts[:count].contiguous(), planes, bias),
                           whole[: 2 * count])  # fmt: skip
    for activation in (0, 1):
        found = case.multiply(case.x, experts, planes, bias, (0.0, 0.0, activation))
        assert torch.equal(found, ops.gated(whole, activation))
    assert torch.equal(case.multiply(case.x, experts, planes, bias, (1.702, 7.0)), ops.gated_pairs(whole, 1.702, 7.0))
    each = case.x[:40].repeat_interleave(2, dim=0).contiguous()
    assert torch.equal(case.multiply(each, experts[:40].contiguous(), planes, bias), whole[:80])


def test_operands_that_do_not_fit_are_named():
    case, experts = Case(64, 128, 3), some_experts(3, 6, 2)
    with pytest.raises(ValueError, match=r"num_planes is 9, the weight stores 8: choose 1 to 8"):
        case.multiply(case.x, experts, 9)
    with pytest.raises(ValueError, match="plane_expert_rows: x has shape"):
        case.multiply(case.x[:, :96].contiguous(), experts, 8)


def in_planes(name: str) -> nn.Module:
    model = random_model(name, torch.bfloat16, **SHAPE)
    switch, head = PrecisionSwitch("planes"), model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if is_experts(module):
            model.set_submodule(path, PlaneExperts.from_module(module, "planes", switch, path, group_size=32))
        elif type(module) is nn.Linear and module is not head and module.in_features % 32 == 0:
            model.set_submodule(path, PlanesLinear.from_linear(module, path, switch, group_size=32))
    return model.eval().cuda()


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"])
def test_a_mixture_in_planes_keeps_the_bits_of_its_rows(name):
    """At all planes and at four: in a batch of 16, one by one, alone, in checks of nine."""
    check_bits_of_rows(CudaDecoder(in_planes(name)), (Bits(8, 16), Bits(4, 16)))


@pytest.mark.parametrize("chain", [["planes4"], ["planes3", "experts:1"]])
def test_captured_chains_over_a_mixture_in_planes(chain):
    check_captured_chain(in_planes("qwen3-moe"), chain)
