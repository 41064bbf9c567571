"""Does a checkpoint become one of another library and come back bit for bit, and is what cannot be said refused?"""

from __future__ import annotations

import json

import pytest
import torch
import transformers.modeling_utils
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.integration.quantizer import foreign_saving, source
from hf_mlspec.integration.quantizer.convert import convert_folder
from hf_mlspec.integration.quantizer.examine import examine
from tests import foreign_checkpoints
from tests.models import prompts, tiny

IDS = torch.arange(3, 19)[None]
OTHERS = ("gptq", "compressed-tensors")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in ("no compiled kernel", ".*module by")]
logging.disable_progress_bar()


def ours(folder, kind="llama", dtype=torch.float32, **settings):
    """A folder of this package."""
    tiny(kind, dtype=dtype).save_pretrained(folder / "wide")
    config = MLSpecConfig(**{"group_size": 32, **settings} if settings["format"] != "mxfp4" else settings)
    model = AutoModelForCausalLM.from_pretrained(folder / "wide", quantization_config=config)
    model.save_pretrained(folder / "ours")
    return str(folder / "ours")


def theirs(folder, bits=4, size=32, symmetric=True, act_order=False, bits_of=None, **shape):
    """A folder of GPTQ. bits_of: by the end of a layer's name. shape: of the model."""
    model, layers = tiny(dtype=torch.float32, head_dim=16, **shape), {}
    for index, (name, linear) in enumerate(foreign_checkpoints.linears(model).items()):
        own = next((value for end, value in (bits_of or {}).items() if name.endswith(end)), bits)
        codes = foreign_checkpoints.rounded(linear.weight, own, size, symmetric, index, act_order)
        layers[name] = foreign_checkpoints.gptq(codes, own)
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": act_order}
    config |= {"dynamic": {f"+:.*{end}": {"bits": own} for end, own in bits_of.items()}} if bits_of else {}
    return str(foreign_checkpoints.write(folder / "theirs", model, layers, config))


