"""Does nesting keep every bit of a model, in place, within its memory, and undo itself when it fails?"""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_mlspec
from hf_mlspec.formats import NestedWeight
from hf_mlspec.nn import nest as nest_module
from hf_mlspec.nn.calibration import by_memory
from hf_mlspec.nn.castable import is_nested
from hf_mlspec.nn.linear import KernelLinear
from hf_mlspec.nn.nested import NestedEmbedding, NestedLinear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.models import tiny

BF16 = torch.bfloat16
IDS = torch.arange(3, 17).view(2, 7)
KINDS = ["llama", "llama-tied", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:no compiled kernel"),
    pytest.mark.filterwarnings("ignore:nest. .* stay as they are"),
]


def model_of(kind: str, **options):
    """Gemma's are tied by themselves."""
    if kind == "llama-tied":
        return tiny("llama", dtype=BF16, tie_word_embeddings=True, **options)
    return tiny(kind, dtype=BF16, **options)


def bits(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same_bits(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def kinds_of(model) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_is_nested_and_comes_back(kind):
    model = model_of(kind)
    before, modules, tied = bits(model), kinds_of(model), dict(model.all_tied_weights_keys)
    config, logits = model.config.to_dict(), model(IDS).logits
    assert hf_mlspec.nest(model) is model
    assert all(type(module) is not nn.Linear for module in model.modules())
    for name, module in model.named_modules():
        if isinstance(module, NestedLinear):
            weight = before.get(f"{name}.weight", before["model.embed_tokens.weight"])
            assert torch.equal(module.dequantized(BF16), weight)
    assert isinstance(model.get_input_embeddings(), NestedEmbedding) == bool(tied)
    assert model.all_tied_weights_keys == {}
    model.tie_weights()  # finds nothing to tie
    found = model(IDS).logits
    assert torch.allclose(found, logits, rtol=0.02, atol=0.02 * float(logits.detach().abs().max()))
    assert hf_mlspec.unnest(model) is model
    assert same_bits(bits(model), before)
    assert kinds_of(model) == modules
    assert model.all_tied_weights_keys == tied
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == bool(tied)
    assert model.config.to_dict() == config
    assert torch.equal(model(IDS).logits, logits)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_model_notices_and_writes_the_same(kind):
    model = hf_mlspec.prepare(model_of(kind))
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    scores = {"return_dict_in_generate": True, "output_logits": True}
    alone = model.generate(**inputs, **options, **scores)
    hf_mlspec.nest(model)
    nested = model.generate(**inputs, **options, **scores)
    assert torch.equal(nested.sequences, alone.sequences)
    assert all(torch.equal(own, other) for own, other in zip(nested.logits, alone.logits, strict=True))
    assert torch.equal(model.generate(**inputs, **options, assistant_models=["nested"]), alone.sequences)
    hf_mlspec.unnest(model)
    assert torch.equal(model.generate(**inputs, **options), alone.sequences)


def test_codebooks_change_only_the_draft():
    drafts = {}
    for codebook in ("lloyd_max", "mxfp4", "fitted"):
        model = hf_mlspec.nest(model_of("llama"), codebook)
        layer = model.model.layers[0].mlp.up_proj
        drafts[codebook] = (layer.dequantized_draft() - layer.dequantized(torch.float32)).square().mean()
        assert model.config.quantization_config.codebook == codebook
    assert drafts["fitted"] <= drafts["lloyd_max"] < drafts["mxfp4"]


def test_memory_stays_within_a_twentieth():
    config = LlamaConfig(vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=24,
                         num_attention_heads=4, tie_word_embeddings=True)  # fmt: skip
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:  # from the first allocation on
        model = AutoModelForCausalLM.from_config(config, dtype=BF16)
        size = hf_mlspec.resident_bytes(model)
        with record_function("nesting"):
            hf_mlspec.nest(model)
    events = sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begin = next(event.start_ns() for event in events if event.name() == "nesting")
    now, seen = 0, []
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            seen += [now] if event.start_ns() >= begin else []
    assert hf_mlspec.resident_bytes(model) <= 1.02 * size
    assert size < max(seen) <= 1.05 * size
    assert seen[-1] <= 1.03 * size


def test_nothing_keeps_the_wide_weights():
    model = model_of("llama-tied")
    wide = sum(parameter.nbytes for parameter in model.parameters() if parameter.ndim == 2)
    rest = hf_mlspec.resident_bytes(model) - wide
    hf_mlspec.nest(model)
    codebooks = 8 * sum(map(is_nested, model.modules()))
    assert hf_mlspec.resident_bytes(model) == rest + wide * 65 // 64 + codebooks


@pytest.mark.parametrize("stop", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch, kind, stop):
    model = model_of(kind)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = KernelLinear.over(mlp.up_proj)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before, modules, tied = bits(model), kinds_of(model), dict(model.all_tied_weights_keys)
    config, learn = model.config.to_dict(), [p.requires_grad for p in model.parameters()]
    count, make = len([m for m in model.modules() if isinstance(m, nn.Linear)]), NestedWeight.from_dense
    monkeypatch.setattr(nest_module, "can_nest_in_place", lambda *args, **kwargs: False)  # test_nest_in_place.py
    for fail_at in (1, 6, count):
        calls = []

        def failing(*args, calls=calls, fail_at=fail_at, **kwargs):
            calls.append(1)
            if len(calls) == fail_at:
                raise stop
            return make(*args, **kwargs)

        monkeypatch.setattr(nest_module.NestedWeight, "from_dense", failing)
        with pytest.raises(type(stop)):
            hf_mlspec.nest(model)
        assert same_bits(bits(model), before)
        assert kinds_of(model) == modules
        assert [p.requires_grad for p in model.parameters()] == learn
        assert model.all_tied_weights_keys == tied
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == bool(tied)
        assert model.config.to_dict() == config
    monkeypatch.setattr(nest_module.NestedWeight, "from_dense", make)
    hf_mlspec.nest(model)


def test_what_cannot_be_nested_stays_and_is_named_once():
    model = tiny("llama", dtype=BF16, intermediate_size=80)
    model.model.layers[0].self_attn.q_proj.float()
    shared = model.model.layers[1].self_attn
    shared.k_proj.weight = shared.v_proj.weight
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hf_mlspec.nest(model)
    (said,) = [str(w.message) for w in told if str(w.message).startswith("nest: ")]
    assert said.startswith("nest: 5 weights of LlamaForCausalLM stay as they are: ")
    for words in ("model.layers.0.mlp.down_proj (in_features 80 is no multiple of 32)",
                  "model.layers.0.self_attn.q_proj (its weight is torch.float32)",
                  "model.layers.1.self_attn.k_proj (its weight is shared with a Linear)"):  # fmt: skip
        assert words in said
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear
    assert isinstance(model.model.layers[1].mlp.up_proj, NestedLinear)


def test_conv1d_stays(tmp_path):
    with pytest.warns(UserWarning, match=r"stay as they are: .*c_attn \(Conv1D\)"):
        model = hf_mlspec.nest(tiny("gpt2", dtype=BF16))
    assert isinstance(model.lm_head, NestedLinear)  # GPT-2's only nn.Linear, tied to its embedding
    assert isinstance(model.get_input_embeddings(), NestedEmbedding)


def with_escapes(model, rows: int):
    """A weight with a value far below its block's largest in each of so many rows."""
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[:rows, 0] = 2.0**-60
    return model


def test_few_escapes_are_kept_exactly_and_many_leave_the_weight_alone(tmp_path):
    few = with_escapes(tiny("llama", dtype=BF16, intermediate_size=256), 2)
    before = bits(few)
    hf_mlspec.nest(few)
    layer = few.model.layers[0].mlp.up_proj
    assert len(layer.weight_escape_index) == 2
    few.save_pretrained(tmp_path / "few")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "few")
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight_escape_value, torch.full((2,), 2.0**-60, dtype=BF16))
    assert same_bits(bits(hf_mlspec.unnest(again)), before)
    many = with_escapes(tiny("llama", dtype=BF16, intermediate_size=256), 3)
    with pytest.warns(UserWarning, match=r"up_proj \(3 values below 2\^-30 of their block's largest in 3 of 256 rows"):
        hf_mlspec.nest(many)
    many.save_pretrained(tmp_path / "many")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "many")
    assert type(again.model.layers[0].mlp.up_proj) is nn.Linear
    assert same_bits(bits(again), bits(many))


