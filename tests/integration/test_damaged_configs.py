"""Is a config file that is damaged, or that would have other files read, refused with one error that names it?"""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.integration.dtype import dtype_named
from hf_mlspec.integration.json_object import read_object
from hf_mlspec.integration.levels.load import read_model
from hf_mlspec.integration.quantizer.blank import quantization_of
from hf_mlspec.integration.quantizer.checkpoint import require_own_shards
from hf_mlspec.integration.quantizer.folder import require_wide
from hf_mlspec.integration.quantizer.source_config import SourceConfig
from tests.models import tiny

NO_OBJECTS = {"[1]": "a list", "null": "null", '"x"': "a str", "garbage": "no JSON", "[" * 100_000: "no JSON"}
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def changed(saved, tmp_path):
    """The folder with a config.json that has these entries, too."""

    def change(**entries):
        told = json.loads((saved / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**told, **entries}))
        (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
        return tmp_path

    return change


@pytest.mark.parametrize("text", NO_OBJECTS, ids=lambda text: text[:10])
def test_what_is_no_object_is_named_with_its_file(tmp_path, text):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^{file} is damaged: it holds {NO_OBJECTS[text]}"):
        read_object(file)


@pytest.mark.parametrize("text", ["null", DEEP, "garbage"], ids=lambda text: text[:10])
@pytest.mark.parametrize(
    "call",
    [hf_mlspec.load, quantization_of, require_wide, lambda folder: read_model(folder, "auto")],
    ids=["load", "inspect", "quantize", "level"],
)
def test_a_damaged_config_is_named_by_all_who_read_it(tmp_path, text, call):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path}/config.json is damaged: it holds n"):
        call(str(tmp_path))


def test_an_index_that_is_no_object_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json is damaged: it holds no"):
        require_own_shards(tmp_path)


def test_an_older_quantize_config_that_is_damaged_is_named(changed):
    folder = changed()
    (folder / "quantize_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"quantize_config.json is damaged: it holds a list, no JSON object"):
        hf_mlspec.load(folder)


@pytest.mark.parametrize(("told", "words"), [
    ("gptq", "its quantization_config is 'gptq', an object was expected"),
    ([1], r"its quantization_config is \[1\], an object was expected"),
    ({"quant_method": ["gptq"], "bits": 4}, r"its quant_method is \['gptq'\], a word was expected"),
])  # fmt: skip
@pytest.mark.parametrize("call", [hf_mlspec.load, lambda folder: quantization_of(str(folder))])
def test_a_quantization_config_of_another_kind_is_named(changed, told, words, call):
    with pytest.raises(ValueError, match=rf"config.json is damaged: {words}"):
        call(changed(quantization_config=told))


@pytest.mark.parametrize("call", [
    hf_mlspec.load, hf_mlspec.MLSpecConfig.for_checkpoint, AutoModelForCausalLM.from_pretrained,
])  # fmt: skip
@pytest.mark.parametrize("method", ["mlspec-source", "mlspec-gguf", "gguf"])
def test_no_config_has_other_files_read(changed, tmp_path, call, method, monkeypatch):
    monkeypatch.setattr("hf_mlspec.checkpoints.readers.open_gguf", lambda file: pytest.fail(f"{file} was opened"))
    gguf = {"quant_method": "gguf", "file": str(tmp_path / "secret")}
    folder = str(changed(quantization_config=gguf if method == "gguf" else {"quant_method": method, "source": gguf}))
    if (call, method) == (AutoModelForCausalLM.from_pretrained, "gguf"):
        call(folder)  # transformers skips what it does not know
        return
    with pytest.raises(ValueError, match=rf"config.json .*quant_method '{method}', which is made in memory"):
        call(folder)


def test_a_config_without_its_source_is_named(changed):
    with pytest.raises(ValueError, match=r"quant_method 'mlspec-source', which is made in memory"):
        AutoModelForCausalLM.from_pretrained(changed(quantization_config={"quant_method": "mlspec-source"}))


def test_what_was_made_in_memory_is_taken_and_not_what_was_written(tmp_path):
    made = SourceConfig({"quant_method": "gptq", "bits": 4, "group_size": 32})
    told = copy.deepcopy(made.to_dict())
    assert SourceConfig.from_dict(told).source == made.source
    with pytest.raises(ValueError, match="made in memory"):
        SourceConfig.from_dict(json.loads(json.dumps(told)))


@pytest.mark.parametrize("word", ["bf16", "float99", "nn", "int8", "Tensor"])
def test_a_word_that_is_no_dtype_is_refused_with_the_choices(saved, changed, word):
    words = rf"dtype is '{word}', choose one of auto, bfloat16, float16, float32, float64"
    for call in (dtype_named, lambda word: hf_mlspec.load(saved, dtype=word)):
        with pytest.raises(ValueError, match=f"^{words}"):
            call(word)
    with pytest.raises(ValueError, match=f"config.json: {words}"):
        hf_mlspec.load(changed(dtype=word))


def test_words_that_are_dtypes():
    assert dtype_named("bfloat16") is torch.bfloat16
    assert dtype_named("torch.float32") is torch.float32
    assert dtype_named("auto") == "auto"
    assert dtype_named(torch.float16) is torch.float16
    assert dtype_named(None) is None
