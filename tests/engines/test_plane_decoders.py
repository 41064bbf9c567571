"""Do compiled decoders multiply experts in bit-planes by as many as a call says, whoever else is in it?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import PACKED_MIXTURE, Lanes, exact_and_firm, random_model
from test_mixture_decoder import LENGTH, runner_of, scored_together, some_ids
from torch import nn

from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.expert_modules import is_experts
from hf_mlspec.nn.plane_experts import PlaneExperts
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import Bits

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
NAMES = ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss", "glm4-moe"]


def in_planes(name: str, planes: int = 8, dtype: torch.dtype = torch.float32, linears: bool = False) -> nn.Module:
    """A random mixture whose experts are bit-planes, and its linears where that is asked."""
    model = random_model(name, dtype, **PACKED_MIXTURE, shared_expert_intermediate_size=64)
    switch, head = PrecisionSwitch("planes", num_planes=planes), model.get_output_embeddings()
    own = {"num_planes": planes, "group_size": 32}
    for path, module in list(model.named_modules()):
        if is_experts(module):
            model.set_submodule(path, PlaneExperts.from_module(module, "planes", switch, path, **own))
        elif linears and type(module) is nn.Linear and module is not head:
            model.set_submodule(path, PlanesLinear.from_linear(module, path, switch, **own))
    return model.eval()


def of_first_planes(model: nn.Module, planes: int) -> nn.Module:
    """The same model, dense, with the values of the first planes of each expert."""
    dense = copy.deepcopy(model)
    for path, module in list(dense.named_modules()):
        if not isinstance(module, PlaneExperts):
            continue
        plain = module.dequantized_module(torch.float32)
        for key in module.names:
            parts = module._on_disk(key)
            own = [module.record.weight(*[part[i] for part in parts]).dequantize(torch.float32, planes)
                   for i in range(module.original.num_experts)]  # fmt: skip
            values = torch.stack(own)
            getattr(plain, key).data = values.transpose(1, 2).contiguous() if module.original.transposed else values
        dense.set_submodule(path, plain)
    return dense


@pytest.mark.parametrize("planes", [8, 3])
@pytest.mark.parametrize("name", NAMES)
def test_experts_follow_the_values_of_their_planes(name, planes):
    model, ids = in_planes(name), some_ids(16)
    exact, firm = exact_and_firm(of_first_planes(model, planes), ids)
    assert firm.sum() >= 4
    found = scored_together(model, ids, Bits(planes, 16)).double()
    error = ((found - exact).norm(dim=-1) / exact.norm(dim=-1))[firm]
    assert float(error.median()) < 0.02


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_bits_of_a_token_are_its_own(name, threads):
    """One by one, alone, in a batch; at all planes and at few; linears in planes, too."""
    model, ids, before = in_planes(name, 6, torch.bfloat16, linears=True), some_ids(8), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = []
        for bits in (Bits(6, 16), Bits(2, 16)):
            together = scored_together(model, ids, bits)
            assert together.isfinite().all()
            single = runner_of(model, 2, bits)
            steps = [single.feed([row[: i + 1] for row in ids[:2].tolist()])[:, 0] for i in range(LENGTH)]
            assert torch.equal(torch.stack(steps, dim=1), together[:2])
            assert torch.equal(scored_together(model, ids[5:6], bits), together[5:6])
            seen.append(together)
        assert not torch.equal(*seen)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "glm4-moe"])
def test_the_decoder_of_devices_multiplies_them_as_that_of_the_cpu(name):
    """Its ops in plain torch."""
    model, ids = in_planes(name, 6, torch.bfloat16, linears=True), some_ids(2)
    decoder = CudaDecoder(model)
    assert [tuple(bits) for bits in decoder.bit_choices] == [(planes, 16) for planes in range(6, 0, -1)]
    for bits in (Bits(6, 16), Bits(3, 16)):
        found = torch.stack(Lanes(decoder, 2).feed(ids.tolist(), bits=bits)).double()
        beside = scored_together(model, ids, bits).double()
        assert float(((found - beside).norm(dim=-1) / beside.norm(dim=-1)).median()) < 0.05


def test_projections_may_have_zeros_of_their_own():
    """As 8 planes may: twice the code that means 0 is 254 to 256."""
    model = in_planes("qwen3-moe", 8, torch.bfloat16)
    for experts in (module for module in model.modules() if isinstance(module, PlaneExperts)):
        experts.gate_up_proj_zero_doubled.fill_(254)
    read = CudaDecoder(model)._layers[0].experts
    down = experts.zero_doubled("down_proj")
    assert down != 254
    assert (read.up.how[-1], read.down.how[-1]) == (254, down)


def test_what_does_not_fit_a_decoder_names_the_expert():
    model = in_planes("qwen3-moe", 4)
    decoder = CpuDecoder(model)
    with pytest.raises(ValueError, match="weight_bits is 5"):
        scored_together(model, some_ids(), Bits(5, 16))
    experts = model.model.layers[0].mlp.experts
    (hidden, inner), own = experts.original.sizes["down_proj"], experts.prepack_().parts("down_proj")
    shape, how = ("down", inner, hidden), (None, 32, 15, 4)
    with pytest.raises(ValueError, match=r"experts' down holds bit-planes of shape \[.*, expected \d+ experts"):
        decoder.handle.set_plane_experts(*shape, own.planes[:-1], own.scale, *how)
    with pytest.raises(ValueError, match=r"experts' down of expert 0: .*zero_doubled"):
        decoder.handle.set_plane_experts(*shape, own.planes, own.scale, None, 32, -1, 4)
    with pytest.raises(ValueError, match=r"experts' down of expert 0: weight_bits is 5"):
        decoder.handle.set_plane_experts(*shape, own.planes, own.scale, None, 32, 15, 5)
