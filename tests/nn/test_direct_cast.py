"""Does direct_cast give a model of its own that shares everything it does not cast, and leave the source untouched?"""

import copy
import warnings

import pytest
import torch
from torch import nn

from hf_mlspec import direct_cast, nest, resident_bytes
from hf_mlspec.nn.castable import require_dense, unfit
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.linear import Mxfp4Linear
from hf_mlspec.nn.packed import PackedModule

# A token of the models of experts goes to all of them: rounding cannot change its routing.
EXPERTS = ["mixtral-experts", "qwen3-experts", "gpt-oss-experts"]
MODELS = ["llama", "llama-tied", "qwen2-bias", "gemma2-tied", "gpt2-conv1d", *EXPERTS]
pytestmark = [
    pytest.mark.filterwarnings("ignore:direct_cast. .* stay as they are"),
    pytest.mark.filterwarnings("ignore:no compiled kernel"),
]


def packed(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedModule)}


def cast_weights(model, draft) -> int:
    """Numbers of ``model`` that are codes in ``draft``."""
    source, draft_names = dict(model.named_parameters()), dict(draft.named_parameters())
    cast = {name.removesuffix("_packed") for name in draft_names if name.endswith("_packed")}
    assert cast <= source.keys() | {"lm_head.weight"}
    return sum(model.get_parameter(name).numel() for name in cast)


def with_dequantized_weights(model, draft):
    """A copy of ``model`` whose linear weights are the numbers that ``draft`` computes with."""
    dense = copy.deepcopy(model)
    for name, layer in packed(draft).items():
        module = dense.get_submodule(name)
        if isinstance(layer, PackedExperts):
            dense.set_submodule(name, layer.dequantized_module(module.down_proj.dtype))
        else:
            module.weight = nn.Parameter(layer.dequantized(module.weight.dtype))
    return dense


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "tolerance"), [(16, 0.01), (8, 0.02)])
def test_logits_are_those_of_the_rounded_weights(tiny_model, ids, name, dtype, bits, tolerance):
    """But for activations, which are rounded to bfloat16 or to int8."""
    model = tiny_model(name, dtype)
    draft = direct_cast(model, activation_bits=bits)
    expected = with_dequantized_weights(model, draft)(ids).logits
    error = (draft(ids).logits - expected).abs().max()
    assert error > 0 or dtype == torch.bfloat16
    tolerance = tolerance if dtype == torch.float32 else 0.04
    assert error <= tolerance * max(1.0, float(expected.detach().abs().max()))
    assert (expected - model(ids).logits).abs().max() > 0.01  # the cast does change the model


def test_activations_are_int8_on_a_cpu_unless_said(tiny_model):
    model = tiny_model("llama")
    assert {layer.activation_bits for layer in packed(direct_cast(model)).values()} == {8}
    assert {layer.activation_bits for layer in packed(direct_cast(model, activation_bits=16)).values()} == {16}
    with pytest.raises(ValueError, match="activation_bits is 4: choose 16"):
        direct_cast(model, activation_bits=4)


@pytest.mark.parametrize("name", MODELS)
def test_materialized_logits_equal_those_of_the_rounded_weights(tiny_model, ids, name):
    model = tiny_model(name, torch.bfloat16)
    draft = direct_cast(model, materialize=True)
    logits, expected = draft(ids).logits, with_dequantized_weights(model, draft)(ids).logits
    if name in EXPERTS:  # transformers sums experts in another order
        assert torch.allclose(logits, expected, rtol=0, atol=0.02 * float(expected.detach().abs().max()))
    else:
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_everything_else_is_shared_and_no_wide_copy_stays(tiny_model, name):
    model = tiny_model(name, torch.bfloat16)
    draft = direct_cast(model)
    source = dict(model.named_parameters()) | dict(model.named_buffers())
    for key, tensor in (*draft.named_parameters(), *draft.named_buffers()):
        if key.endswith(("weight_packed", "weight_scale", "proj_packed", "proj_scale")):
            assert tensor.dtype == torch.uint8
        else:
            assert tensor is source[key], key
    cast_bytes = 2 * cast_weights(model, draft)
    assert resident_bytes(draft, shared_with=model) == cast_bytes * 17 // 64
    assert resident_bytes(draft) - resident_bytes(draft, shared_with=model) <= resident_bytes(model)
    left = [key for key, module in draft.named_modules() if type(module) is nn.Linear]
    assert left == []
    assert draft.get_input_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", MODELS)
