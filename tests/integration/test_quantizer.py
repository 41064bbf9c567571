"""Does a packed model come back from disk as it was saved, and never as anything else?"""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, Qwen2Config
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from hf_mlspec import MLSpecConfig, direct_cast
from hf_mlspec.integration.quantizer import quantizer
from hf_mlspec.nn.linear import Mxfp4Linear

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 104,  # down_proj is kept: 104 is no multiple of 32
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2-bias": Qwen2Config(**SHAPE),
    "gemma2-tied": Gemma2Config(**SHAPE, head_dim=16),
    "gpt2-conv1d": GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=64),
}
IDS = torch.arange(1, 15).view(2, 7)
pytestmark = [
    pytest.mark.filterwarnings("ignore:direct_cast. .* stay as they are"),
    pytest.mark.filterwarnings("ignore:no compiled kernel"),
]


def model_of(name: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()


@pytest.fixture
def saved(tmp_path):
    draft = direct_cast(model_of("llama"), rule="even_bump")
    draft.save_pretrained(tmp_path)
    return tmp_path, draft


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "cast_head"), [(name, True) for name in CONFIGS] + [("llama", False), ("gemma2-tied", False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_gives_the_same_logits(tmp_path, name, dtype, cast_head):
    # Loaded, not only built: from_config keeps no float32 rotary table in bfloat16.
    model_of(name, dtype).save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=dtype)
    draft = direct_cast(model, cast_head=cast_head)
    draft.save_pretrained(tmp_path / "cast", max_shard_size="60KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "cast", dtype=dtype)
    assert torch.equal(loaded(IDS).logits, draft(IDS).logits)
    kinds = [type(module) for module in draft.modules()]
    assert [type(module) for module in loaded.modules()] == kinds
    assert loaded.config.tie_word_embeddings is draft.config.tie_word_embeddings
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=dtype)
    assert torch.equal(again(IDS).logits, draft(IDS).logits)
    assert again.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 9)


def test_what_is_on_disk(saved):
    folder, draft = saved
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    kept = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert stored == {
        "quant_method": "mlspec",
        "format": "mxfp4",
        "format_version": 1,
        "rule": "even_bump",
        "activation_bits": 8,
        "modules_to_not_convert": kept,
    }
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == {*draft.state_dict(), "model.layers.0.self_attn.q_proj.weight"}
    assert not {f"{name}.weight" for name in ("lm_head", "model.layers.1.self_attn.q_proj")} & names


def test_loading_reports_nothing_missing_or_unexpected(saved):
    model, report = AutoModelForCausalLM.from_pretrained(saved[0], output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.quantization_config.rule == "even_bump"


def test_without_the_plugin_loading_stops(saved, monkeypatch):
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "mlspec")
    monkeypatch.delitem(AUTO_QUANTIZER_MAPPING, "mlspec")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(saved[0])


def test_a_wider_dtype_moves_only_what_is_floating(saved):
    loaded = AutoModelForCausalLM.from_pretrained(saved[0], dtype=torch.bfloat16, device_map={"": "cpu"})
    assert loaded.lm_head.weight_packed.dtype == torch.uint8
    assert loaded.model.embed_tokens.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"`\.half\(\)` is not supported for quantized"):
        loaded.half()


def test_dequantize_gives_the_dense_model(saved):
    folder, draft = saved
    dense = AutoModelForCausalLM.from_pretrained(folder).dequantize()
    assert not [module for module in dense.modules() if isinstance(module, Mxfp4Linear)]
    assert torch.equal(dense.lm_head.weight, draft.lm_head.dequantized())
    assert torch.allclose(dense(IDS).logits, draft(IDS).logits, atol=0.02)  # the draft's activations are int8


def test_damaged_checkpoints_are_refused(saved):
    folder, _ = saved
    name = "model.layers.1.mlp.up_proj.weight_scale"
    rewrite(folder, lambda tensors: tensors[name].__setitem__((3, 1), 255))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj: .*NaN codes.*row 3, block 1"):
        AutoModelForCausalLM.from_pretrained(folder)
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(ValueError, match=r"\[103, 2\], config\.json makes it \[104, 2\]: it is truncated"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "nvfp4"}, "format 'nvfp4' is unknown"),
        ({"rule": "up"}, "rounding rule 'up'"),
        ({"rule": ["ceil"]}, r"rounding rule \['ceil'\]"),
        ({"format": "int4", "group_size": 64.0}, r"group_size is 64\.0"),
        ({"skip_modules": 5}, "skip_modules is 5, expected a list"),
        ({"activation_bits": 7}, "activation_bits is 7: choose 16"),
        ({"planes": 3}, r"unknown settings \['planes'\]"),
        ({"quant_method": "awq"}, "quant_method is 'awq'"),
    ],
)
def test_config_refuses_what_it_does_not_know(settings, message):
    with pytest.raises(ValueError, match=message):
        MLSpecConfig(**settings)


@pytest.mark.parametrize("bits", [8, 16])
def test_activation_bits_come_back_from_disk(tmp_path, bits):
    direct_cast(model_of("llama"), activation_bits=bits).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.activation_bits == bits
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["quantization_config"]["activation_bits"]  # as older versions wrote it
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.activation_bits == 16


def test_config_round_trips():
    config = MLSpecConfig(rule="ceil", modules_to_not_convert=["lm_head"], activation_bits=8)
    assert MLSpecConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_registering_twice_changes_nothing():
    before = AUTO_QUANTIZER_MAPPING["mlspec"], AUTO_QUANTIZATION_CONFIG_MAPPING["mlspec"]
    quantizer.register("mlspec", MLSpecConfig, quantizer.MLSpecQuantizer)
    assert (AUTO_QUANTIZER_MAPPING["mlspec"], AUTO_QUANTIZATION_CONFIG_MAPPING["mlspec"]) == before
