"""On a GPU: do int4 weights with int8 outliers multiply as their format says, alone, in a decoder and in chains?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, in_float64, random_model
from linear_cases import TOKENS, check_captured_products, check_with_the_kernels_of_every_gpu, needs_other_kernels
from models import packed, prompts
from torch import Tensor, nn

import hf_mlspec
from eval import random_packed
from hf_mlspec import ops
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.formats import activations
from hf_mlspec.formats.int4_int8 import OUTLIERS, Int4Int8Weight
from hf_mlspec.nn.int4_int8 import Int4Int8Linear
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.ops import tiles_cuda
from hf_mlspec.ops.operator import REFERENCES

pytestmark = pytest.mark.usefixtures("kernels_are_required")
SHAPES = ((7, 256), (128, 384), (200, 1152), (136, 4096), (4096, 2048), (8200, 640))
SHAPE = {"hidden_size": 256, "intermediate_size": 1152, "head_dim": 64, "tie_word_embeddings": False}
LENGTH = 60


class Case:
    """A weight ``[out, in]``, with every outlier code of -119 to 119, and inputs whose outliers are large."""

    def __init__(self, out: int, size: int, bits: int):
        draw = torch.Generator("cuda").manual_seed(out * size + bits)
        self.out, self.bits = out, bits
        dense = torch.randn(out, size, generator=draw, device="cuda") / size**0.5
        self.x = torch.randn(max(TOKENS), size, generator=draw, device="cuda").bfloat16()
        self.x[:, -OUTLIERS:] *= 10
        self.bias = torch.randn(out, generator=draw, device="cuda")
        self.weight = Int4Int8Weight.from_dense(dense)
        self.weight.weight_outlier[0, :120] = torch.arange(-119, 1, device="cuda")
        self.weight.weight_outlier[-1, :120] = torch.arange(120, device="cuda")
        self.tiles = ops.prepack_int4_int8(*self.weight.parts)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.int4_int8_linear(x, *self.tiles, self.out, bias, activation_bits=self.bits)

    def exact(self, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """float64: the product, and the sum of the magnitudes of what is added: codes, for outliers two nibbles."""
        x = self.x.float()
        if self.bits != 16:
            inputs, outliers = x.split([x.shape[1] - OUTLIERS, OUTLIERS], -1)
            x = torch.cat([rounded(inputs, self.bits), rounded(outliers, 8)], -1)
        x, weight = x.double(), self.weight.dequantize().double()
        nibbles = x[:, -OUTLIERS:].abs().sum(-1, keepdim=True) * 16 * self.weight.weight_outlier_scale.double()
        product = x @ weight.T
        return (product if bias is None else product + bias.double()), x.abs() @ weight.abs().T + nibbles


def rounded(x: Tensor, bits: int) -> Tensor:
    """To codes and back."""
    return activations.dequantize_rows(*activations.quantize_rows(x, 128, bits), 128)


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_and_bits_of_every_number_of_tokens(shape, bits):
    case = Case(*shape, bits)
    bias = case.bias if shape[0] % 2 else None
    every = case.multiply(case.x, bias)
    exact, magnitude = case.exact(bias)
    error = (every.double() - exact).abs()
    bound = exact.abs() * 2.0**-7.99 + 4e-6 * magnitude + 1e-30
    assert (error <= bound).all(), f"{(error / bound).max().item():.3g} of the bound"
    for tokens in TOKENS:
        for first in {0, min(3, len(case.x) - tokens)}:
            some = case.multiply(case.x[first : first + tokens], bias)
            assert torch.equal(some, every[first : first + tokens]), f"{tokens} tokens from {first} on"


@pytest.mark.parametrize(("bits", "clip"), [(16, 1.0), (8, 1.0), (4, 1.0), (4, 0.7)])
def test_near_the_cpu_and_plain_torch(bits, clip):
    case = Case(200, 1152, bits)
    how = {"activation_bits": bits, "activation_clip": clip}
    got = ops.int4_int8_linear(case.x[:9], *case.tiles, case.out, case.bias, **how)
    assert torch.equal(got, case.multiply(case.x[:9], case.bias)) == (clip == 1)
    plain = REFERENCES["int4_int8_linear"](case.x[:9], *case.tiles, case.out, case.bias, bits, clip)
    tiles = ops.prepack_int4_int8(*[part.cpu() for part in case.weight.parts])
    on_cpu = ops.int4_int8_linear(case.x[:9].cpu(), *tiles, case.out, case.bias.cpu(), **how)
    for other in (plain, on_cpu.cuda()):
        assert (got.float() - other.float()).abs().max() <= 2**-8 * got.float().abs().max()


@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_captured_chain_of_linears_waits_for_what_it_reads(tokens, bits):
    case = Case(1024, 1024, bits)
    check_captured_products(case.multiply, case.x[:tokens] / 10, case.x[-tokens:] / 10)


def test_layers_move_between_devices_and_keep_what_is_on_disk():
    layer = Int4Int8Linear.from_linear(nn.Linear(384, 136).bfloat16())
    x = torch.randn(5, 384).bfloat16()
    disk = {name: value.clone() for name, value in layer.state_dict().items()}
    on_cpu = layer(x)
    layer.to("cuda")
    on_gpu = layer(x.cuda())
    assert tiles_cuda.is_packed(layer.weight_tiles)
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=2e-2, rtol=1e-2)
    assert all(torch.equal(disk[name], value.cpu()) for name, value in layer.state_dict().items())
    layer.cpu()
    assert torch.equal(layer(x), on_cpu)


def test_operands_that_do_not_fit_are_named():
    case = Case(40, 256, 16)
    weight, scale = case.tiles
    with pytest.raises(ValueError, match=r"x has shape \[2, 384\], the weight takes in_features = 256"):
        case.multiply(torch.zeros(2, 384, device="cuda"))
    with pytest.raises(TypeError, match="scale_tiles is Float"):
        ops.int4_int8_linear(case.x, weight, scale.float(), 40)
    with pytest.raises(ValueError, match="weight_tiles have 256 columns, expected 384 or more"):
        ops.int4_int8_linear(case.x, *[part[:, :2].contiguous() for part in (weight, scale)], 40)


def model_of(ordered: bool) -> nn.Module:
    """Packed and on the GPU, each layer with an order of its own or of those that share its inputs."""
    model = packed(random_model("llama", torch.bfloat16, **SHAPE), "int4_int8", keep_head=False)
    return (random_packed.ordered(model) if ordered else model).cuda()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("word", "near"), [("w4a16", 0.05), ("w4a8", 0.12), ("w4a4", 0.8)])
def test_a_decoder_is_near_the_modules_and_steps_have_the_bits_of_prompts(word, near, ordered):
    model = model_of(ordered)
    ids = torch.randint(1, 199, (2, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.no_grad(), precision_switch(model).at(word):
        modules = model(torch.tensor(ids).cuda()).logits
        decoder = CudaDecoder(model)
        assert decoder.extra_bytes == 0
        together = torch.stack(Lanes(decoder, 2, slots=128).feed(ids))
        # At 4 bits other roundings of bfloat16 move codes, and random layers spread that; strangers are 1.4 apart.
        assert (together - modules).float().norm() < near * modules.float().norm()
        if word == "w4a16":
            exact = in_float64(model).cuda()(torch.tensor(ids).cuda()).logits
            assert (together - exact).abs().max() < 0.05 * exact.abs().max()
        single = Lanes(decoder, 2, slots=128)
        steps = [torch.stack(single.feed([row[i : i + 1] for row in ids])) for i in range(LENGTH)]
        assert torch.equal(torch.cat(steps, dim=1), together)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("levels", [["w4a8"], ["w4a4"], ["w4a8", "w4a4"], ["early_exit:1"]], ids=str)
def test_a_captured_chain_writes_what_the_target_alone_writes(levels, batch):
    model = hf_mlspec.prepare(model_of(ordered=True), engine="cuda")
    inputs = {name: value.cuda() for name, value in prompts([5, 9, 40, 3, 17, 8, 2, 11][:batch]).items()}
    options = {"do_sample": False, "max_new_tokens": 48, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, **options, assistant_models=[])
    chain = model.generate(**inputs, **options, assistant_models=levels, speculation_config={"num_draft_tokens": 3})
    assert torch.equal(chain, alone)
    assert hf_mlspec.last_stats(model).levels[0].drafted > 0


@needs_other_kernels
def test_the_kernels_for_every_gpu_pass_these_tests():
    check_with_the_kernels_of_every_gpu(__file__, "int4_int8_linear")
