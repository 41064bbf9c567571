"""Does a model with LoRA adapters run compiled, as its modules say, and is every change of them noticed?"""

from __future__ import annotations

import copy

import pytest
import torch
from lora import Linear, add_lora
from models import tiny
from torch import nn

import hf_mlspec
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.engines.cuda.decoder import CudaDecoder
from hf_mlspec.integration.scoring import token_logprobs
from hf_mlspec.nn.adapters import LowRank, low_rank_of, remove_adapters
from hf_mlspec.nn.linear import Mxfp4Linear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="no compiled kernels")
KINDS = ("llama", "phi3", "gemma3", "qwen2")
IDS = [[5, 9, 3, 22, 41, 7, 30], [8, 8, 2, 19]]


def logprobs(model) -> list[torch.Tensor]:
    """What the compiled decoder says."""
    assert engine_of(model).name == "cpu"
    return [row.logprobs for row in token_logprobs(model, IDS)]


def expected(model) -> list[torch.Tensor]:
    """What a float64 copy of the modules says."""
    exact, rows = copy.deepcopy(model).double(), []
    for row in IDS:
        scores = torch.log_softmax(exact(torch.tensor([row])).logits[0, :-1], -1)
        rows.append(scores.gather(1, torch.tensor(row[1:])[:, None])[:, 0].float())
    return rows


def near(model, tolerance: float = 2e-4) -> None:
    for own, right in zip(logprobs(model), expected(model), strict=True):
        torch.testing.assert_close(own, right, atol=tolerance, rtol=tolerance)


def written(model, levels=(), count: int = 12, **options) -> list:
    ids = torch.tensor([[5, 9, 3, 22], [8, 8, 2, 19]])
    return model.generate(
        ids, max_new_tokens=count, do_sample=False, eos_token_id=None, assistant_models=list(levels), **options
    ).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_run_beside_the_linears(kind):
    model = tiny(kind, dtype=torch.float32)
    plain = logprobs(model)
    add_lora(model)
    near(model)
    assert not torch.allclose(plain[0], logprobs(model)[0], atol=1e-2)


