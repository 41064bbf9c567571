"""Does the decoder of a nested model compute the very bits of the BF16 model, and its draft what the modules draft?"""

from __future__ import annotations

import copy

import pytest
import torch
from decoders import Lanes, packed_model, random_model
from torch import nn

import hf_mlspec
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.engine import Guess
from hf_mlspec.nn.nested import NestedEmbedding, NestedLinear
from hf_mlspec.nn.switch import PrecisionSwitch, precision_switch
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import OWN_BITS, Bits

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
compiled = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
SHAPE = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
NAMES = ["llama", "llama-tied-biases", "qwen2-windows", "qwen3", "mistral", "gemma2", "gemma3", "phi3"]
LENGTH = 21
DRAFTS = [Bits(4, 16), Bits(4, 8)]


def dense_model(name: str) -> nn.Module:
    """With escapes in linears of every kind, and in the head."""
    model = random_model(name, torch.bfloat16, **SHAPE)
    with torch.no_grad():
        for step, module in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
            if step % 3 == 0:
                module.weight[step % len(module.weight), step % 96] = 2.0**-80
        model.lm_head.weight[17, 3] = -(2.0**-90)
    return model


def nested(model: nn.Module, codebook: str = "lloyd_max") -> nn.Module:
    """The model itself, every linear nested, and the table where it is tied: `nest` would keep tensors of so few rows
    that have escapes."""
    switch, head, table = PrecisionSwitch("nested"), model.get_output_embeddings(), model.get_input_embeddings()
    for path, linear in list(model.named_modules()):
        if type(linear) is nn.Linear:
            layer = NestedLinear.from_linear(linear, path, switch, codebook=codebook)
            model.set_submodule(path, layer)
            if linear is head and table.weight is linear.weight:
                model.set_input_embeddings(NestedEmbedding(layer, table))
    return model


def random_ids(batch: int) -> list[list[int]]:
    return torch.randint(1, 199, (batch, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()


def on_device(model: nn.Module, bits: Bits = OWN_BITS, decoder: CudaDecoder | None = None) -> torch.Tensor:
    ids = random_ids(2)
    return torch.stack(Lanes(decoder or CudaDecoder(model), len(ids)).feed(ids, bits=bits))


def on_cpu(model: nn.Module, bits: Bits = OWN_BITS) -> torch.Tensor:
    ids = torch.tensor(random_ids(2))
    runner = CpuEngine(model, CpuDecoder(model), capacity=LENGTH, bits=bits)
    runner.start(2, torch.device("cpu"))
    rows = [row[:1] for row in ids.tolist()]
    return runner.feed(rows, Guess(ids[:, 1:], [LENGTH - 1] * 2))


@pytest.mark.parametrize("name", NAMES)
def test_on_a_device_it_is_the_model_it_was_made_of(name):
    dense = dense_model(name)
    model = nested(copy.deepcopy(dense))
    tied = dense.get_input_embeddings().weight is dense.lm_head.weight
    assert isinstance(model.get_input_embeddings(), NestedEmbedding) is tied
    before = hf_mlspec.resident_bytes(model)
    assert torch.equal(on_device(model), on_device(dense))
    state = model.state_dict()
    assert hf_mlspec.resident_bytes(model) <= 1.02 * before
    expected = nested(copy.deepcopy(dense)).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)


@compiled
@pytest.mark.parametrize("name", NAMES)
def test_compiled_it_is_the_model_it_was_made_of(name):
    dense = dense_model(name)
    model = nested(copy.deepcopy(dense))
    assert torch.equal(on_cpu(model), on_cpu(dense))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(on_cpu(model), on_cpu(dense))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["llama-tied-biases", "qwen3", "gemma3", "phi3"])
@pytest.mark.parametrize("way", [on_device, pytest.param(on_cpu, marks=compiled)])
def test_drafts_are_near_the_modules_and_said_by_call_or_switch(name, way):
    model = nested(dense_model(name))
    exact, seen = way(model), []
    for bits in DRAFTS:
        out = way(model, bits)
        with precision_switch(model).at(bits), torch.no_grad():
            modules = model(torch.tensor(random_ids(2))).logits
            assert torch.equal(way(model), out)
        assert (out - modules).abs().max() < 0.08 * modules.abs().max(), bits
        seen.append(out)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], exact)


