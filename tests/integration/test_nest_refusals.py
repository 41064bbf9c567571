"""Is what cannot be nested refused with one error that says what and why, before anything is changed?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import prune

import hf_mlspec
from hf_mlspec import MLSpecConfig
from tests.models import tiny

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def refused(model, error, words: str, **options) -> None:
    """nest raises this, and the model has the modules and the very parameters that it had."""
    before = {name: (type(module), dict(module._parameters)) for name, module in model.named_modules()}
    with pytest.raises(error, match=words):
        hf_mlspec.nest(model, **options)
    after = {name: (type(module), dict(module._parameters)) for name, module in model.named_modules()}
    assert before.keys() == after.keys()
    for name, (kind, parameters) in before.items():
        assert kind is after[name][0]
        assert all(parameter is after[name][1][key] for key, parameter in parameters.items())


@pytest.fixture
def model():
    return tiny("llama", dtype=BF16)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "lm_head"])
def test_weights_that_are_not_finite(model, name, value):
    with torch.no_grad():
        model.get_submodule(name).weight[3, 5] = value
    refused(model, ValueError, rf"nest: {name}\.weight holds 1 NaN or Inf among .* repair the checkpoint")


def test_a_model_that_is_nested_already(model):
    hf_mlspec.nest(model)
    refused(model, ValueError, "this LlamaForCausalLM is already nested; call hf_mlspec.unnest")
    hf_mlspec.unnest(model)
    with pytest.raises(ValueError, match="is not nested: there is nothing to undo"):
        hf_mlspec.unnest(model)
    with pytest.raises(TypeError, match="unnest takes a model, not a str"):
        hf_mlspec.unnest("model")


def test_weights_that_stay_and_are_named(model):
    pruned, large = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
    prune.l1_unstructured(model.get_submodule(pruned), "weight", amount=3)
    with torch.no_grad():
        model.get_submodule(large).weight[0, 0] = -(2.0**32)
    with pytest.warns(UserWarning, match="2 weights .* stay as they are") as said:
        hf_mlspec.nest(model)
    text = str(said[0].message)
    assert f"{pruned} (its weight is computed from other parameters)" in text
    assert f"{large} (it holds a value of 2^32 or larger" in text
    assert type(model.get_submodule(pruned)) is type(model.get_submodule(large)) is nn.Linear


def test_unnest_gives_weights_of_the_models_dtype(model):
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    hf_mlspec.nest(model).to(torch.float16)
    with pytest.raises(ValueError, match=r"the model is torch.float16, .* model.to\(torch.bfloat16\) first"):
        hf_mlspec.unnest(model)
    hf_mlspec.unnest(model.to(torch.float32))
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert all(torch.equal(model.get_submodule(name).weight, plain[f"{name}.weight"].float()) for name in linears)
    assert model(torch.tensor([[1, 2]])).logits.dtype == torch.float32


def test_a_cast_beside_nested_weights_is_not_unnested(model):
    draft = hf_mlspec.direct_cast(hf_mlspec.nest(model), "mxfp4", cast_head=False)
    with pytest.raises(ValueError, match="holds a Mxfp4Linear and nested weights, as a cast does: unnest"):
        hf_mlspec.unnest(draft)
    assert draft.config.quantization_config.format == "mxfp4"


@pytest.mark.parametrize("format", ["int4", "mxfp4", "bitplanes"])
def test_a_quantized_model(tmp_path, model, format):
    model.save_pretrained(tmp_path)
    settings = {} if format == "mxfp4" else {"group_size": 32}
    packed = type(model).from_pretrained(tmp_path, quantization_config=MLSpecConfig(format, **settings))
    refused(packed, ValueError, r"nest: the model is already quantized \(mlspec\); load the original")
    refused(hf_mlspec.direct_cast(model), ValueError, r"nest: the model is already quantized")


def test_weights_on_the_meta_device(model):
    model.model.layers[1].to("meta")
    refused(model, ValueError, r"nest: 9 parameters are on the meta device .*is model\.layers\.1\.self_attn\.q_proj")


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo here")
def test_weights_sharded_over_processes(model):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        linear = model.model.layers[0].mlp.up_proj
        mesh = init_device_mesh("cpu", (1,))
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh))
        refused(model, ValueError, r"1 parameters are sharded over processes \(DTensor\), .*up_proj\.weight")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "words"), [
    (torch.float16, r"holds no bfloat16 nn\.Linear .*torch\.float16, whose 5-bit exponent leaves two bits"),
    (torch.float32, r"its weights are torch\.float32; load it with dtype=torch\.bfloat16"),
])  # fmt: skip
def test_other_dtypes(dtype, words):
    refused(tiny("llama", dtype=dtype), ValueError, words)


def test_no_weight_that_blocks_divide():
    model = tiny("llama", dtype=BF16, hidden_size=40, intermediate_size=48, head_dim=10)
    refused(model, ValueError, r"can be nested: what there is stays as it is: .*in_features 40 is no multiple of 32")


@pytest.mark.parametrize(("codebook", "error", "words"), [
    ("nf4", ValueError, "unknown codebook 'nf4': choose one of lloyd_max, mxfp4, fitted"),
    (None, TypeError, "codebook is None, expected a name"),
])  # fmt: skip
def test_unknown_codebooks(model, codebook, error, words):
    refused(model, error, words, codebook=codebook)


@pytest.mark.parametrize(("calibration", "error", "words"), [
    ([], ValueError, "calibration is empty"),
    (5, TypeError, "calibration is a int: give a list of input_ids, or None"),
    ([[3, 4], []], ValueError, r"calibration\[1\] has no tokens"),
    ([[3, 64]], ValueError, r"calibration\[0\] holds token 64, the model has 64"),
    ([torch.tensor([-1, 3])], ValueError, r"calibration\[0\] holds token -1"),
    (["text"], TypeError, r"calibration\[0\] is a str: give input_ids"),
    ([torch.rand(3)], TypeError, r"calibration\[0\] is torch.float32 \[3\]: give token ids"),
    ([torch.zeros(1, 1, 3, dtype=torch.int64)], TypeError, r"\[1, 1, 3\]: give token ids"),
])  # fmt: skip
def test_calibration_text_that_does_not_fit(model, calibration, error, words):
    refused(model, error, words, calibration=calibration)


def test_what_is_no_model():
    with pytest.raises(TypeError, match="nest takes a transformers PreTrainedModel, not Linear"):
        hf_mlspec.nest(nn.Linear(32, 32, dtype=BF16))


@pytest.mark.parametrize(("settings", "words"), [
    ({"format": "nested-bf16", "group_size": 64}, "group_size is 64, but format 'nested-bf16' has no group_size"),
    ({"format": "nested-bf16", "codebook": "nf4"}, "unknown codebook 'nf4'"),
    ({"format": "nested-bf16", "activation_bits": 8}, "activation_bits is 8, nested-bf16 weights are multiplied"),
    ({"format": "int4", "codebook": "fitted"}, "codebook is 'fitted', but format 'int4' has no codebook"),
    ({"format": "mxfp4", "num_planes": 4}, "num_planes is 4, but format 'mxfp4' has no num_planes"),
    ({"format": "bitplanes", "num_planes": 9}, "num_planes is 9: .*choose 1 to 8 or one of int3, int2, ternary"),
    ({"format": "bitplanes", "num_planes": "int5"}, "num_planes is 'int5'"),
    ({"format": "bitplanes", "num_planes": [8]}, r"num_planes is \[8\]: .*choose 1 to 8 or one of int3"),
    ({"format": "bitplanes", "group_size": 48}, "group_size is 48, bitplanes has 32 or 64 or 128"),
])  # fmt: skip
def test_settings_that_a_format_does_not_have(settings, words):
    with pytest.raises(ValueError, match=words):
        MLSpecConfig(**settings)