@pytest.mark.parametrize("place", ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_any_linear_alone(place):
    model = tiny("llama", dtype=torch.float32)
    assert len(add_lora(model, (place,), rank=5)) == 2
    near(model)


def test_a_rank_of_many_threads_has_the_bits_of_one():
    model = tiny("llama", dtype=torch.float32)
    add_lora(model, rank=21)
    model.to(torch.bfloat16)
    alone = logprobs(model)
    torch.set_num_threads(3)
    try:
        assert all(map(torch.equal, alone, logprobs(model)))
    finally:
        torch.set_num_threads(1)


def test_several_adapters_at_once():
    model = tiny("llama", dtype=torch.float32)
    for layer in add_lora(model):
        layer.add("other", 3, scale=-1.5)
        layer._active_adapter = ["default", "other", "unknown"]
    near(model)


def test_every_change_is_noticed():
    model = tiny("llama", dtype=torch.float32)
    bare = logprobs(model)
    layers = add_lora(model)
    seen = [bare, logprobs(model)]
    for layer in layers:
        layer.add("other", 2)
    assert all(map(torch.equal, seen[-1], logprobs(model)))  # one that is not active adds nothing

    def change(how) -> None:
        for layer in layers:
            how(layer)
        near(model)
        seen.append(logprobs(model))
        assert not any(all(map(torch.equal, seen[-1], before)) for before in seen[:-1])

    change(lambda layer: setattr(layer, "_active_adapter", ["other"]))
    change(lambda layer: layer.scaling.update(other=2.0))
    change(lambda layer: nn.init.normal_(layer.lora_A["other"].weight, std=0.2))
    for layer in layers:
        layer._disable_adapters = True
    assert all(map(torch.equal, bare, logprobs(model)))
    assert low_rank_of(layers[0]) is None


@pytest.mark.parametrize("levels", [["mxfp4"], ["mxfp4", "prompt_lookup"], ["early_exit:1"]])
def test_a_chain_writes_what_its_target_with_adapters_writes(levels):
    model = tiny("llama", dtype=torch.bfloat16)
    add_lora(model)
    alone = written(model)
    assert written(model, levels) == alone
    assert written(remove_adapters(copy.deepcopy(model))) != alone


def test_the_cast_is_of_the_plain_base():
    model = tiny("llama", dtype=torch.bfloat16)
    plain = hf_mlspec.direct_cast(model)
    add_lora(model)
    names = [name for name, _ in model.named_modules()]
    cast = hf_mlspec.direct_cast(model)
    assert [name for name, _ in model.named_modules()] == names
    layer = cast.model.layers[0].self_attn.q_proj
    assert type(layer) is Mxfp4Linear
    assert torch.equal(layer.weight_packed, plain.model.layers[0].self_attn.q_proj.weight_packed)
    assert cast.model.embed_tokens.weight is model.model.embed_tokens.weight


def test_a_nested_base_beside_adapters():
    model = tiny("llama", dtype=torch.bfloat16)
    add_lora(model)
    alone, before = written(model), logprobs(model)
    assert hf_mlspec.nest(model) is model
    assert all(map(torch.equal, before, logprobs(model)))
    assert written(model, ["nested"]) == alone
    hf_mlspec.unnest(model)
    assert type(model.model.layers[0].mlp.up_proj.base_layer) is nn.Linear
    assert all(map(torch.equal, before, logprobs(model)))


def test_switched_between_two_calls_of_a_prepared_chain():
    model = tiny("llama", dtype=torch.bfloat16)
    layers = add_lora(model)
    for layer in layers:
        layer.add("other", 3)
    hf_mlspec.prepare(model)
    for name in ("default", "other", "default"):
        for layer in layers:
            layer._active_adapter = [name]
        assert written(model, ["mxfp4"]) == written(model)
    hf_mlspec.restore(model)


def refuse(model, words: str) -> None:
    """The compiled decoder says why, and the model runs module by module."""
    with pytest.raises(UnknownArchitecture, match=words):
        CpuDecoder(model)
    assert engine_of(model).name == "modules"


def test_other_adapters_run_module_by_module():
    model = tiny("llama", dtype=torch.float32)
    layers = add_lora(model)
    layers[3].lora_variant["default"] = object()
    refuse(model, r"adapter 'default' is a variant of LoRA \(object\) \(model\.layers\.0\.self_attn\.o_proj\)")
    layers[3].lora_variant.clear()
    layers[3].lora_B["default"].bias = nn.Parameter(torch.ones(32))
    refuse(model, "adapter 'default' has a bias")
    layers[3].lora_B["default"].bias = None
    layers[3].train()
    refuse(model, r"in training mode .*o_proj.*model\.eval\(\)")
    layers[3].eval()
    assert engine_of(model).name == "cpu"
    layers[3].base_layer.register_forward_hook(lambda *_: None)
    refuse(model, "has forward hooks")


def test_adapters_of_another_kind_and_of_the_head_run_module_by_module():
    model = tiny("llama", dtype=torch.float32)
    other = type("Linear", (nn.Module,), {"__module__": "peft.tuners.ia3.layer"})()
    other.base_layer = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = other.eval()
    refuse(model, r"has a peft\.tuners\.ia3\.layer\.Linear")
    model = tiny("llama", dtype=torch.float32)
    model.lm_head = Linear(model.lm_head, 3)
    refuse(model, "its lm_head carries adapters")


def scores(decoder: CudaDecoder, row: list[int]) -> torch.Tensor:
    """Logits of all tokens of a row, by the list of kernels of GPUs, here through the same ops on the CPU."""
    ids, starts = torch.tensor([row], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    shape = decoder.num_layers, 2, 1, decoder.sizes.kv_heads, len(row), decoder.sizes.head_dim
    kv = torch.zeros(shape, dtype=decoder.dtype)
    return decoder.forward(ids, starts, torch.full((1,), len(row), dtype=torch.int32), kv)


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_of_gpus_adds_them(kind):
    model = tiny(kind, dtype=torch.float32)
    (layer, *_) = add_lora(model, ("q_proj", "v_proj", "qkv_proj", "gate_proj", "down_proj"), rank=3)
    layer.add("other", 2)
    layer._active_adapter = ["default", "other"]
    exact = copy.deepcopy(model).double()
    decoder = CudaDecoder(model)
    assert decoder.extra_bytes > 0
    for row in IDS:
        found, right = scores(decoder, row).double(), exact(torch.tensor([row])).logits[0]
        if decoder.logit_softcap:
            found = decoder.logit_softcap * torch.tanh(found / decoder.logit_softcap)
        torch.testing.assert_close(found, right, atol=2e-4, rtol=2e-4)


def test_the_decoder_of_gpus_refuses_what_it_would_leave_out():
    model = tiny("llama", dtype=torch.bfloat16)
    model.lm_head = Linear(model.lm_head, 3)
    with pytest.raises(UnknownArchitecture, match="its lm_head carries adapters; those of attention and MLP alone"):
        CudaDecoder(model)
    model = tiny("llama", dtype=torch.bfloat16)
    (layer, *_) = add_lora(model)
    layer.lora_B["default"].bias = nn.Parameter(torch.ones(32))
    with pytest.raises(UnknownArchitecture, match=r"adapter 'default' has a bias"):
        CudaDecoder(model)


def test_what_the_decoder_holds():
    model = tiny("llama", dtype=torch.bfloat16)
    (layer, *_) = add_lora(model)
    found = low_rank_of(layer.to(torch.bfloat16))
    assert isinstance(found, LowRank)
    assert found.down.dtype == found.up.dtype == torch.float32
    assert torch.equal(found.up, layer.lora_B["default"].weight.float() * 0.5)


def test_peft_itself():
    """The same through PEFT, where it is installed: a PeftModel, switched, disabled and merged."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed (extra test)")
    model = tiny("llama", dtype=torch.bfloat16)
    bare = written(model, ["mxfp4"])
    config = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, **config)).eval()
    wrapped.add_adapter("other", peft.LoraConfig(r=3, use_rslora=True, **config))
    wrapped.eval()
    assert hf_mlspec.prepare(wrapped) is wrapped
    seen = [bare]
    for name in ("default", "other"):
        wrapped.set_adapter(name)
        wrapped.eval()
        assert engine_of(model).name == "cpu"
        near(model, 0.1)
        seen.append(written(wrapped, ["mxfp4"]))
        assert seen[-1] == written(wrapped) == written(wrapped, ["early_exit:1", "prompt_lookup"])
    assert seen[0] != seen[1] != seen[2]
    assert hf_mlspec.last_stats(wrapped) is hf_mlspec.last_stats(model) is not None
    with wrapped.disable_adapter():
        assert written(wrapped, ["mxfp4"]) == bare
    wrapped.merge_adapter()
    assert engine_of(model).name == "cpu"
    near(model, 0.1)
    assert written(wrapped, ["mxfp4"]) == written(wrapped)
    cast = hf_mlspec.direct_cast(wrapped)
    assert not any("peft" in type(module).__module__ for module in cast.modules())
    (done,) = hf_mlspec.generate_stream(wrapped, [[5, 9, 3]], max_new_tokens=3, eos_token_id=None)
    assert done.error is None
    prompts = peft.get_peft_model(
        tiny("llama", dtype=torch.float32), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match=r"prepare: a PeftModel.* whose prompts are learned"):
        hf_mlspec.prepare(prompts)
