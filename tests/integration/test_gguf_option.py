"""Does `from_pretrained(folder, gguf_file=...)` read packed layers where they are asked for, and only there?"""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.checkpoints import gguf_file
from hf_mlspec.checkpoints.gguf_rope import rope_divisors
from hf_mlspec.nn.linear import Int4Linear
from hf_mlspec.nn.planes import PlanesLinear
from tests.checkpoints.test_gguf_names import SIZES, metadata_of, tensors_of
from tests.gguf_files import gguf, write

pytest.importorskip("accelerate", reason="transformers wants it for gguf_file; pip install accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 3]])
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 10000.0}  # fmt: skip
MODELS = {
    "llama": (LlamaConfig, {}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1": (LlamaConfig, {"rope_parameters": ROPE, "max_position_embeddings": 16384}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
}


def written(folder, kind="Q4_0", name="llama"):
    config, options = MODELS[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(**{**SIZES, **options}), dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if "norm" not in key:
            torch.nn.init.normal_(parameter, std=0.2)
    architecture = name.split()[0]
    tensors = tensors_of(model, architecture, kind)
    rope = options.get("rope_parameters")
    if rope is not None:
        tensors["rope_freqs.weight"] = ("F32", rope_divisors(rope, SIZES["hidden_size"] // 4).numpy())
    return write(folder / "x.gguf", tensors, metadata_of(model.config, architecture), architecture)


def asked(folder, **options):
    reading = MLSpecConfig.for_checkpoint(str(folder), gguf_file="x.gguf")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="x.gguf", quantization_config=reading, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [None, "auto", torch.float32])
def test_it_is_the_model_of_load(name, dtype, tmp_path):
    path = written(tmp_path, name=name)
    options = {} if dtype is None else {"dtype": dtype}
    ours, loaded = asked(tmp_path, **options), hf_mlspec.load(path, **options)
    assert ours.dtype == loaded.dtype == (torch.float32 if dtype is torch.float32 else torch.bfloat16)
    assert type(ours.model.layers[0].mlp.up_proj) is Int4Linear
    expected, found = loaded.state_dict(), ours.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    same, own = loaded.config.to_dict(), ours.config.to_dict()
    assert {key: own[key] for key in same if key not in ("_name_or_path", "transformers_version")} == {
        key: value for key, value in same.items() if key not in ("_name_or_path", "transformers_version")
    }
    with torch.inference_mode():
        assert torch.equal(ours(IDS).logits, loaded(IDS).logits)


def test_load_takes_the_option_too(tmp_path):
    path = written(tmp_path)
    ours = hf_mlspec.load(tmp_path, gguf_file="x.gguf").state_dict()
    assert all(torch.equal(tensor, ours[key]) for key, tensor in hf_mlspec.load(path).state_dict().items())


def test_it_is_saved_as_ours(tmp_path):
    written(tmp_path)
    model = asked(tmp_path)
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_layers_of_several_kinds_run_and_are_not_saved(tmp_path):
    path = written(tmp_path)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).float()
    tensors = tensors_of(model, "llama", "Q4_0")
    tensors["output.weight"] = ("Q8_0", gguf.quants.quantize(model.lm_head.weight.detach().numpy(),
                                                             gguf.GGMLQuantizationType.Q8_0))  # fmt: skip
    write(path, tensors, metadata_of(model.config, "llama"))
    ours, loaded = asked(tmp_path), hf_mlspec.load(path)
    assert (type(ours.lm_head), type(ours.model.layers[0].mlp.up_proj)) == (PlanesLinear, Int4Linear)
    assert ours.quantization_method == loaded.quantization_method
    with torch.inference_mode():
        assert torch.equal(ours(IDS).logits, loaded(IDS).logits)
    with pytest.raises(ValueError, match="not serializable"):
        ours.save_pretrained(tmp_path / "out")


@pytest.mark.parametrize("enabled", [True, False])
def test_stock_behaviour_stays_unless_asked(enabled, tmp_path):
    written(tmp_path)
    if not enabled:
        hf_mlspec.disable()
    try:
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
        assert type(stock.model.layers[0].mlp.up_proj) is torch.nn.Linear
        assert type(asked(tmp_path).model.layers[0].mlp.up_proj) is Int4Linear
    finally:
        hf_mlspec.enable()


def test_the_header_is_read_once(tmp_path, monkeypatch):
    path, parse, times = written(tmp_path), gguf_file._parse, []
    monkeypatch.setattr(gguf_file, "_parse", lambda *parts: times.append(parts[0]) or parse(*parts))
    hf_mlspec.load(path)
    assert times == [path]
    asked(tmp_path)
    assert times == [path, path]


def test_a_class_of_its_own(tmp_path):
    written(tmp_path)
    reading = MLSpecConfig.for_checkpoint(str(tmp_path / "x.gguf"))
    model = LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", quantization_config=reading)
    assert type(model.model.layers[0].mlp.up_proj) is Int4Linear


def test_bad_requests_are_named(tmp_path):
    path = written(tmp_path)
    with pytest.raises(ValueError, match=r"holds no y\.gguf: name a GGUF file that is there"):
        MLSpecConfig.for_checkpoint(str(tmp_path), gguf_file="y.gguf")
    reading = MLSpecConfig.for_checkpoint(str(path))
    (tmp_path / "other").mkdir()
    other = written(tmp_path / "other", name="qwen3")
    with pytest.raises(ValueError, match=r"is of a llama model, the config is Qwen3Config"):
        AutoModelForCausalLM.from_pretrained(other.parent, gguf_file="x.gguf", quantization_config=reading)
    (tmp_path / "third").mkdir()
    third = written(tmp_path / "third", "Q8_0")
    with pytest.raises(ValueError, match="name one file in both"):
        AutoModelForCausalLM.from_pretrained(third.parent, gguf_file="x.gguf", quantization_config=reading)
    with pytest.raises(ValueError, match=r"read as LlamaForCausalLM, not as LlamaModel"):
        AutoModel.from_pretrained(tmp_path, gguf_file="x.gguf", quantization_config=reading)
    with pytest.raises(ValueError, match=r"is quantized already: leave quantization_config, MLSpecConfig, out"):
        hf_mlspec.load(path, quantization_config=MLSpecConfig())
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ValueError, match=r"x\.gguf is damaged"):
        MLSpecConfig.for_checkpoint(str(tmp_path), gguf_file="x.gguf")


def test_the_file_has_to_be_named_in_both(tmp_path):
    path = written(tmp_path)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "dense")
    reading = MLSpecConfig.for_checkpoint(str(path))
    with pytest.raises(ValueError, match="name the file as gguf_file, too"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=reading)


def test_a_file_without_blocks_is_no_business_of_ours(tmp_path):
    written(tmp_path, "F16")
    with pytest.raises(ValueError, match="holds no layer in blocks of codes: leave quantization_config out"):
        asked(tmp_path)


