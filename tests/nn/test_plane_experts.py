"""Do experts in bit-planes multiply by their first planes, keep bits in every layout, and say what is damaged?"""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from test_experts import experts_of, routing

from hf_mlspec.formats import FORMATS
from hf_mlspec.nn.expert_kinds import experts_in
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.nested_experts import NestedExperts
from hf_mlspec.nn.plane_experts import PlaneExperts
from hf_mlspec.nn.switch import PrecisionSwitch

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
KINDS = ["mixtral", "qwen3_moe", "gpt_oss"]
OPTIONS = ({"num_planes": 8}, {"num_planes": 5}, {"num_planes": "int3"}, {"num_planes": "ternary"})


def packed_of(kind: str, dtype: torch.dtype = torch.float32, **options) -> tuple[torch.nn.Module, PlaneExperts]:
    module = experts_of(kind, dtype)
    options = {"group_size": 32, **options}
    return module, PlaneExperts.from_module(module, "planes", **options)


def with_planes(experts: PlaneExperts, planes: int, dtype: torch.dtype) -> torch.nn.Module:
    """The module that was replaced, with the values of the first planes."""
    module = experts.dequantized_module(dtype)
    for key in experts.names:
        own = [experts.record.weight(*[part[i] for part in experts._on_disk(key)]).dequantize(dtype, planes)
               for i in range(experts.original.num_experts)]  # fmt: skip
        dense = torch.stack(own)
        getattr(module, key).data = dense.transpose(1, 2).contiguous() if experts.original.transposed else dense
    return module


def test_every_format_says_which_module_holds_its_experts():
    found = {word: experts_in(word) for word, record in FORMATS.items() if record.experts}
    assert found == {"mxfp4": PackedExperts, "int4": PackedExperts, "nested": NestedExperts, "planes": PlaneExperts}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_first_planes(kind, options):
    module, packed = packed_of(kind, **options)
    inputs, seen = routing(module), []
    for planes in range(1, packed.num_planes + 1):
        with packed.switch.at(f"planes{planes}"):
            found = packed(*inputs)
        expected = with_planes(packed, planes, torch.float32)(*inputs)
        assert (found - expected).abs().max() <= 0.01 * expected.abs().max()
        seen.append(found)
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))
    assert torch.equal(packed(*inputs), seen[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_its_bits_alone_and_as_a_gpu_runs_all_experts(kind):
    module, packed = packed_of(kind, torch.bfloat16, num_planes=6)
    x, chosen, weights = routing(module, tokens=9)
    assert packed._fits_plans(x)
    for planes in (6, 3):
        with packed.switch.at(f"planes{planes}"):
            whole, planned = packed(x, chosen, weights), packed._planned(x, chosen, weights)
            assert torch.equal(packed(x[4:5], chosen[4:5], weights[4:5]), whole[4:5])
            assert torch.equal(packed._planned(x[4:5], chosen[4:5], weights[4:5]), planned[4:5])
            torch.testing.assert_close(planned, whole, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_copies(kind, options):
    module, packed = packed_of(kind, torch.bfloat16, **options)
    inputs = routing(module)
    saved = {key: tensor.clone() for key, tensor in packed.state_dict().items()}
    count, stored = len(module.down_proj), packed.num_planes
    assert saved["down_proj_planes"].shape[:2] == (count, stored)
    assert saved["down_proj_zero_doubled"].shape == (count, 1)
    assert ("down_proj_bias" in saved) == (kind == "gpt_oss")
    y = packed(*inputs)
    assert packed.is_prepacked
    assert packed.state_dict().keys() == saved.keys()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in packed.state_dict().items())
    empty = PlaneExperts.empty(module, "planes", group_size=32, **options)
    assert not empty.dequantized("gate_up_proj").any()
    empty(*inputs)
    empty.load_state_dict(saved)
    for twin in (empty, copy.deepcopy(packed)):
        assert torch.equal(twin(*inputs), y)
        assert twin.switch is not packed.switch
    packed.half().bfloat16().unprepack_()
    assert all(torch.equal(tensor, saved[key]) for key, tensor in packed.state_dict().items() if "bias" not in key)
    packed.validate()


def test_a_materialized_weight_stands_for_all_planes():
    module, packed = packed_of("mixtral", num_planes=8)
    inputs = routing(module)
    with packed.switch.at("planes4"):
        draft = packed(*inputs)
    packed.materialize(torch.float32)
    exact = packed.dequantized_module()(*inputs)
    torch.testing.assert_close(packed(*inputs), exact, rtol=1e-5, atol=1e-5)
    with packed.switch.at("planes4"):
        assert torch.equal(packed(*inputs), draft)


def test_what_is_damaged_or_does_not_fit_is_named():
    module, packed = packed_of("mixtral", num_planes=4)
    with pytest.raises(ValueError, match=r"experts: the experts have 4 bit-planes, their switch is for 8: make it "):
        PlaneExperts.from_module(module, "planes", PrecisionSwitch("planes"), num_planes=4, group_size=32)
    packed.down_proj_zero_doubled[2] += 2
    with pytest.raises(ValueError, match=r"layers\.0\.down_proj of expert 2: its zero_doubled is not that of the"):
        packed.validate("layers.0")
    packed.down_proj_zero_doubled[2] -= 2
    packed.down_proj_scale[1, 3, 0] = 0
    with pytest.raises(ValueError, match=r"layers\.0\.down_proj of expert 1: weight_scale"):
        packed.validate("layers.0")
    module.gate_up_proj[3, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"mlp\.gate_up_proj of expert 3"):
        PlaneExperts.from_module(module, "planes", name="mlp", group_size=32)
