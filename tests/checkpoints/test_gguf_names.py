"""Does a GGUF file give the model that it was written from: every parameter in its place, and its configuration?"""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_mlspec.checkpoints.gguf import GgufReader, dense, stored_layer
from hf_mlspec.checkpoints.gguf_file import open_gguf
from hf_mlspec.checkpoints.gguf_names import (
    ARCHITECTURES,
    architecture_of,
    config_of,
    ggml_name,
    hf_name,
    parameters,
    row_orders,
)
from tests.gguf_files import gguf, write

T = gguf.GGUFValueType
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
MODELS = {
    "llama": (LlamaConfig, {"head_dim": 16}),
    "llama, tied": (LlamaConfig, {"head_dim": 32, "tie_word_embeddings": True}),
    "llama with biases": (LlamaConfig, {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 128}),  # transformers' reader knows no other
    "qwen3 with biases": (Qwen3Config, {"head_dim": 32, "attention_bias": True}),
}
MATRICES = {"Q4_0": "Q4_0", "Q8_0": "Q8_0", "F16": "F16"}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it to queries and keys."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def metadata_of(config, architecture: str, **more) -> dict:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim, "attention.value_length": head_dim, "vocab_size": config.vocab_size,
        "rope.dimension_count": head_dim,
    }  # fmt: skip
    written = {f"{architecture}.{key}": (value, T.UINT32) for key, value in sizes.items()}
    written |= {f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
                f"{architecture}.rope.freq_base": config.rope_parameters["rope_theta"],
                "tokenizer.ggml.bos_token_id": (1, T.UINT32), "tokenizer.ggml.eos_token_id": (2, T.UINT32),
                "tokenizer.ggml.padding_token_id": (0, T.UINT32)}  # fmt: skip
    return {**written, **{key.replace("ARCH", architecture): value for key, value in more.items()}}


def tensors_of(model, architecture: str, kind: str) -> dict:
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names, written = gguf.get_tensor_name_map(arch, config.num_hidden_layers), {}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        data = tensor.float().numpy()
        if architecture == "llama" and ".q_proj" in name:
            data = permuted(data, config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            data = permuted(data, config.num_key_value_heads)
        own = kind if data.ndim == 2 else "F32"
        stored = data if own in ("F16", "F32") else gguf.quants.quantize(data, gguf.GGMLQuantizationType[own])
        written[names.get_name(name, (".weight", ".bias"))] = (own, np.ascontiguousarray(stored))
    return written


@pytest.fixture(params=[(name, kind) for name in MODELS for kind in MATRICES], ids=str)
def model(request):
    name, kind = request.param
    kind_of_config, options = MODELS[name]
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(kind_of_config(**{**SIZES, **options}), dtype=torch.float32)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made, name.split()[0].strip(","), kind


def test_every_parameter_of_a_model_is_found_with_its_values(model, tmp_path):
    """As transformers reads them, too, which shares no code with this package."""
    own, architecture, kind = model
    path = write(tmp_path / "x.gguf", tensors_of(own, architecture, kind), metadata_of(own.config, architecture),
                 architecture)  # fmt: skip
    file = open_gguf(path)
    orders, found = row_orders(file), parameters(file)
    assert bool(orders) == (architecture == "llama")
    reader, read = GgufReader(orders), {}
    for name, tensor in found.items():
        layer_name = name.rpartition(".")[0]
        if "proj.weight" in name and reader.holds(layer := stored_layer(layer_name, tensor)):
            read[name] = reader.plan(layer).read({"weight": tensor.load()}).weight.dequantize(torch.float32)
        else:
            read[name] = dense(tensor, torch.float32, orders.get(layer_name))
    expected = {name: tensor for name, tensor in own.state_dict().items()
                if name != "lm_head.weight" or not own.config.tie_word_embeddings}  # fmt: skip
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.ndim == 1 or kind == "F16":
            assert torch.equal(read[name], tensor.half().float() if tensor.ndim == 2 else tensor)
        else:
            assert (read[name] - tensor).norm() < 0.15 * tensor.norm()
    if "bias" not in "".join(expected) or architecture == "qwen2":  # transformers leaves the others' biases out
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32).state_dict()
        for name, tensor in read.items():
            assert torch.equal(theirs[name], tensor), name


