"""On a GPU: does a whole step compute what the model does, with the same bits whatever stands beside a token?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoder_cases import check_captured_step, random_ids
from decoders import CONFIGS, Lanes, capped, packed_model, ragged_rows_agree, random_model

from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.nn.switch import precision_switch

# Head sizes and inputs that the kernels take; 200 tokens reach into a second chunk of 128 keys.
SHAPE = {"hidden_size": 128, "intermediate_size": 176, "head_dim": 32}
LENGTH = 200


def on_gpu(name: str, **options):
    return random_model(name, torch.bfloat16, **{**SHAPE, **options}).cuda()


def lanes(decoder: CudaDecoder, batch: int, slots: int = 256, **options) -> Lanes:
    return Lanes(decoder, batch, slots=slots, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_within_three_times_the_error_of_the_modules(name):
    """Attention multiplies probabilities rounded to bfloat16; the modules round elsewhere."""
    model, ids = on_gpu(name), random_ids(2, LENGTH)
    with torch.no_grad():
        stock = model(torch.tensor(ids).cuda()).logits.double()
    decoder = CudaDecoder(model)
    out = capped(torch.stack(lanes(decoder, 2).feed(ids)), decoder)
    with torch.no_grad():
        exact = model.double()(torch.tensor(ids).cuda()).logits
    assert (out - exact).abs().mean() <= 3 * (stock - exact).abs().mean()
    assert (stock - exact).abs().mean() > 0


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in CONFIGS]
    + [("llama", {"head_dim": dim, "hidden_size": 256, "num_key_value_heads": 4}) for dim in (16, 64, 128, 256)],
)
def test_bits_do_not_depend_on_the_grouping(name, options):
    """One by one, in chunks, alone, beside 32 other rows, in another cache, behind padding: the same bits."""
    decoder, ids = CudaDecoder(on_gpu(name, **options)), random_ids(33, LENGTH)
    few = ids[:3]
    together = torch.stack(lanes(decoder, 3).feed(few))
    single = lanes(decoder, 3)
    steps = [torch.stack(single.feed([row[i : i + 1] for row in few])) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, dim=1), together)
    crowd = lanes(decoder, 33, slots=1024)
    pieces = [crowd.feed([row[first : first + 9] for row in ids], padding=first % 2) for first in range(0, LENGTH, 9)]
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), together[1])
    assert torch.equal(lanes(decoder, 1, slots=512).feed(ids[2:3], padding=7)[0], together[2])
    ragged = lanes(decoder, 3, rows=5)
    ragged_rows_agree(ragged, ids, together, 140, 19)
    assert (ragged.cache[:, :, 3:] == torch.tensor(1e4, dtype=torch.bfloat16)).all()


@pytest.mark.parametrize(("weights", "settings"), [("mxfp4", {}), ("int4", {}), ("int4", {"symmetric": False})])
@pytest.mark.parametrize("name", ["llama-tied-biases", "gemma3", "phi3"])
def test_packed_weights_give_what_they_give_on_the_cpu(name, weights, settings):
    model = packed_model(name, weights, torch.bfloat16, keep_head=weights == "int4", **settings)
    ids = random_ids(2, 40)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    there = copy.deepcopy(model).cuda()
    cpu, gpu = CudaDecoder(model), CudaDecoder(there)
    for bits in precision_switch(model).bit_choices:
        expected = torch.stack(Lanes(cpu, 2).feed(ids, bits=bits)).float()
        out = torch.stack(lanes(gpu, 2).feed(ids, bits=bits))
        off = (out.float().cpu() - expected).abs().mean() / expected.abs().mean()
        # At 4 bits a last bit of float32 moves an activation by a whole step, a seventh of its row's largest, and a
        # tiny model of random weights amplifies that.
        assert off < (0.25 if bits.activation == 4 else 0.04), (bits, off)
        single = lanes(gpu, 2)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids], bits=bits)) for i in range(40)]
        assert torch.equal(torch.cat(steps, dim=1), out), bits
    for key, tensor in there.state_dict().items():
        assert torch.equal(tensor.cpu(), before[key]), key


def test_a_captured_step_is_the_step():
    check_captured_step(CudaDecoder(on_gpu("qwen3")))
