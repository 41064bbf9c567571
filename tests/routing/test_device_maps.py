"""Does a model in bit-planes that accelerate would spread or offload stream its planes to one device instead?"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.integration.streamed import shared_out, source_of
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.plane_budget import Streaming

DENSE = hf_mlspec.demo_pair()[0]
PLANES = {"format": "planes", "group_size": 32}
IDS = torch.tensor([[5, 6, 7, 8]])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def resident():
    config = hf_mlspec.MLSpecConfig(**PLANES)
    return AutoModelForCausalLM.from_pretrained(DENSE, dtype=torch.float32, quantization_config=config)


@pytest.fixture(scope="module")
def packed(resident, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    resident.save_pretrained(folder)
    return folder


def sizes(model):
    planes = {id(part) for own in model.modules() if isinstance(own, PlanesLinear) for part in own.parameters()}
    parts = {id(part): part.nbytes for part in model.parameters()}
    return sum(parts.values()), sum(size for own, size in parts.items() if own not in planes)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("device_map", ["auto", "sequential"])
def test_what_max_memory_leaves_no_room_for_is_streamed(resident, packed, kind, device_map):
    whole, rest = sizes(resident)
    limit = rest + (whole - rest) * 85 // 100
    config = {} if kind == "packed" else {"quantization_config": hf_mlspec.MLSpecConfig(**PLANES)}
    model = AutoModelForCausalLM.from_pretrained(
        packed if kind == "packed" else DENSE, dtype=torch.float32, device_map=device_map, max_memory={"cpu": limit},
        **config,
    )  # fmt: skip
    source = source_of(model)
    assert source.budget == limit - rest
    assert source.used <= source.budget
    assert not any(hasattr(own, "_hf_hook") for own in model.modules())
    assert model.generate(IDS, **GREEDY).equal(resident.generate(IDS, **GREEDY))


def test_what_fits_is_not_streamed(packed):
    model = AutoModelForCausalLM.from_pretrained(packed, device_map="auto", max_memory={"cpu": "8GiB"})
    assert source_of(model) is None


def test_a_budget_is_no_more_than_max_memory_leaves(resident):
    whole, rest = sizes(resident)
    limit = rest + (whole - rest) * 9 // 10
    config = hf_mlspec.MLSpecConfig(**PLANES, plane_budget="1GiB", top_planes=3)
    how = {"dtype": torch.float32, "quantization_config": config, "device_map": "auto"}
    model = AutoModelForCausalLM.from_pretrained(DENSE, max_memory={"cpu": limit}, **how)
    assert (source_of(model).budget, source_of(model).top) == (limit - rest, 3)
    with pytest.raises(ValueError, match=r"max_memory of 'cpu' is 1,000 bytes, and what is not in bit-planes takes"):
        AutoModelForCausalLM.from_pretrained(DENSE, max_memory={"cpu": 1000}, **how)


def test_the_first_device_with_memory_gets_what_it_has_room_for(resident):
    whole, rest = sizes(resident)
    gpus = {0: 0, 1: whole // 2, 2: whole // 4, "cpu": 10 * whole}
    assert shared_out(resident, gpus, None) == (torch.device("cuda", 1), Streaming(whole // 2 - rest, 4, None))
    assert shared_out(resident, gpus | {2: whole}, None) is None  # accelerate spreads it, as ever
    asked = Streaming(10, 5, "folder")
    assert shared_out(resident, gpus | {2: whole}, asked) == (torch.device("cuda", 1), asked)
    assert shared_out(AutoModelForCausalLM.from_pretrained(DENSE), {0: 10, "cpu": 10}, None) is None