def test_the_configuration_is_that_of_the_model(model, tmp_path):
    own, architecture, kind = model
    path = write(tmp_path / "x.gguf", tensors_of(own, architecture, kind), metadata_of(own.config, architecture),
                 architecture)  # fmt: skip
    config = config_of(open_gguf(path))
    assert json.loads(json.dumps(config)) == config
    read, expected = AutoConfig.for_model(**config).to_dict(), own.config.to_dict()
    for key in ("head_dim", "architectures", "dtype"):
        expected.pop(key, None), read.pop(key, None)
    assert read == expected
    assert config["architectures"] == [type(own).__name__]
    q_proj = own.model.layers[0].self_attn.q_proj
    assert config["head_dim"] * config["num_attention_heads"] == q_proj.out_features


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_go_both_ways(architecture):
    own = ARCHITECTURES[architecture]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    theirs = [gguf.TENSOR_NAMES[tensor].format(bid=11) for tensor in gguf.MODEL_TENSORS[arch]]
    theirs = [f"{name}.weight" for name in theirs if "exp" not in name and "gate_inp" not in name]
    kept = [name for name in theirs if hf_name(own, name) is not None]
    assert len(kept) >= 12
    assert {*theirs} - {*kept} <= {"rope_freqs.weight", "blk.11.attn_rot_embd.weight"}
    for name in kept:
        assert ggml_name(own, hf_name(own, name)) == name


@pytest.mark.parametrize("name", ["blk.0.attn_q", "blk.x.attn_q.weight", "blk.00.attn_q.weight", "attn_q.weight",
                                  "blk.0.output.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q_norm.weight", "",
                                  "blk.0.attn_norm.bias", "token_embd.weight.weight",
                                  "v.blk.0.attn_q.weight"])  # fmt: skip
def test_names_of_other_models_are_refused(name):
    with pytest.raises(ValueError, match="a llama model has no tensor"):
        hf_name(ARCHITECTURES["llama"], name)
    with pytest.raises(ValueError, match="a llama model has no parameter"):
        ggml_name(ARCHITECTURES["llama"], f"model.{name}")


def llama(tmp_path, change=None, **more):
    """A small llama's file, its metadata changed by ``more`` (None: left out) and its tensors by ``change``."""
    config = LlamaConfig(**SIZES, head_dim=16)
    torch.manual_seed(2)
    tensors = tensors_of(AutoModelForCausalLM.from_config(config), "llama", "Q8_0")
    if change:
        change(tensors)
    metadata = {key: value for key, value in metadata_of(config, "llama", **more).items() if value is not None}
    return open_gguf(write(tmp_path / "x.gguf", tensors, metadata))


REFUSED = {
    "missing size": ({"ARCH.block_count": None}, r"llama\.block_count is None, expected a size"),
    "size of a list": ({"ARCH.feed_forward_length": [128, 128]}, "feed_forward_length is .*expected a size"),
    "many blocks": ({"ARCH.block_count": (1 << 30, T.UINT32)}, "1073741824 blocks of 21 tensors"),
    "experts": ({"ARCH.expert_count": (8, T.UINT32)}, "the model has experts"),
    "another product": ({"ARCH.logit_scale": 2.0}, r"llama\.logit_scale is 2\.0, which this package does not know"),
    "part of a head turns": ({"ARCH.rope.dimension_count": (8, T.UINT32)}, "rope.dimension_count is 8, heads of qu"),
    "values of another size": ({"ARCH.attention.value_length": (8, T.UINT32)}, "attention.value_length is 8"),
    "epsilon": ({"ARCH.attention.layer_norm_rms_epsilon": float("nan")}, "expected a small number"),
    "theta": ({"ARCH.rope.freq_base": -1.0}, r"rope\.freq_base is -1\.0"),
    "longrope": ({"ARCH.rope.scaling.type": "longrope"}, "is 'longrope', known are none, linear and yarn"),
    "no factor": ({"ARCH.rope.scaling.type": "linear"}, r"rope\.scaling\.factor is None"),
    "yarn of nothing": ({"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": 4.0},
                        "original_context_length is None"),
    "attention factor": ({"ARCH.rope.scaling.attn_factor": 0.5}, r"attn_factor is not 1\.0"),
    "parts": ({"split.count": (3, T.UINT16)}, "is one of 3 parts of a model: put them together"),
    "adapter": ({"general.type": "adapter"}, "holds 'adapter', expected a whole model"),
    "other heads": ({"ARCH.attention.head_count": (2, T.UINT32)}, r"attn_q\.weight in .* says \[32, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize(("more", "expected"), REFUSED.values(), ids=REFUSED)
def test_metadata_of_another_model_is_refused(tmp_path, more, expected):
    file = llama(tmp_path, **more)
    for read in (parameters, row_orders):
        with pytest.raises(ValueError, match=expected):
            read(file)


@pytest.mark.parametrize(("change", "expected"), [
    (lambda tensors: tensors.pop("blk.1.ffn_up.weight"), r"has no tensor blk\.1\.ffn_up\.weight: it is no"),
    (lambda tensors: tensors.pop("token_embd.weight"), r"has no matrix token_embd\.weight"),
    (lambda tensors: tensors.update({"blk.2.ffn_norm.weight": ("F32", np.ones(64))}), r"blk\.2\.ffn_norm.* no part"),
    (lambda tensors: tensors.update({"blk.0.new.weight": ("F32", np.ones(64))}), r"has no tensor blk\.0\.new\.weight"),
    (lambda tensors: tensors.update({"blk.0.attn_q.bias": ("F32", np.ones(64))}), r"no tensor blk\.0\.attn_k\.bias"),
    (lambda tensors: tensors.update({"output_norm.weight": ("F32", np.ones(65))}), r"has shape \[65\], its metadata"),
])  # fmt: skip
def test_tensors_of_another_model_are_refused(tmp_path, change, expected):
    with pytest.raises(ValueError, match=expected):
        parameters(llama(tmp_path, change))


@pytest.mark.parametrize("name", ["gemma2", "phi3", "llama4"])
def test_another_architecture_is_named(tmp_path, name):
    file = open_gguf(write(tmp_path / "x.gguf", {}, architecture=name))
    for read in (architecture_of, config_of, parameters, row_orders):
        with pytest.raises(ValueError, match=f"holds a model of architecture '{name}', known are llama, qwen2, qwen3"):
            read(file)


@pytest.mark.parametrize(("more", "expected"), [
    ({}, {"rope_type": "default"}),
    ({"ARCH.rope.scaling.type": "none"}, {"rope_type": "default"}),
    ({"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ({"ARCH.rope.scaling.type": "yarn", "ARCH.rope.scaling.factor": 4.0, "ARCH.rope.scaling.yarn_beta_fast": 32.0,
      "ARCH.rope.scaling.original_context_length": (128, T.UINT32), "ARCH.rope.scaling.finetuned": True},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}),
])  # fmt: skip
def test_rotary_scaling(tmp_path, more, expected):
    config = config_of(llama(tmp_path, **more))
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **expected}
    assert AutoConfig.for_model(**config).rope_parameters == {"rope_theta": 10000.0, **expected}