def test_training_mode_gradients_and_hooks_go_on():
    model = model_of("llama").train()
    seen = []
    model.lm_head.register_forward_hook(lambda *args: seen.append("head"))
    hf_mlspec.nest(model)
    assert all(module.training for module in model.modules())
    loss = model(IDS, labels=IDS).loss if not has_compiled_decoder() else model.eval()(IDS).logits.sum()
    assert torch.isfinite(loss)
    assert seen == ["head"]
    hf_mlspec.unnest(model)
    model(IDS)
    assert seen == ["head", "head"]


def test_copies_pickles_and_views_of_a_nested_model():
    model = hf_mlspec.nest(model_of("llama-tied"))
    logits = model(IDS).logits
    assert torch.equal(copy.deepcopy(model)(IDS).logits, logits)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(IDS).logits, logits)
    assert torch.equal(model.to("cpu")(IDS).logits, logits)
    view = hf_mlspec.early_exit(model, 1)
    assert hf_mlspec.resident_bytes(view, shared_with=model) == 0
    assert view(IDS).logits.shape == logits.shape


@pytest.mark.parametrize("format", ["mxfp4", "int3", "int2", "ternary"])
def test_a_cast_of_a_nested_model_is_that_of_the_plain_one(format):
    options = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    plain = tiny("llama", dtype=BF16, tie_word_embeddings=True, **options)
    wanted = bits(hf_mlspec.direct_cast(plain, format))
    nested = hf_mlspec.nest(copy.deepcopy(plain))
    draft = hf_mlspec.direct_cast(nested, format)
    found = bits(draft)
    missing = wanted.keys() - found.keys()
    assert missing <= {"model.embed_tokens.weight"}  # the draft reads the target's, in the target's head
    assert all(torch.equal(found[name], wanted[name]) for name in wanted.keys() - missing)
    assert torch.allclose(draft(IDS).logits, hf_mlspec.direct_cast(plain, format)(IDS).logits, atol=0.05, rtol=0.02)
    shared = hf_mlspec.resident_bytes(draft) - hf_mlspec.resident_bytes(draft, shared_with=nested.lm_head)
    assert shared == hf_mlspec.resident_bytes(nested.lm_head)