def state(folder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def require_same(first, second):
    one, other = state(first), state(second)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    different += [name for name in one if one[name].dtype != other[name].dtype]
    assert different == []


def ids(model) -> list[list[int]]:
    return model.generate(**prompts([5, 9]), max_new_tokens=8, do_sample=False, pad_token_id=0).tolist()


def entries(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


FORMATS = [{"format": "int4"}, {"format": "int4", "symmetric": False}, {"format": "bitplanes"}, {"format": "mxfp4"}]
TRIPS = [(settings, to) for settings in FORMATS for to in OTHERS if (settings["format"], to) != ("mxfp4", "gptq")]


@pytest.mark.parametrize(("settings", "to"), TRIPS, ids=lambda value: str(value))
def test_from_ours_to_others_and_back_bit_for_bit(tmp_path, settings, to):
    start = ours(tmp_path, kind="qwen2", **settings)
    there = convert_folder(start, str(tmp_path / "there"), to)
    back = convert_folder(str(tmp_path / "there"), str(tmp_path / "back"))
    assert (there.source, there.to, back.source, back.to) == ("mlspec", to, to, "mlspec")
    assert sum(there.layers.values()) == sum(back.layers.values()) == 14
    assert there.kept == back.kept == ["lm_head"]
    require_same(start, tmp_path / "back")
    config = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == to
    models = [AutoModelForCausalLM.from_pretrained(start), hf_mlspec.load(tmp_path / "there")]
    assert ids(models[0]) == ids(models[1])


@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize("to", OTHERS)
def test_larger_groups(tmp_path, group_size, to):
    tiny(dtype=torch.float32, hidden_size=128, intermediate_size=256, head_dim=32).save_pretrained(tmp_path / "wide")
    config = MLSpecConfig(format="int4", group_size=group_size)
    AutoModelForCausalLM.from_pretrained(tmp_path / "wide", quantization_config=config).save_pretrained(tmp_path / "a")
    convert_folder(str(tmp_path / "a"), str(tmp_path / "b"), to)
    convert_folder(str(tmp_path / "b"), str(tmp_path / "c"))
    require_same(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True], ids=["", "act-order"])
def test_gptq_through_all_formats(tmp_path, bits, act_order):
    start = theirs(tmp_path, bits, act_order=act_order)
    convert_folder(start, str(tmp_path / "a"))
    for number, (origin, to) in enumerate([(start, "gptq"), ("0", "compressed-tensors"), ("1", "gptq")]):
        convert_folder(str(tmp_path / origin), str(tmp_path / str(number)), to)
        convert_folder(str(tmp_path / str(number)), str(tmp_path / f"back{number}"))
        require_same(tmp_path / "a", tmp_path / f"back{number}")
    assert torch.equal(hf_mlspec.load(start)(IDS).logits, hf_mlspec.load(tmp_path / "a")(IDS).logits)
    stored = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert ("transform" in stored) == act_order


@pytest.mark.parametrize("settings", [{"format": "int4"}, {"format": "bitplanes"}, {"format": "mxfp4"}], ids=str)
def test_stock_transformers_reads_compressed_tensors(tmp_path, settings):
    """In float32; that library makes bfloat16 of MXFP4, whatever the model is."""
    pytest.importorskip("compressed_tensors")
    dtype = torch.bfloat16 if settings["format"] == "mxfp4" else torch.float32
    start = ours(tmp_path, dtype=dtype, **settings)
    convert_folder(start, str(tmp_path / "there"), "compressed-tensors")
    source.disable()
    try:
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    finally:
        source.enable()
    wide = AutoModelForCausalLM.from_pretrained(start).dequantize(dtype)
    assert type(stock.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    assert torch.equal(stock(IDS).logits, wide(IDS).logits)


def test_shards_and_the_tokenizer_come_along(saved_model, tmp_path):
    config = MLSpecConfig(format="int4", group_size=32)
    AutoModelForCausalLM.from_pretrained(saved_model, quantization_config=config).save_pretrained(tmp_path / "a")
    for file in saved_model.glob("tokenizer*"):
        (tmp_path / "a" / file.name).write_bytes(file.read_bytes())
    done = convert_folder(str(tmp_path / "a"), str(tmp_path / "b"), "gptq", max_shard_size="60KB")
    assert {"tokenizer.json", "tokenizer_config.json"} <= {*done.copied}
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 2
    assert done.target_bytes == sum(file.stat().st_size for file in (tmp_path / "b").glob("*.safetensors"))
    assert examine(str(tmp_path / "b")).files > 2
    convert_folder(str(tmp_path / "b"), str(tmp_path / "c"), max_shard_size="60KB")
    require_same(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c" / "tokenizer.json").read_bytes() == (saved_model / "tokenizer.json").read_bytes()
    convert_folder(str(tmp_path / "c"), str(tmp_path / "b"), "compressed-tensors", overwrite=True)
    assert [file.name for file in (tmp_path / "b").glob("model*")] == ["model.safetensors"]


def test_layers_that_differ(tmp_path):
    start = theirs(tmp_path, bits_of={"down_proj": 8})
    for to in ("mlspec", "gptq"):
        with pytest.raises(ValueError, match=r"(down|q)_proj .*(down|q)_proj"):
            convert_folder(start, str(tmp_path / "out"), to)
    assert not (tmp_path / "out").exists()
    done = convert_folder(start, str(tmp_path / "out"), "compressed-tensors")
    assert done.layers == {"4 bits, groups of 32, symmetric": 12, "8 bits, groups of 32, symmetric": 2}
    one, other = (hf_mlspec.load(folder).state_dict() for folder in (start, tmp_path / "out"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    from tests.integration.test_gguf_models import written

    path = str(written(tmp_path, "Q8_0"))
    done = convert_folder(path, str(tmp_path / "a"))
    assert (done.source, done.layers) == ("gguf", {"bitplanes, group_size 32, num_planes 8": 15})
    convert_folder(path, str(tmp_path / "b"), "compressed-tensors")
    convert_folder(str(tmp_path / "b"), str(tmp_path / "c"))
    require_same(tmp_path / "a", tmp_path / "c")
    with torch.inference_mode():
        assert torch.equal(hf_mlspec.load(path)(IDS).logits, hf_mlspec.load(tmp_path / "a")(IDS).logits)


@pytest.mark.parametrize(("settings", "to", "message"), [
    ({"format": "mxfp4"}, "gptq", r"layers\.0\.self_attn\.q_proj is MXFP4: GPTQ has integers only"),
    ({"format": "bitplanes", "num_planes": 3}, "gptq", r"q_proj: the codes of its 3 bit-planes are 0 at 3\.5"),
    ({"format": "bitplanes", "num_planes": 5}, "gptq", "q_proj has 5 bits: GPTQ has 2, 3, 4 and 8"),
    ({"format": "bitplanes", "num_planes": "ternary"}, "compressed-tensors", "bit-planes are 0 at 1;"),
    ({"format": "int4"}, "mlspec", "is in the format of this package already"),
    ({"format": "int4"}, "awq", "checkpoints are not written as 'awq', but as mlspec, compressed-tensors, gptq"),
    ({"format": "int4", "kind": "gpt_oss"}, "gptq", "experts is packed as PackedExperts: GPTQ files hold linear"),
    ({"format": "mxfp4", "kind": "gpt_oss"}, "compressed-tensors", "files hold linear layers only")])
def test_what_cannot_be_said_is_refused_and_nothing_is_written(tmp_path, settings, to, message):
    start = ours(tmp_path, **settings)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=message):
        convert_folder(start, str(tmp_path / "out"), to, overwrite=True)
    assert entries(tmp_path / "out") == {"mine.txt": b"mine"}
    with pytest.raises(ValueError, match=message):
        convert_folder(start, str(tmp_path / "new"), to)
    assert not (tmp_path / "new").exists()


def test_nested_weights_are_refused(tmp_path):
    tiny(dtype=torch.bfloat16).save_pretrained(tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "wide", quantization_config=MLSpecConfig(format="nested-bf16"))
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"q_proj is Nested: it has no integer codes"):
        convert_folder(str(tmp_path / "ours"), str(tmp_path / "out"), "gptq")


@pytest.mark.parametrize(("change", "message"), [
    (lambda folder: None, "is not quantized; mlspec quantize packs it"),
    (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged: it holds no JSON"),
    (lambda folder: quantized_by(folder, "bitsandbytes"), "quant_method 'bitsandbytes' is not read"),
    (lambda folder: quantized_by(folder, "gptq"), "no linear layer of LlamaForCausalLM .* is quantized")])
def test_a_source_that_is_not_read_is_refused(tmp_path, change, message):
    tiny(dtype=torch.float32).save_pretrained(tmp_path / "a")
    change(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        convert_folder(str(tmp_path / "a"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def quantized_by(folder, method):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))


@pytest.mark.parametrize("to", ["mlspec", *OTHERS])
def test_files_that_were_there_survive_a_full_disk(tmp_path, monkeypatch, to):
    start = theirs(tmp_path)
    convert_folder(start, str(tmp_path / "out"))
    before = entries(tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty"):
        convert_folder(start, str(tmp_path / "out"), to)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    with pytest.raises(OSError, match="unchanged"):
        convert_folder(start, str(tmp_path / "out"), to, overwrite=True)
    assert entries(tmp_path / "out") == before


def test_what_does_not_read_back_takes_no_place(tmp_path, monkeypatch):
    start, spoilt = ours(tmp_path, format="int4"), foreign_saving._state

    def without_scales(*args):
        return {name: tensor for name, tensor in spoilt(*args).items() if not name.endswith("0.mlp.up_proj.scales")}

    monkeypatch.setattr(foreign_saving, "_state", without_scales)
    with pytest.raises(ValueError, match="up_proj: scales is missing"):
        convert_folder(start, str(tmp_path / "out"), "gptq")
    assert not (tmp_path / "out").exists()


def test_a_model_loaded_in_float16_keeps_its_dtype(tmp_path):
    start = ours(tmp_path, format="int4", dtype=torch.float16)
    convert_folder(start, str(tmp_path / "a"), "gptq")
    convert_folder(str(tmp_path / "a"), str(tmp_path / "b"))
    require_same(start, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("to", [*OTHERS, "gguf"])
@pytest.mark.parametrize(("settings", "name", "words"), [
    ({"activation_bits": 8}, "activation_bits", "multiplies activations of 8 bits"),
    ({"activation_clip": 0.9}, "activation_clip", r"clips activations at 0\.9 of their largest"),
    ({"kv_cache": "int8"}, "kv_cache", "keeps keys and values as int8"),
])  # fmt: skip
def test_what_is_computed_beside_the_weights_is_not_dropped(tmp_path, to, settings, name, words):
    source, target = ours(tmp_path, format="int4", **settings), tmp_path / ("x.gguf" if to == "gguf" else "out")
    said = rf"{words} \({name}\), which a {to} checkpoint cannot say: take {name} out"
    with pytest.raises(ValueError, match=said):
        convert_folder(source, str(target), to)
    assert not target.exists()
