"""On a GPU: what must a decoder of packed weights write, at each of its levels, whatever the format?"""

from __future__ import annotations

import torch
from decoders import Lanes, in_float64
from models import prompts
from torch import nn

import hf_mlspec
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.switch import precision_switch

LENGTH = 60


def random_ids(batch: int) -> list[list[int]]:
    return torch.randint(1, 199, (batch, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()


def check_levels(model: nn.Module, levels: list[str]) -> None:
    """Each is what the modules compute, in steps with the same bits; and the model's tensors stay."""
    ids, before = random_ids(2), {key: tensor.clone() for key, tensor in model.state_dict().items()}
    decoder, switch = CudaDecoder(model), precision_switch(model)
    for level in levels:
        with torch.no_grad(), switch.at(level):
            modules, bits = model(torch.tensor(ids).cuda()).logits.float(), switch.bits
        together = torch.stack(Lanes(decoder, 2, slots=128).feed(ids, bits=bits))
        assert (together.float() - modules).abs().mean() < 0.04 * modules.abs().mean(), level
        single = Lanes(decoder, 2, slots=128)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids], bits=bits)) for i in range(LENGTH)]
        assert torch.equal(torch.cat(steps, dim=1), together), level
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def check_near_float64(model: nn.Module) -> None:
    ids = random_ids(2)
    with torch.no_grad():
        exact = in_float64(model).cuda()(torch.tensor(ids).cuda()).logits
    out = torch.stack(Lanes(CudaDecoder(model), 2, slots=128).feed(ids))
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()


def check_captured_chain(model: nn.Module, levels: list[str]) -> None:
    """It writes what the target alone writes."""
    model = hf_mlspec.prepare(model, engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40]).items()}
    options = {"do_sample": False, "max_new_tokens": 48, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    stats = hf_mlspec.last_stats(model)
    assert stats.levels[0].drafted > 0
    assert stats.capture_seconds > 0
