"""On a GPU: does prepare share every weight, notice changes, and refuse what its kernels do not serve?"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from decoders import Lanes, random_model
from torch import nn
from transformers import AutoModelForCausalLM, FlexOlmoConfig, LlamaConfig
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.nn.linear import KernelLinear
from hf_mlspec.nn.state import is_prepared

SHAPE = {"hidden_size": 128, "intermediate_size": 176, "head_dim": 32}
IDS = [[5, 9, 3, 77, 120]]


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


def small():
    return random_model("llama", torch.bfloat16, **SHAPE).cuda()


def logits(model: nn.Module) -> torch.Tensor:
    return Lanes(decoder_of(model, "cuda"), 1).feed(IDS)[0]


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.fixture(scope="module")
def large():
    """0.5 GB of bfloat16 in the proportions of Llama 3."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=7168, num_hidden_layers=4, num_attention_heads=16,
                         num_key_value_heads=4, vocab_size=32768, tie_word_embeddings=True)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def test_no_second_copy_of_dense_weights(large):
    torch.ones(8, 8, device="cuda").matmul(torch.ones(8, 8, device="cuda"))  # its library takes 32 MiB once
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    hf_mlspec.prepare(large)
    assert abs(allocated() - before) < 0.01 * before
    group = 2 * large.config.intermediate_size * large.config.hidden_size * 2
    assert torch.cuda.max_memory_allocated() - before < 1.2 * group  # one gate|up at a time
    assert is_prepared(large)
    hf_mlspec.restore(large)


def test_no_second_copy_of_packed_weights(large):
    hf_mlspec.restore(hf_mlspec.prepare(large))  # what a process allocates once is there
    start = allocated()
    cast = hf_mlspec.direct_cast(large)
    size = allocated() - start
    assert size < 0.3 * hf_mlspec.resident_bytes(large)
    torch.cuda.reset_peak_memory_stats()
    decoder = decoder_of(cast, "cuda")
    assert decoder.extra_bytes == 0
    assert allocated() - start < 1.01 * size + 2**21  # and rotary tables
    assert torch.cuda.max_memory_allocated() - start - size < 2**29  # one group, and what its tiling needs at once
    del cast, decoder
    assert allocated() - start < 2**21


@pytest.mark.filterwarnings("ignore:direct_cast:UserWarning")  # 176 is no multiple of 32
def test_a_cast_has_the_codes_of_one_made_on_the_cpu():
    model = small()
    here = hf_mlspec.direct_cast(copy.deepcopy(model).cpu(), activation_bits=16).state_dict()
    there = hf_mlspec.direct_cast(model).state_dict()
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name].cpu()), name


def test_saved_and_loaded(tmp_path):
    model = small()
    hf_mlspec.prepare(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.cpu(), again.state_dict()[name]), name


def test_changes_and_moves_are_noticed():
    model = hf_mlspec.prepare(small())
    first, before = decoder_of(model, "cuda"), logits(model)
    assert decoder_of(model, "cuda") is first
    model.cpu().cuda()
    assert decoder_of(model, "cuda") is not first
    assert torch.equal(logits(model), before)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(2)
    assert not torch.equal(logits(model), before)
    twin = copy.deepcopy(model)
    assert not is_prepared(twin)
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_are_refused(dtype, caplog):
    model = small().to(dtype)
    with pytest.raises(ValueError, match=f"weight is {dtype} on cuda:0, where the kernels take bfloat16: load"):
        hf_mlspec.prepare(model)
    assert decoder_of(model, "cuda") is None
    assert f"runs module by module: its weights are {dtype}, on cuda:0 load it in bfloat16" in caplog.text


def test_a_model_on_two_devices_is_refused(caplog):
    model = small()
    model.model.layers[1].cpu()
    with pytest.raises(ValueError, match="the model is on cuda:0 and cpu; a compiled decoder needs it on one device"):
        hf_mlspec.prepare(model)
    assert decoder_of(model, "cuda") is None
    assert "it is on cuda:0 and cpu" in caplog.text


def test_an_unknown_architecture_is_served_linear_by_linear(caplog):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = FlexOlmoConfig(**shape, num_key_value_heads=2, vocab_size=128, num_experts=2, num_experts_per_tok=1,
                            pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
    ids = torch.randint(1, 100, (1, 9), device="cuda")
    with torch.no_grad():
        stock = model(ids).logits
        hf_mlspec.prepare(model)
        assert type(model.model.layers[0].self_attn.q_proj) is KernelLinear
        assert "FlexOlmoForCausalLM" in caplog.text
        torch.testing.assert_close(model(ids).logits, stock, atol=0.02, rtol=0.05)
    hf_mlspec.restore(model)
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