def test_the_source_is_untouched(tiny_model, ids, name):
    model = tiny_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config, tied, logits = model.config.to_json_string(), dict(model.all_tied_weights_keys), model(ids).logits
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    draft = direct_cast(model)
    draft.config.use_cache = False
    draft.generation_config.max_new_tokens = 3
    draft(ids)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert model.config.to_json_string() == config
    assert model.all_tied_weights_keys == tied
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), written)
    assert not packed(model)
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("name", MODELS)
def test_the_draft_generates_alone(tiny_model, ids, name):
    draft = direct_cast(tiny_model(name))
    written = draft.generate(ids, max_new_tokens=5, do_sample=False)
    logits = draft(written[:, :-1]).logits[:, ids.shape[1] - 1 :]
    assert written.shape == (2, 12)
    assert torch.equal(logits.argmax(-1), written[:, ids.shape[1] :])


@pytest.mark.parametrize("name", ["llama-tied", "gemma2-tied"])
def test_a_tied_head_is_cast_alone_and_stays_untied(tiny_model, name):
    model = tiny_model(name)
    draft = direct_cast(model)
    assert isinstance(draft.get_output_embeddings(), Mxfp4Linear)
    assert isinstance(draft.get_input_embeddings(), nn.Embedding)
    assert draft.config.tie_word_embeddings is False
    assert draft.all_tied_weights_keys == {}
    draft.tie_weights()
    assert isinstance(draft.get_output_embeddings(), Mxfp4Linear)
    assert draft.get_input_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings is True


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_head_can_be_kept(tiny_model, name):
    model = tiny_model(name)
    draft = direct_cast(model, cast_head=False)
    assert draft.get_output_embeddings().weight is model.get_output_embeddings().weight
    assert draft.config.tie_word_embeddings is model.config.tie_word_embeddings
    assert draft.config.quantization_config.modules_to_not_convert == ["lm_head"]


def test_the_rule_is_used_and_recorded(tiny_model):
    model = tiny_model("llama")
    drafts = {rule: direct_cast(model, rule=rule) for rule in ("ocp_floor", "even_bump", "ceil")}
    scales = {rule: next(iter(packed(draft).values())).weight_scale for rule, draft in drafts.items()}
    assert not torch.equal(scales["ocp_floor"], scales["even_bump"])
    assert not torch.equal(scales["even_bump"], scales["ceil"])
    assert drafts["ceil"].config.quantization_config.rule == "ceil"


def test_unfit_layers_are_kept_and_named_once(tiny_model, ids):
    model = tiny_model("llama", intermediate_size=104)
    with pytest.warns(UserWarning, match=r"3 weights.*\.0\.mlp\.down_proj \(in_features 104 is no multiple of 32\)"):
        draft = direct_cast(model)
    kept = draft.get_submodule("model.layers.1.mlp.down_proj")
    assert kept.weight is model.get_submodule("model.layers.1.mlp.down_proj").weight
    assert len(draft.config.quantization_config.modules_to_not_convert) == 3
    assert torch.isfinite(draft(ids).logits).all()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 0), (0, 32)])
def test_linears_without_weights_are_kept_and_said(tiny_model, inputs, outputs):
    model = tiny_model("llama")
    model.model.layers[0].nothing = nn.Linear(inputs, outputs, bias=False)
    with pytest.warns(UserWarning, match=r"1 weights.*model\.layers\.0\.nothing \(it has no weights\)"):
        direct_cast(model)
    model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"nest: 1 weights.*model\.layers\.0\.nothing \(it has no weights\)"):
        nest(model)


def test_other_weights_are_kept_and_said(tiny_model, ids):
    with pytest.warns(UserWarning, match=r"stay as they are, shared: .*\(Conv1D\)"):
        direct_cast(tiny_model("gpt2-conv1d"))
    model = tiny_model("mixtral-experts")
    odd = model.model.layers[1].mlp.experts
    odd.extra = nn.Parameter(torch.zeros(3))
    words = r"1 weights of Mixtral.*: model\.layers\.1\.mlp\.experts \(fused expert weights: it holds .*'extra'"
    with pytest.warns(UserWarning, match=words):
        draft = direct_cast(model)
    assert draft.model.layers[1].mlp.experts.down_proj is odd.down_proj
    assert isinstance(draft.model.layers[0].mlp.experts, PackedExperts)
    assert draft.config.quantization_config.modules_to_not_convert == ["model.layers.1.mlp.experts"]
    assert torch.isfinite(draft(ids).logits).all()


def test_experts_with_other_sizes_are_kept_and_named(tiny_model):
    with pytest.warns(UserWarning, match=r"experts \(in_features 40 of its down_proj is no multiple of 32\)"):
        draft = direct_cast(tiny_model("mixtral-experts", intermediate_size=40))
    assert not [module for module in draft.modules() if isinstance(module, PackedExperts)]


