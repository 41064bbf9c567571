"""Do packed experts compute what the module they replace computes with the rounded weights?"""

import copy
import io

import pytest
import torch
from threaded import in_four_threads
from torch import nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_mlspec.nn.expert_modules import is_experts
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.replace import resident_bytes
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.ops import why_not_compiled

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
_SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
CLASSES = {
    "mixtral": (MixtralExperts, MixtralConfig(**_SIZES, intermediate_size=96, num_local_experts=4)),
    "qwen2_moe": (Qwen2MoeExperts, Qwen2MoeConfig(**_SIZES, moe_intermediate_size=32, num_experts=5)),
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig(**_SIZES, moe_intermediate_size=32, num_experts=8)),
    "gpt_oss": (GptOssExperts, GptOssConfig(**_SIZES, intermediate_size=96, num_local_experts=4)),
}
FORMATS = {
    "mxfp4": {"format": "mxfp4"},
    "int4": {"format": "int4", "group_size": 32},
    "asymmetric": {"format": "int4", "group_size": 32, "symmetric": False},
}


def experts_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    kind, config = CLASSES[name]
    config._experts_implementation = "eager"
    module = kind(config).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


def routing(module: nn.Module, tokens: int = 7, top_k: int = 2, hidden: int = 64):
    """hidden states, the experts of each token (different ones), and weights that do not sum to one."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, hidden, generator=generator).to(module.down_proj.dtype)
    order = torch.rand(tokens, module.down_proj.shape[0], generator=generator).argsort(-1)
    return x, order[:, :top_k], torch.rand(tokens, top_k, generator=generator)


@pytest.fixture(params=CLASSES)
def name(request) -> str:
    return request.param


@pytest.fixture(params=FORMATS)
def settings(request) -> dict:
    return FORMATS[request.param]


def test_float32_weights_are_those_of_the_original_to_rounding(name, settings):
    module = experts_of(name)
    packed = PackedExperts.from_module(module, **settings)
    inputs = routing(module)
    rounded = packed.dequantized_module()
    assert type(rounded) is type(module)
    expected = rounded(*inputs)
    assert torch.allclose(packed.materialize(torch.float32)(*inputs), expected, rtol=1e-5, atol=1e-5)
    assert (expected - module(*inputs)).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "tolerance"), [(16, 0.01), (8, 0.02)])
def test_results_are_those_of_the_original_with_rounded_weights(name, settings, dtype, bits, tolerance):
    module = experts_of(name, dtype)
    packed = PackedExperts.from_module(module, **settings, switch=PrecisionSwitch(settings["format"], bits))
    inputs = routing(module)
    expected = packed.dequantized_module(dtype)(*inputs)
    result = packed(*inputs)
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    assert (result - expected).abs().max() <= tolerance * expected.abs().max()


def linears_of(packed: PackedExperts, expert: int, dtype: torch.dtype) -> list[nn.Module]:
    """The two packed linears that one expert is, made of its dequantized weights: quantizing again changes nothing."""
    layers = []
    for key in packed.names:
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.weight = nn.Parameter(packed.dequantized(key)[expert], requires_grad=False)
        linear.out_features, linear.in_features = linear.weight.shape
        if packed.has_bias:
            linear.bias = nn.Parameter(getattr(packed, f"{key}_bias")[expert].to(dtype), requires_grad=False)
        layers.append(Mxfp4Linear.from_linear(linear, switch=packed.switch))
    return layers


@pytest.mark.skipif(why_not_compiled() is not None, reason=f"no kernels: {why_not_compiled()}")
@pytest.mark.parametrize("bits", [16, 8])
def test_a_token_alone_gets_the_bits_it_gets_among_others(name, bits):
    module = experts_of(name)
    packed = PackedExperts.from_module(module, "mxfp4", PrecisionSwitch("mxfp4", bits))
    x, experts, weights = routing(module, tokens=9, top_k=3)
    result = packed(x, experts, weights)
    for token in range(len(x)):
        total = torch.zeros(1, 64)
        for place, expert in enumerate(experts[token].tolist()):
            up, down = linears_of(packed, expert, torch.float32)
            total = total + down(module._apply_gate(up(x[token : token + 1]))) * weights[token, place]
        assert torch.equal(total[0], result[token])


def test_parameters_are_out_major_and_biases_the_very_ones(name, settings):
    module = experts_of(name, torch.bfloat16)
    packed = PackedExperts.from_module(module, **settings)
    count, hidden, inner = len(module.down_proj), 64, 96 if name in ("mixtral", "gpt_oss") else 32
    shapes = {key: tuple(tensor.shape) for key, tensor in packed.state_dict().items()}
    expected = {}
    for key, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        expected[f"{key}_packed"] = (count, rows, columns // 2)
        expected[f"{key}_scale"] = (count, rows, columns // 32)
        if not settings.get("symmetric", True):
            expected[f"{key}_zero"] = (count, rows, columns // 32)
        if name == "gpt_oss":
            expected[f"{key}_bias"] = (count, rows)
            assert getattr(packed, f"{key}_bias") is getattr(module, f"{key}_bias")
    assert shapes == expected
    layer = Mxfp4Linear if settings["format"] == "mxfp4" else Int4Linear
    linear = nn.Linear(inner, hidden, bias=False)
    dense = module.down_proj[1]
    linear.weight = nn.Parameter(dense.T.contiguous() if name == "gpt_oss" else dense)
    own = {key: value for key, value in settings.items() if key != "format"}
    alone = layer.from_linear(linear, **own)
    assert torch.equal(packed.down_proj_packed[1], alone.weight_packed)
    assert torch.equal(packed.down_proj_scale[1], alone.weight_scale)


def test_layouts_checkpoints_copies_and_casts(name, settings):
    module = experts_of(name, torch.bfloat16)
    packed = PackedExperts.from_module(module, **settings)
    inputs = routing(module)
    saved = {key: tensor.clone() for key, tensor in packed.state_dict().items()}
    parameters, size = [id(p) for p in packed.parameters()], resident_bytes(packed)
    y = packed(*inputs)
    assert packed.is_prepacked
    assert packed.down_proj_packed.shape == (len(module.down_proj), 4, packed.down_proj_packed.shape[2], 256)
    assert [id(p) for p in packed.parameters()] == parameters
    assert resident_bytes(packed) == size  # every tile is full
    state = packed.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[key], saved[key]) for key in saved)
    empty = PackedExperts.empty(module, **settings)
    assert not empty.dequantized("gate_up_proj").any()
    empty.load_state_dict(saved)
    buffer = io.BytesIO()
    torch.save(packed, buffer)
    buffer.seek(0)
    for twin in (empty, copy.deepcopy(packed), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(*inputs), y)
        assert twin.switch is not packed.switch
    for key, tensor in packed.half().bfloat16().unprepack_().state_dict().items():
        assert tensor.dtype == saved[key].dtype
        assert key.endswith("bias") or torch.equal(tensor, saved[key])
    packed.validate()


def test_empty_on_the_meta_device(settings):
    with torch.device("meta"):
        module = MixtralExperts(CLASSES["mixtral"][1])
    packed = PackedExperts.empty(module, **settings, name="experts")
    assert all(parameter.is_meta for parameter in packed.parameters())
    source = experts_of("mixtral")
    tensors = {k: t for key in packed.names for k, t in packed.quantized(key, getattr(source, key)).items()}
    packed.load_state_dict(tensors, assign=True)
    expected = PackedExperts.from_module(source, **settings)
    assert torch.equal(packed(*routing(source)), expected(*routing(source)))
    with pytest.raises(ValueError, match=r"layers\.3\.down_proj has shape \[4, 64, 64\], expected \[4, 64, 96\]"):
        packed.quantized("down_proj", torch.zeros(4, 64, 64), "layers.3")


def test_one_switch_calls_linears_and_experts():
    module, switch = experts_of("mixtral"), PrecisionSwitch("int4")
    packed = PackedExperts.from_module(module, "int4", switch, group_size=32)
    inputs = routing(module)
    results = {bits: PackedExperts.from_module(module, "int4", PrecisionSwitch("int4", bits), group_size=32)(*inputs)
               for bits in (16, 8, 4)}  # fmt: skip
    for bits, expected in results.items():
        with switch.at(bits):
            assert torch.equal(packed(*inputs), expected)
    assert not torch.equal(results[16], results[8])
    assert not torch.equal(results[8], results[4])
    switch.multiply = "dequant"
    exact = packed.dequantized_module()(*inputs)
    assert (packed(*inputs) - exact).abs().max() <= 0.02 * exact.abs().max()
    assert not torch.equal(packed(*inputs), results[16])


def test_experts_of_another_process_add_nothing():
    module = experts_of("qwen3_moe")
    packed = PackedExperts.from_module(module)
    x, experts, weights = routing(module)
    whole = packed(x, experts, weights)
    only_first = packed(x, experts[:, :1], weights[:, :1])
    experts[:, 1] = 8  # beyond the last of 8: how transformers marks them
    assert torch.equal(packed(x, experts, weights), only_first)
    assert not torch.equal(whole, only_first)


def test_experts_without_a_gate_and_with_a_norm():
    config = NemotronHConfig(hidden_size=64, moe_intermediate_size=32, n_routed_experts=4, moe_latent_size=None)
    config._experts_implementation = "eager"
    module = NemotronHExperts(config).requires_grad_(False)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    packed = PackedExperts.from_module(module)
    assert packed.names == ("up_proj", "down_proj")
    inputs = routing(module)
    expected = packed.dequantized_module()(*inputs)
    assert torch.allclose(packed.materialize(torch.float32)(*inputs), expected, rtol=1e-5, atol=1e-5)
    x, experts, _ = inputs
    single = x, experts[:, :1], torch.ones(len(x), 1)
    bare = PackedExperts.from_module(module)(*single)
    norm = nn.LayerNorm(64).requires_grad_(False)
    norm.weight.normal_()
    module.has_post_expert_norm, module.post_expert_norm = True, norm
    normed = PackedExperts.from_module(module)
    assert normed.dequantized_module().post_expert_norm is norm
    assert torch.allclose(normed(*single), norm(bare), rtol=1e-5, atol=1e-6)


class AnyConfig:
    """Sizes and names that every module of experts understands."""

    _experts_implementation, moe_latent_size = "eager", None

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        if "act" in name:
            return "silu"
        if "limit" in name or "alpha" in name:
            return 1.5
        return 4 if "expert" in name and "size" not in name else 64


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("aria", "AriaExperts"),  # [experts, in, out], one half after the other
        ("openai_privacy_filter", "OpenAIPrivacyFilterExperts"),  # the same with biases and a gate of its own
        ("minimax_m3_vl", "MiniMaxM3VLExperts"),
        ("deepseek_v3", "DeepseekV3Experts"),
    ],
)
def test_other_gates_and_layouts(model, kind):
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    module = getattr(modeling, kind)(AnyConfig()).requires_grad_(False)
    if not is_experts(module):
        pytest.skip(f"{kind} of this transformers holds its experts in another way")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    packed = PackedExperts.from_module(module)
    inputs = routing(module)
    expected = packed.dequantized_module()(*inputs)
    assert torch.allclose(packed.materialize(torch.float32)(*inputs), expected, rtol=1e-4, atol=1e-4)


def test_first_forwards_from_several_threads():
    module = experts_of("gpt_oss")
    inputs = routing(module)
    expected = PackedExperts.from_module(module)(*inputs)
    for _ in range(5):
        assert all(torch.equal(y, expected) for y in in_four_threads(PackedExperts.from_module(module), *inputs))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles():
    module = experts_of("mixtral")
    packed = PackedExperts.from_module(module)
    inputs = routing(module)
    expected = copy.deepcopy(packed)(*inputs)
    assert torch.equal(torch.compile(packed, backend="eager")(*inputs), expected)


def test_damage_names_the_expert():
    packed = PackedExperts.from_module(experts_of("mixtral"), "int4", group_size=32)
    packed.down_proj_scale[2, 5, 1] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.0\.experts\.down_proj of expert 2: weight_scale .* row 5, group 1"):
        packed.validate("layers.0.experts")
    module = experts_of("gpt_oss")
    module.gate_up_proj[3, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"mlp\.experts\.gate_up_proj of expert 3: 1 of its"):
        PackedExperts.from_module(module, name="mlp.experts")


def test_what_is_not_understood_is_named():
    def refused(module: nn.Module, message: str, **settings) -> None:
        with pytest.raises(ValueError, match=rf"layers\.0\.experts.*{message}"):
            PackedExperts.from_module(module, name="layers.0.experts", **settings)

    plain = nn.Module()
    plain.gate_up_proj, plain.down_proj = nn.Parameter(torch.zeros(2, 64, 32)), nn.Parameter(torch.zeros(2, 32, 32))
    assert is_experts(plain)
    refused(plain, r"no has_gate, has_bias, is_transposed, _apply_gate, .*keep it in 16 bits")
    assert not is_experts(nn.Linear(3, 4))
    refused(nn.Linear(3, 4), "Linear is no module of experts .* 3-D parameters are none")
    hooked = experts_of("mixtral")
    hooked.forward = lambda *args: None
    refused(hooked, "its forward was replaced")
    adapted = experts_of("mixtral")
    adapted.lora = nn.Parameter(torch.zeros(2, 2))
    refused(adapted, r"it holds \['down_proj', 'gate_up_proj', 'lora'\]")
    odd = experts_of("mixtral")
    odd.down_proj = nn.Parameter(torch.zeros(4, 64, 64))
    refused(odd, r"the shapes of its projections, .*do not fit together")
    refused(experts_of("mixtral"), r"\.down_proj: in_features is 96, .*group of 64: use group_size=32",
            format="int4", group_size=64)  # fmt: skip
    refused(experts_of("mixtral"), "switch is for int4 weights", switch=PrecisionSwitch("int4"))


@pytest.mark.parametrize("format", FORMATS)
def test_all_experts_at_once_are_what_they_are_one_by_one(name, format):
    """As a GPU runs them; experts that another process has add nothing."""
    module = experts_of(name, torch.bfloat16)
    packed = PackedExperts.from_module(module, **FORMATS[format])
    x, chosen, weights = routing(module, tokens=9)
    for bits in (16, 8):
        packed.switch.activation_bits = bits
        expected, found = packed(x, chosen, weights), packed._planned(x, chosen, weights)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
        assert torch.equal(packed._planned(x[4:5], chosen[4:5], weights[4:5]), found[4:5])
        elsewhere = chosen.clone()
        elsewhere[::2, 1] = packed.original.num_experts
        found = packed._planned(x, elsewhere, weights)
        torch.testing.assert_close(found, packed(x, elsewhere, weights), rtol=2**-7, atol=1e-3)
        assert not torch.equal(found, expected)


def test_only_bfloat16_through_fused_codes_goes_at_once():
    packed = PackedExperts.from_module(experts_of("mixtral", torch.bfloat16), "int4", group_size=32)
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert packed._fits_plans(x)
    assert not packed._fits_plans(x.float())
    packed.switch.multiply = "dequant"
    assert not packed._fits_plans(x)
    packed.switch.multiply = "fused"
    assert not packed.materialize(torch.bfloat16)._fits_plans(x)