@pytest.mark.parametrize("way", [on_device, pytest.param(on_cpu, marks=compiled)])
def test_codebooks_of_their_own_draft_apart(way):
    """q, k, v whose draft codes mean different numbers are one exact weight and three drafts."""
    model = nested(dense_model("llama-tied-biases"), codebook="fitted")
    attention = model.model.layers[0].self_attn
    books = {tuple(getattr(attention, f"{n}_proj").weight_codebook.tolist()) for n in "qkv"}
    if len(books) == 1:
        with torch.no_grad():
            attention.k_proj.weight_codebook[0] += 1
    dense = hf_mlspec.unnest(copy.deepcopy(model))
    assert torch.equal(way(model), way(dense))
    with precision_switch(model).at("nested4"), torch.no_grad():
        modules = model(torch.tensor(random_ids(2))).logits
    assert (way(model, Bits(4, 16)) - modules).abs().max() < 0.08 * modules.abs().max()


@pytest.mark.parametrize("name", ["llama-tied-biases", "phi3"])
@pytest.mark.parametrize("way", [on_device, pytest.param(on_cpu, marks=compiled)])
def test_planes_are_near_their_modules(name, way):
    model, outputs = packed_model(name, "planes", torch.bfloat16, keep_head=False), []
    for count in (8, 4, 2, 1):
        out = way(model, Bits(count, 16))
        with precision_switch(model).at(f"planes{count}"), torch.no_grad():
            modules = model(torch.tensor(random_ids(2))).logits
            assert torch.equal(way(model), out)
        assert (out - modules).abs().max() < 0.08 * modules.abs().max(), count
        outputs.append(out)
    assert torch.equal(way(model), outputs[0])
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("weights", ["nested", "planes"])
@pytest.mark.parametrize("way", [on_device, pytest.param(on_cpu, marks=compiled)])
def test_bits_that_the_weights_do_not_have_are_refused(weights, way):
    model = packed_model("llama", weights, torch.bfloat16)
    with pytest.raises(ValueError, match=r"8.*choose (one of \(.*16\)|16)"):
        way(model, Bits(4, 8) if weights == "planes" else Bits(16, 8))
    if weights == "planes":
        with pytest.raises(ValueError, match=r"are \(9, 16\)|weight_bits is 9, the weight stores 8"):
            way(model, Bits(9, 16))


def test_joined_groups_are_views_that_are_found_again():
    """On a device q|k|v is one weight; a second decoder over the same modules moves and copies nothing."""
    model = nested(dense_model("qwen2-windows"))
    first = CudaDecoder(model)
    assert first.extra_bytes == 0
    attention = model.model.layers[1].self_attn
    assert len({getattr(attention, f"{n}_proj").weight_low.untyped_storage().data_ptr() for n in "qkv"}) == 1
    addresses, bytes_before = [p.data_ptr() for p in model.parameters()], hf_mlspec.resident_bytes(model)
    second = CudaDecoder(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert hf_mlspec.resident_bytes(model) == bytes_before
    assert torch.equal(on_device(model, decoder=first), on_device(model, decoder=second))
    odd = attention.q_proj.switch
    attention.q_proj.switch = PrecisionSwitch("nested")
    with pytest.raises(ValueError, match=r"q, k, v projections are 3 weights of 2 kinds \(format, group size, zero"):
        CudaDecoder(model)
    attention.q_proj.switch = odd


@pytest.mark.parametrize("built", ["cuda", pytest.param("cpu", marks=compiled)])
def test_a_decoder_is_kept_until_weights_or_bits_change(built):
    model = nested(dense_model("llama-tied-biases"))
    first = decoder_of(model, built)
    assert decoder_of(model, built) is first
    assert first.bit_choices == ((16, 16), (4, 16), (4, 8))
    precision_switch(model).bits = Bits(4, 16)
    second = decoder_of(model, built)
    assert second is not first
    precision_switch(model).bits = Bits(16, 16)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert decoder_of(model, built) is not second
