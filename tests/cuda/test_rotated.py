"""On a GPU: has the Hadamard kernel the bits of plain torch, and do rotated models stay exact in chains?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, random_model
from models import packed, prompts
from torch import nn

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.calibration.rotation import rotate
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats.hadamard import ORDERS, Hadamard, fitting_hadamard
from hf_mlspec.nn.replace import transform_alike
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.ops.hadamard import matrix_on
from hf_mlspec.ops.operator import REFERENCES

SHAPE = {"hidden_size": 128, "intermediate_size": 7 * 64, "head_dim": 32, "tie_word_embeddings": False}
WIDTHS = (896, 1408, 2816, 4096, 4864, 5632, 9728, 11008, 13696, 14336, 18944, 25600, 28672, 29568)
LENGTH = 100


def alike(how: Hadamard, blocks: int, count: int) -> bool:
    seed = torch.Generator().manual_seed(how.size)
    shape = count, blocks * how.size * how.inner
    x = (torch.randn(shape, generator=seed) * torch.exp(2 * torch.randn(shape, generator=seed))).bfloat16().cuda()
    exact = REFERENCES["hadamard_rows"](x, matrix_on(how.order, x.device), how.size, how.inner)
    return torch.equal(ops.hadamard_rows(x, how), exact)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_has_the_bits_of_plain_torch(order):
    alone = ((1, 1), (2, 1), (8, 1), (16, 1), (32, 1), (64, 1), (256, 1), (512, 1), (1024, 1), (4096, 1))
    apart = ((4, 3), (2, 8), (8, 20), (2, 128), (4, 2), (16, 6), (32, 128), (64, 64), (128, 4))
    for powers, inner in alone + apart:
        if order * powers > 1 and order * powers * inner <= 12288:
            assert alike(Hadamard(order * powers, order, inner), 3, 5), (powers, inner)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 33, 700])
def test_widths_of_models_have_the_bits_of_plain_torch_in_any_number_of_rows(width, count):
    how = fitting_hadamard(width)
    if width == 28672 and torch.cuda.get_device_properties(0).shared_memory_per_block_optin < 4 * width:
        pytest.skip("this GPU has less shared memory than a matrix of 28,672 takes")
    assert alike(how, width // how.size, count)


@pytest.mark.parametrize("activation", range(4))
@pytest.mark.parametrize("count", [1, 33, 300])
def test_gated_rows_have_the_bits_of_two_calls(activation, count):
    cases = [(width // fitting_hadamard(width).size, fitting_hadamard(width)) for width in (448, 1408, 14336, 18944)]
    cases += [(3, Hadamard(28, 28, 3)), (2, Hadamard(16, 1, 3)), (5, Hadamard(4)), (2, Hadamard(32, 1, 128))]
    cases += [(4, Hadamard())]
    for blocks, how in cases:
        seed = torch.Generator().manual_seed(how.size)
        gate_up = torch.randn(count, 2 * blocks * how.size * how.inner, generator=seed).bfloat16().cuda()
        apart = ops.hadamard_rows(ops.gated(gate_up, activation), how)
        assert torch.equal(ops.gated_hadamard(gate_up, activation, how), apart), how


def test_the_bits_of_the_cpu():
    for how in (Hadamard(256), Hadamard(448, 28), Hadamard(28, 28, 64)):
        x = torch.randn(9, 2 * how.size * how.inner).bfloat16()
        assert torch.equal(ops.hadamard_rows(x.cuda(), how).cpu(), ops.hadamard_rows(x, how))


def rotated_model(weights: str = "int4", **settings) -> nn.Module:
    """Packed and on the GPU."""
    model = random_model("llama", torch.bfloat16, **SHAPE)
    rotate(model, seed=1)
    packed(model, weights, keep_head=False, **settings)
    transform_alike(model)
    return model.cuda()


@pytest.mark.parametrize("weights", ["int4", "mxfp4", "planes"])
def test_steps_and_prompts_have_the_same_bits(weights):
    model = rotated_model(weights)
    ids = torch.randint(1, 199, (2, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    decoder = CudaDecoder(model)
    together = torch.stack(Lanes(decoder, 2, slots=128).feed(ids))
    with torch.no_grad():
        modules = model(torch.tensor(ids).cuda()).logits
    assert (together - modules).abs().max() < 0.06 * modules.abs().max()
    assert_steps_are(decoder, ids, together)


def assert_steps_are(decoder: CudaDecoder, ids: list[list[int]], together: torch.Tensor) -> None:
    """Token by token the bits of the prompts at once."""
    single = Lanes(decoder, 2, slots=128)
    steps = [torch.stack(single.feed([row[i : i + 1] for row in ids])) for i in range(LENGTH)]
    assert torch.equal(torch.cat(steps, dim=1), together)


@pytest.mark.parametrize("word", ["w4a8", "w4a4"])
def test_few_activation_bits_too(word):
    model = rotated_model()
    ids = torch.randint(1, 199, (2, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    with precision_switch(model).at(word), torch.no_grad():
        decoder, modules = CudaDecoder(model), model(torch.tensor(ids).cuda()).logits
        together = torch.stack(Lanes(decoder, 2, slots=128).feed(ids))
        near = {"w4a8": 0.08, "w4a4": 0.7}[word]  # moved codes spread in random layers; strangers are 1.4 apart
        assert (together - modules).float().norm() < near * modules.float().norm()
        assert_steps_are(decoder, ids, together)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4"], ["w4a8", "w4a4"], ["early_exit:1"]], ids=str)
def test_a_captured_chain_writes_what_the_target_alone_writes(levels, batch):
    model = hf_mlspec.prepare(rotated_model(), engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40, 3, 17, 8, 2, 11][:batch]).items()}
    options = {"do_sample": False, "max_new_tokens": 48, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0
