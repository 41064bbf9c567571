"""On a GPU: are products of nested experts those of the dense ones bit for bit, and do their drafts follow?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_cases import check_bits_of_rows, check_captured_chain, random_ids
from decoders import Lanes, random_model
from expert_cases import some_experts
from linear_cases import DEVICE
from torch import Tensor, nn

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats import NestedWeight, activations
from hf_mlspec.nn.nested_experts import NestedExperts
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "moe_intermediate_size": 64}
SIZES = [(64, 128), (200, 96), (192, 160), (130, 1056)]  # outputs, inputs


class Case:
    """Nested experts ``[count, out, in]`` with a codebook each, the dense weight and the draft's."""

    def __init__(self, count: int, out: int, size: int, rows: int, escaped: bool = False):
        draw = torch.Generator(DEVICE).manual_seed(out * size)
        weight = torch.randn(count, out, size, generator=draw, device=DEVICE) / size**0.5
        weight = (weight * torch.logspace(-2, 2, count, device=DEVICE)[:, None, None]).bfloat16()
        if escaped:
            weight[1, out - 1, 7] = weight[count - 1, 0, size - 1] = 2.0**-70
        words = [("lloyd_max", "mxfp4")[expert % 2] for expert in range(count)]
        own = [NestedWeight.from_dense(one, word) for one, word in zip(weight, words, strict=True)]
        tiles = [ops.prepack_nested(*one.parts[:4]) for one in own]
        self.tiles = [torch.stack(parts) for parts in zip(*tiles, strict=True)]
        self.codebook = torch.stack([one.weight_codebook for one in own])
        self.dense, self.draft = weight, torch.stack([one.dequantize_draft() for one in own])
        self.x = torch.randn(rows, size, generator=draw, device=DEVICE).bfloat16()
        self.out, self.count, self.escapes = out, count, {}
        if escaped:
            rows = torch.zeros(count, 1, dtype=torch.int64, device=DEVICE)
            rows[1] = out - 1
            exact = torch.stack([one[row] for one, row in zip(weight, rows, strict=True)])
            self.escapes = {"escape_rows": rows, "escape_weight": exact}

    def multiply(self, x: Tensor, experts: Tensor, bits: tuple[int, int], bias: Tensor | None = None,
                 clamp: tuple[float, ...] = ()) -> Tensor:
        plan = ops.plan_rows(experts, self.count)
        own = *self.tiles, self.codebook, bias, experts, plan, self.out, *bits, *clamp
        return ops.nested_expert_rows(x, *own, **self.escapes)


@pytest.mark.parametrize("escaped", [False, True], ids=["", "escapes"])
@pytest.mark.parametrize("rows", [1, 9, 40, 300])
@pytest.mark.parametrize(("out", "size"), SIZES)
def test_exact_products_are_those_of_dense_experts(out, size, rows, escaped):
    case = Case(6, out, size, rows, escaped)
    experts, bias = some_experts(rows, 6, 2), torch.randn(6, out, device=DEVICE)
    plan = ops.plan_rows(experts, 6)
    for clamp in ((), (1.702, 7.0), *([(0.0, 0.0, 0)] if out % 64 == 0 else [])):
        expected = ops.dense_expert_rows(case.x, case.dense, bias, experts, plan, *clamp)
        assert torch.equal(case.multiply(case.x, experts, (16, 16), bias, clamp), expected)


@pytest.mark.parametrize("bits", [(4, 16), (4, 8)])
@pytest.mark.parametrize("rows", [1, 9, 40, 300])
@pytest.mark.parametrize(("out", "size"), SIZES)
def test_drafts_follow_their_values(out, size, rows, bits):
    case, experts = Case(6, out, size, rows), some_experts(rows, 6, 2)
    found, wide = case.multiply(case.x, experts, bits), case.x.double()
    if bits[1] == 8:
        wide = activations.dequantize_rows(*activations.quantize_rows(case.x, 32, 8), 32).double()
    pairs = experts.flatten().long()
    for expert in range(6):
        own = (pairs == expert).nonzero().flatten()
        expected = wide[own // 2] @ case.draft[expert].double().T
        sums = wide[own // 2].abs() @ case.draft[expert].double().abs().T
        most = 2**-8 * expected.abs() + 2**-7 * sums / size**0.5 + 1e-30
        assert ((found[own].double() - expected).abs() <= most).all()
    alone = case.multiply(case.x[:1].contiguous(), experts[:1].contiguous(), bits)
    assert torch.equal(alone, found[:2])
    if out % 64 == 0:
        assert torch.equal(case.multiply(case.x, experts, bits, None, (0.0, 0.0, 1)), ops.gated(found, 1))


def nested_on_gpu(name: str) -> tuple[nn.Module, nn.Module]:
    model = random_model(name, torch.bfloat16, **SHAPE)
    for block in model.model.layers:
        with torch.no_grad():
            block.mlp.experts.down_proj[2, 7, 5] = 2.0**-60
    plain = copy.deepcopy(model).cuda()
    return plain, hf_mlspec.nest(model.cuda())


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"])
def test_a_nested_mixture_keeps_the_bits_of_its_rows(name):
    """Exact and as a draft: in a batch of 16, one by one, alone, in checks of nine."""
    _, model = nested_on_gpu(name)
    assert any(isinstance(module, NestedExperts) for module in model.modules())
    check_bits_of_rows(CudaDecoder(model), (Bits(16, 16), Bits(4, 16), Bits(4, 8)))


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_nested_experts_among_dense_linears_change_no_bit(name):
    """Only the experts nested: all logits are those of the dense model."""
    plain, model = nested_on_gpu(name)
    mixed = copy.deepcopy(plain)
    for at, block in enumerate(model.model.layers):
        mixed.model.layers[at].mlp.experts = block.mlp.experts
    ids = random_ids(12)
    together, dense = (torch.stack(Lanes(CudaDecoder(own), 12).feed(ids)) for own in (mixed, plain))
    assert torch.equal(together, dense)


@pytest.mark.parametrize("chain", [["nested"], ["nested4a8"], ["nested", "experts:1"]])
def test_captured_chains_over_a_nested_mixture(chain):
    check_captured_chain(nested_on_gpu("qwen3-moe")[1], chain)
