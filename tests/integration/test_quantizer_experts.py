"""Are fused experts quantized while loading, saved and loaded as linear layers are, and never as anything else?"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig

import hf_mlspec
from hf_mlspec import MLSpecConfig, precision_switch
from hf_mlspec.integration.quantizer.packing import packed_modules
from hf_mlspec.nn.experts import PackedExperts
from tests.models import tiny

SHAPE = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "head_dim": 16, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**SHAPE, intermediate_size=96, num_local_experts=4),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, intermediate_size=96, moe_intermediate_size=96, num_experts=4,
                                num_experts_per_tok=2),
    "gpt-oss": GptOssConfig(**SHAPE, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
    "llama": LlamaConfig(**SHAPE, intermediate_size=96),
    "llama-tied": LlamaConfig(**SHAPE, intermediate_size=96, tie_word_embeddings=True),
}  # fmt: skip
MOE = ["mixtral", "qwen3-moe", "gpt-oss"]
FORMATS = {
    "int4": {"format": "int4", "group_size": 32},
    "int4-asymmetric": {"format": "int4", "group_size": 32, "symmetric": False},
    "mxfp4": {"format": "mxfp4", "rule": "ceil"},
}
IDS = torch.arange(3, 17).view(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Folder of a random model of each kind; Mixtral's and Qwen's hold one tensor per expert, as on the hub."""
    folders = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        folders[name] = tmp_path_factory.mktemp(name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.2)  # biases start at zero
        model.save_pretrained(folders[name])
    with safe_open(folders["mixtral"] / "model.safetensors", "pt") as file:
        assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in file.keys()  # noqa: SIM118
    return folders


def quantized(folder, settings, **more):
    config = MLSpecConfig(**settings, **more)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def same(model, other):
    first, second = model.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("kind", MOE)
def test_experts_load_save_and_load_again(dense, tmp_path, kind, settings):
    model = quantized(dense[kind], settings)
    wide = AutoModelForCausalLM.from_pretrained(dense[kind])
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer.mlp.experts, PackedExperts)
        alone = PackedExperts.from_module(wide.model.layers[index].mlp.experts, **settings)
        assert same(layer.mlp.experts, alone)
        assert layer.mlp.experts.switch is precision_switch(model)
        assert not {"gate_up_proj", "down_proj"} & layer.mlp.experts._parameters.keys()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert same(again, model)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 9)
    again.save_pretrained(tmp_path / "again")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)


@pytest.mark.parametrize("kind", MOE)
def test_dequantized_experts_are_saved_as_transformers_saves_them(dense, tmp_path, kind):
    model = quantized(dense[kind], FORMATS["int4"])
    plain = model.dequantize()
    assert not list(packed_modules(plain))
    plain.save_pretrained(tmp_path)
    names = []
    for folder in (tmp_path, dense[kind]):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append({*file.keys()})
    assert names[0] == names[1]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, plain(IDS).logits)


@pytest.mark.parametrize("kind", MOE)
def test_kept_experts_stay_wide(dense, tmp_path, kind):
    model = quantized(dense[kind], FORMATS["int4"], skip_modules=["mlp.experts"])
    assert not [name for name, _ in packed_modules(model) if "experts" in name]
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(again, model)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_groups_that_do_not_divide_a_projection(dense):
    said = r"2 layers .* model\.layers\.0\.mlp\.experts\.down_proj with in_features 96 = 1 x 64 \+ 32: use"
    with pytest.raises(ValueError, match=said):
        quantized(dense["mixtral"], {"format": "int4", "group_size": 64})


@pytest.mark.parametrize("part", ["packed", "scale"])
def test_a_flipped_bit_in_an_expert(dense, tmp_path, part):
    quantized(dense["gpt-oss"], FORMATS["int4"]).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", f"model.layers.1.mlp.experts.down_proj_{part}"
    whole = bytearray(file.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    begin, end = json.loads(whole[8 : 8 + length])[name]["data_offsets"]
    whole[8 + length + (begin + end) // 2] ^= 1
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=rf"{name} in .*model\.safetensors is damaged: its {end - begin} bytes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_nan_names_the_expert(dense):
    wide = AutoModelForCausalLM.from_pretrained(dense["gpt-oss"])
    state = wide.state_dict()
    state["model.layers.1.mlp.experts.down_proj"][2, 3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.experts\.down_proj of expert 2: .*NaN or Inf"):
        type(wide).from_pretrained(
            None, config=wide.config, state_dict=state, quantization_config=MLSpecConfig(**FORMATS["int4"])
        )


# Without the plugin there is no format: stock transformers must stop, never run random weights.

STOCK = """
import sys
from transformers import AutoModelForCausalLM
assert "hf_mlspec" not in sys.modules
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
        print("loaded")
    except RuntimeError as error:
        print("ignore_mismatched_sizes" in str(error))
"""


def test_without_the_plugin_every_kind_of_model_stops(dense, tmp_path):
    folders = []
    for kind, options in [(kind, {}) for kind in CONFIGS] + [("mixtral", {"skip_modules": ["self_attn"]}),
                                                             ("gpt-oss", {"skip_modules": ["self_attn"]})]:
        for size in ("1GB", "9KB"):
            folders.append(tmp_path / str(len(folders)))
            quantized(dense[kind], FORMATS["int4"], **options).save_pretrained(folders[-1], max_shard_size=size)
    ran = subprocess.run([sys.executable, "-c", STOCK, *map(str, folders)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["True"] * len(folders)


def test_a_missing_expert_is_named(dense, tmp_path):
    """By its tensor and number, where a file has one tensor an expert."""
    folder = Path(shutil.copytree(dense["mixtral"], tmp_path / "copy"))
    state, name = load_file(folder / "model.safetensors"), "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    del state[name]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    said = re.escape(name) + r" is missing from .*has 4 experts a layer, this one lacks 1 of its w1\.weight"
    with pytest.raises(ValueError, match=said):
        quantized(folder, FORMATS["int4"])


def test_a_cast_names_the_expert_that_holds_nan():
    model = tiny("qwen3_moe", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 1, 1] = torch.nan
    said = r"direct_cast: model\.layers\.1\.mlp\.experts\.down_proj of expert 3 holds 1 NaN"
    with pytest.raises(ValueError, match=said):
        hf_mlspec.direct_cast(model, "mxfp4")