def llama3_divisors(head_dim: int, **more) -> tuple[dict, torch.Tensor]:
    """What transformers makes of Llama 3's words, as what llama.cpp divides the frequencies by."""
    words = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, **more}  # fmt: skip
    config = LlamaConfig(**SIZES, head_dim=head_dim, rope_parameters=dict(words))
    plain = 500000.0 ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    return words, (plain / ROPE_INIT_FUNCTIONS["llama3"](config)[0]).float()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_frequencies_of_llama_3(tmp_path, factor):
    words, divisors = llama3_divisors(16, factor=factor)
    file = llama(tmp_path, lambda tensors: tensors.update({"rope_freqs.weight": ("F32", divisors.numpy())}),
                 **{"ARCH.rope.freq_base": 500000.0})  # fmt: skip
    read = config_of(file)["rope_parameters"]
    assert read.pop("factor") == pytest.approx(factor, rel=1e-6)
    assert read == {key: value for key, value in words.items() if key != "factor"}
    assert len(parameters(file)) == 21


@pytest.mark.parametrize(("words", "theta", "count"), [
    ({"low_freq_factor": 2.0}, 5e5, 8), ({"original_max_position_embeddings": 4096}, 5e5, 8), ({}, 1e4, 8),
    ({}, 5e5, 4)])  # fmt: skip
def test_other_frequencies_are_refused(tmp_path, words, theta, count):
    divisors = llama3_divisors(16, **words)[1][:count].numpy()
    file = llama(tmp_path, lambda tensors: tensors.update({"rope_freqs.weight": ("F32", divisors)}),
                 **{"ARCH.rope.freq_base": theta})  # fmt: skip
    with pytest.raises(ValueError, match=r"rope_freqs\.weight in .*(are not those of Llama 3|half a head)"):
        config_of(file)


def test_what_older_files_leave_out(tmp_path):
    names = ("attention.key_length", "attention.value_length", "vocab_size", "rope.dimension_count", "rope.freq_base")
    config = config_of(llama(tmp_path, **{f"ARCH.{name}": None for name in names}))
    assert (config["head_dim"], config["vocab_size"], config["rope_parameters"]["rope_theta"]) == (16, 96, 10000.0)
    with pytest.raises(ValueError, match=r"attn_k\.weight in .* has shape \[32, 64\], its metadata says \[64, 64\]"):
        parameters(llama(tmp_path, **{"ARCH.attention.head_count_kv": None}))