@pytest.mark.parametrize("name", ["llama", *EXPERTS])
def test_nothing_is_said_when_all_is_cast(tiny_model, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draft = direct_cast(tiny_model(name))
    assert draft.config.quantization_config.modules_to_not_convert == []


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_nan_and_inf_name_the_tensor(tiny_model, bad):
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 NaN or Inf among 6144"):
        direct_cast(model)
    experts = tiny_model("gpt-oss-experts")
    with torch.no_grad():
        experts.model.layers[2].mlp.experts.down_proj[1, 2, 3] = bad
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.down_proj of expert 1 holds 1 NaN"):
        direct_cast(experts)


def test_what_cannot_be_cast_is_refused(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="already quantized"):
        direct_cast(direct_cast(model))
    with pytest.raises(TypeError, match="not Linear"):
        direct_cast(nn.Linear(32, 32))
    with pytest.raises(ValueError, match="'fp3' is not available, use one of mxfp4, int3, int2, ternary"):
        direct_cast(model, "fp3")
    with pytest.raises(ValueError, match="'w4a16' is not available"):
        direct_cast(model, "w4a16")
    with pytest.raises(ValueError, match="unknown MXFP4 rounding rule 'up'"):
        direct_cast(model, rule="up")
    with pytest.raises(ValueError, match="rule is 'ceil', int3 has none"):
        direct_cast(model, "int3", rule="ceil")
    with pytest.raises(ValueError, match="activation_bits is 8, ternary takes 16"):
        direct_cast(model, "ternary", activation_bits=8)
    with pytest.raises(TypeError, match=r"q_proj\.weight is torch\.float64"):
        direct_cast(tiny_model("llama", torch.float64))
    model.model.layers[2].to("meta")
    with pytest.raises(ValueError, match=r"9 parameters are on the meta device.*layers\.2\.self_attn\.q_proj\.weight"):
        direct_cast(model)
    with pytest.raises(ValueError, match=r"holds no nn\.Linear that can be cast: .*Conv1D"):
        direct_cast(tiny_model("gpt2-conv1d"), cast_head=False)


def test_hooks_and_the_state_of_a_past_generate_stay_behind(tiny_model, ids):
    model = tiny_model("llama")
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model.generate(ids, max_new_tokens=2, do_sample=False, cache_implementation="static", disable_compile=True)
    model(ids, output_hidden_states=True)
    model._compiled_call = model.__call__
    calls.clear()
    draft = direct_cast(model)
    hidden = draft(ids, output_hidden_states=True).hidden_states
    assert calls == []
    assert len(hidden) == 4
    assert not {"_compiled_call", "_cache"} & set(vars(draft))
    assert draft.training is False
    assert len(model(ids, output_hidden_states=True).hidden_states) == 4
    assert calls == [1]


def test_a_device_hook_moves_to_the_new_layer(tiny_model, ids):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny_model("llama")
    add_hook_to_module(model.lm_head, AlignDevicesHook(execution_device="cpu"))
    draft = direct_cast(model)
    assert draft.lm_head._hf_hook is not None
    assert torch.equal(draft(ids).logits, direct_cast(tiny_model("llama"))(ids).logits)


def test_other_actions_refuse_layers_with_adapters(tiny_model):
    model = tiny_model("llama")
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    adapter = nn.Module()  # the shape of a LoRA layer: the linear it adapts, and what it adds
    adapter.base_layer, adapter.lora_A = layer, nn.Linear(layer.in_features, 2, bias=False)
    model.set_submodule("model.layers.0.mlp.up_proj", adapter)
    with pytest.raises(ValueError, match=r"quantize: 1 layers carry adapters.*up_proj.*merge"):
        require_dense(model, "quantize")


class Reads(nn.Module):
    """Linears whose weights are read in training alone, in both, and behind training."""

    def __init__(self):
        super().__init__()
        self.trained, self.read, self.otherwise, self.called = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        if self.training and x.ndim == 2:
            return x @ self.trained.weight
        if self.training or x.ndim == 3:
            x = x @ self.read.weight
        if self.training:
            x = self.called(x)
        else:
            scale = self.otherwise.weight.mean()
            x = x * scale
        return self.called(self.trained(x))


def test_weights_that_are_read_in_training_alone_are_cast():
    model = nn.Module()
    model.config, model.net = type("Config", (), {})(), Reads()
    model._is_stateful = True
    assert dict(unfit(model)) == {f"net.{name}": "Reads reads its weight itself" for name in ("read", "otherwise")}
