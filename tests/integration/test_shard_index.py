"""Is an index that sends tensors to files elsewhere refused, whoever loads the folder?"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from models import tiny
from transformers import AutoModelForCausalLM

from hf_mlspec import MLSpecConfig
from hf_mlspec.integration.levels.load import read_model
from hf_mlspec.integration.quantizer.checkpoint import require_own_shards

INDEX = "model.safetensors.index.json"
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of shards: of a plain model, and of the packed one."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("plain", "packed")}
    tiny("llama", dtype=torch.bfloat16).save_pretrained(found["plain"], max_shard_size="9KB")
    model = AutoModelForCausalLM.from_pretrained(found["plain"], quantization_config=MLSpecConfig(format="mxfp4"))
    model.save_pretrained(found["packed"], max_shard_size="9KB")
    return found


def copied(source, folder, entry=None):
    """A copy of the folder whose index sends one tensor to `entry`, and its name."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    index = json.loads((folder / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    if entry is not None:
        index["weight_map"][name] = entry
    (folder / INDEX).write_text(json.dumps(index))
    return name


LOADS = {
    "packed": AutoModelForCausalLM.from_pretrained,
    "plain": lambda folder: AutoModelForCausalLM.from_pretrained(folder, quantization_config=MLSpecConfig("mxfp4")),
    "level": lambda folder: read_model(str(folder), torch.bfloat16),
}


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("entry", ["/etc/passwd", "../model.safetensors", "a/../../b.safetensors", "config.json"])
def test_an_entry_elsewhere_is_refused(saved, tmp_path, how, entry):
    name = copied(saved["packed" if how == "packed" else "plain"], tmp_path, entry)
    with pytest.raises(ValueError, match="says that") as raised:
        LOADS[how](tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / INDEX} says that {name} lies in {entry!r}: ")


DAMAGED = [
    ("{", "no JSON"),
    ("[]", "a list, no JSON object"),
    ("{}", "no weight_map"),
    ('{"weight_map": 5}', "no weight_map"),
]


@pytest.mark.parametrize(("text", "said"), DAMAGED)
def test_an_index_that_cannot_be_read_is_named(saved, tmp_path, text, said):
    copied(saved["plain"], tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"is damaged: it holds {said}") as raised:
        read_model(str(tmp_path), torch.bfloat16)
    assert str(tmp_path / INDEX) in str(raised.value)


@pytest.mark.parametrize("how", LOADS)
def test_whole_folders_still_load(saved, tmp_path, how):
    copied(saved["packed" if how == "packed" else "plain"], tmp_path)
    assert LOADS[how](tmp_path).config.hidden_size == 32


def test_an_entry_that_is_no_name(tmp_path):
    (tmp_path / INDEX).write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(ValueError, match="says that a lies in 5: "):
        require_own_shards(tmp_path)


def test_what_is_no_folder_passes(tmp_path):
    require_own_shards("someone/a-model", tmp_path, tmp_path / "none")
