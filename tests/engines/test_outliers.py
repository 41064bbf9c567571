"""Does the compiled decoder read int4 weights with int8 outliers, wherever it packs activations?"""

from __future__ import annotations

import pytest
import torch
from decoders import Lanes, in_float64, packed_layers, random_model
from models import packed
from torch import nn

import hf_mlspec
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu import weights as cpu
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.engines.engine import Guess
from hf_mlspec.formats.hadamard import Hadamard, fitting_hadamard
from hf_mlspec.nn.switch import precision_switch
from hf_mlspec.nn.transforms import HADAMARD, ORDER, record_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import OWN_BITS

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
SHAPE = {"hidden_size": 256, "intermediate_size": 1152, "head_dim": 96}
SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # which read the inputs of which
IDS = torch.randint(1, 199, (2, 37), generator=torch.Generator().manual_seed(7))


def order_of(path: str, size: int) -> torch.Tensor:
    block, _, leaf = path.rpartition(".")
    seed = sum(map(ord, f"{block}.{SHARED.get(leaf, leaf)}"))
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).int()


def model_of(name: str = "llama", ordered: bool = True, keep_head: bool = False) -> nn.Module:
    model = random_model(name, torch.float32, **SHAPE, tie_word_embeddings=False)
    packed(model, "int4_int8", keep_head=keep_head)
    for path, module in packed_layers(model) if ordered else ():
        module.transform_(ORDER, {"order": order_of(path, module.in_features)})
    return model


def scored(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    engine = CpuEngine(model, CpuDecoder(model), capacity=ids.shape[1], bits=OWN_BITS)
    engine.start(len(ids), torch.device("cpu"))
    return engine.feed([row[:1] for row in ids.tolist()], Guess(ids[:, 1:], [ids.shape[1] - 1] * len(ids)))


@pytest.mark.parametrize("name", ["llama", "qwen2-windows", "gemma2", "phi3"])
def test_near_the_modules_and_float64_at_every_precision(name):
    model = model_of(name)
    with torch.no_grad():
        exact = in_float64(model)(IDS).logits
        for word, near in (("w4a16", 0.02), ("w4a8", 0.03), ("w4a4", 0.3)):
            with precision_switch(model).at(word):
                modules, out = model(IDS).logits, scored(model)
                alone = torch.cat([scored(model, IDS[row : row + 1]) for row in range(2)])
            assert (out - modules).abs().max() < near * modules.abs().max(), word
            assert torch.equal(out, alone), word
            if word == "w4a16":
                assert (out - exact).abs().max() < 0.02 * exact.abs().max()


@pytest.mark.parametrize("ordered", [False, True])
def test_the_decoder_of_gpus_joins_them_and_leaves_them_what_they_are(ordered):
    """Its list of ops, on the CPU."""
    model = model_of(ordered=ordered)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for word, near in (("w4a16", 0.01), ("w4a4", 0.3)):
        with precision_switch(model).at(word), torch.no_grad():
            modules, decoder = model(IDS).logits, CudaDecoder(model)
            got = torch.stack(Lanes(decoder, 2, slots=64).feed(IDS.tolist()))
        assert (got - modules).abs().max() < near * modules.abs().max(), word
        assert decoder.extra_bytes == 0
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_as_they_come_they_are_the_last_inputs():
    """An order that changes nothing, and none, have the same bits; outliers that are moved have others."""
    plain, same = model_of(ordered=False), model_of(ordered=False)
    for _, module in packed_layers(same):
        module.transform_(ORDER)
    for word in ("w4a16", "w4a4"):
        with precision_switch(plain).at(word), precision_switch(same).at(word):
            assert torch.equal(scored(plain), scored(same))
    assert not torch.equal(scored(plain), scored(model_of()))


def test_without_an_order_the_decoder_is_not_complete():
    model = model_of(keep_head=True)
    decoder = CpuDecoder(model)
    weight = cpu.read_weight(model.model.layers[-1].mlp.up_proj, "up")
    tensors = weight.weight, weight.scale, weight.bias
    decoder.handle.set_outliers("up", 256, 1152, *tensors, 16)
    engine = CpuEngine(model, decoder, capacity=8, bits=OWN_BITS)
    engine.start(1, torch.device("cpu"))
    with pytest.raises(ValueError, match="has not all of its linears yet"):
        engine.feed([[1]], Guess(IDS[:1, 1:2], [1]))
    with pytest.raises(ValueError, match=r"up\.order\[256\] is 7, expected 128: outliers are there twice"):
        decoder.handle.set_order("up", torch.cat([torch.arange(256), torch.full((128,), 7)]).int())
    with pytest.raises(ValueError, match="multiple of 128 from 256 on, not 128"):
        decoder.handle.set_outliers("up", 128, 1152, *tensors, 16)


@pytest.mark.parametrize("name", ["llama", "qwen2-windows"])
def test_rotated_inputs_of_o_and_down_run_compiled(name):
    model = model_of(name, ordered=False)
    plain = scored(model)
    heads = fitting_hadamard(model.config.num_attention_heads, 96)
    assert heads.size > 1
    for layer in model.model.layers:
        layer.self_attn.o_proj.transform_(HADAMARD, record_of(heads))
        layer.mlp.down_proj.transform_(HADAMARD, record_of(Hadamard(128, 1, 1)))
    for word, near in (("w4a16", 0.02), ("w4a8", 0.03), ("w4a4", 0.3)):
        with precision_switch(model).at(word), torch.no_grad():
            modules, out = model(IDS).logits, scored(model)
            alone = torch.cat([scored(model, IDS[row : row + 1]) for row in range(2)])
        assert (out - modules).abs().max() < near * modules.abs().max(), word
        assert torch.equal(out, alone), word
        if word == "w4a16":
            assert (out - plain).abs().max() > 0.1 * plain.abs().max()


def test_a_bfloat16_model_runs_compiled():
    model = model_of(keep_head=True).bfloat16()
    assert isinstance(decoder_of(model, "cpu"), CpuDecoder)
    inputs = {"input_ids": IDS, "do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(**inputs, assistant_models=[])
    assert torch.equal(model.generate(**inputs, assistant_models=["w4a4"]), alone)
    assert hf_mlspec.last_stats(model).levels[0].accepted > 0