def test_calibration_lowers_the_error_of_outputs_and_nothing_else(monkeypatch):
    model = tiny("llama", dtype=BF16, hidden_size=64, intermediate_size=128, head_dim=16).train()
    plain = hf_mlspec.nest(copy.deepcopy(model))
    generator = torch.Generator().manual_seed(0)
    text = [torch.randint(3, 64, (8, 100), generator=generator), [5, 7, 11], torch.arange(3, 9, dtype=torch.int32)]
    groups = []
    monkeypatch.setattr(nest_module, "by_memory", partial(by_memory, most=1 << 16))
    collect = nest_module.hessians

    def counted(model, linears, samples):
        found = collect(model, linears, samples)
        groups.append(sorted(found))
        return found

    monkeypatch.setattr(nest_module, "hessians", counted)
    before = bits(model)
    hf_mlspec.nest(model, calibration=text)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert sum(map(len, groups)) == 15
    assert max(map(len, groups)) == 4  # 64 x 64 floats four times are the memory it may take
    better = 0
    for name, layer in plain.named_modules():
        if is_nested(layer):
            own = model.get_submodule(name)
            x = _inputs(plain, name, text[0])
            exact = layer.dequantized(torch.float32)
            errors = [(x @ (each.dequantized_draft() - exact).T).square().sum() for each in (own, layer)]
            better += bool(errors[0] < errors[1])
    assert better == 15
    assert same_bits(bits(hf_mlspec.unnest(model)), before)


def _inputs(model, name: str, ids: torch.Tensor) -> torch.Tensor:
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().float()))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])
