"""Is a damaged packed checkpoint refused before memory is allocated, with tensor, file and numbers named?"""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hf_mlspec import MLSpecConfig
from hf_mlspec.checkpoints.safetensors_file import CHECKSUMS_KEY, read_header
from hf_mlspec.integration.quantizer.checkpoint import Checkpoint
from tests.models import tiny

LAYER = "model.layers.1.mlp.up_proj"
FORMATS = {"int4": {"format": "int4", "group_size": 32, "symmetric": False}, "mxfp4": {"format": "mxfp4"}}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a packed model: by format, as one file and in shards."""
    dense = tmp_path_factory.mktemp("dense")
    tiny("llama", dtype=torch.bfloat16).save_pretrained(dense)
    made = {}
    for name, settings in FORMATS.items():
        model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=MLSpecConfig(**settings))
        for shards, size in {"whole": "1GB", "shards": "9KB"}.items():
            made[name, shards] = tmp_path_factory.mktemp(f"{name}-{shards}")
            model.save_pretrained(made[name, shards], max_shard_size=size)
    return made


@pytest.fixture(params=["whole", "shards"])
def folder(request, saved, tmp_path):
    """A copy of the int4 model to damage."""
    shutil.copytree(saved["int4", request.param], tmp_path, dirs_exist_ok=True)
    return tmp_path


def file_of(folder: Path, name: str) -> Path:
    return next(f for f in sorted(folder.glob("*.safetensors")) if any(t.name == name for t in read_header(f)[0]))


def rewrite(folder: Path, name: str, change, keep_checksums: bool = False) -> Path:
    """The file that holds ``name``, its tensors changed, and the others as a foreign tool writes them: without
    checksums."""
    for other in [] if keep_checksums else folder.glob("*.safetensors"):
        save_file(load_file(other), other, metadata={"format": "pt"})
    file = file_of(folder, name)
    tensors, metadata = load_file(file), read_header(file)[1]
    change(tensors)
    save_file(tensors, file, metadata=metadata)
    return file


def refused(folder: Path, error, *words: str) -> None:
    """Loading raises ``error`` with these words before transformers loads the first tensor."""

    def loads(*args, **kwargs):
        raise AssertionError("tensors were loaded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.convert_and_load_state_dict_in_model", loads)
        with pytest.raises(error) as raised:
            AutoModelForCausalLM.from_pretrained(folder)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", FORMATS)
def test_an_intact_checkpoint_loads_with_and_without_checksums(saved, tmp_path, name):
    shutil.copytree(saved[name, "shards"], tmp_path, dirs_exist_ok=True)
    first = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for file in tmp_path.glob("*.safetensors"):
        assert CHECKSUMS_KEY in read_header(file)[1]
        save_file(load_file(file), file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"no CRC-32 \(mlspec_crc32\) of (\d+) of its \1 tensors.* not checked"):
        second = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_every_tensor_has_its_checksum(saved):
    for folder in saved.values():
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as contents:
                assert {*contents.keys()} <= {*json.loads(contents.metadata()[CHECKSUMS_KEY])}


def test_only_a_save_without_checksums_is_warned_of(folder, recwarn):
    AutoModelForCausalLM.from_pretrained(folder)
    assert not [warning for warning in recwarn if "CRC-32" in str(warning.message)]
    file = file_of(folder, f"{LAYER}.weight_packed")
    save_file(load_file(file), file)  # no metadata at all
    AutoModelForCausalLM.from_pretrained(folder)
    said = [str(warning.message) for warning in recwarn if "CRC-32" in str(warning.message)]
    shards = len([*folder.glob("*.safetensors")]) > 1  # the other files list the checksums of this one
    assert [text.startswith(f"the metadata of {file} has no CRC-32") for text in said] == ([] if shards else [True])


def test_a_shard_that_lost_its_metadata_is_checked_by_the_others(saved, tmp_path):
    shutil.copytree(saved["int4", "shards"], tmp_path, dirs_exist_ok=True)
    name = f"{LAYER}.weight_packed"
    file = rewrite(tmp_path, name, lambda tensors: tensors[name].__setitem__((3, 3), 255), keep_checksums=True)
    save_file(load_file(file), file)
    refused(tmp_path, ValueError, f"{name} in {file} is damaged", "have CRC-32", "saved was")


def test_every_flipped_bit_of_the_key_of_the_checksums_is_found(folder):
    file = file_of(folder, f"{LAYER}.weight_packed")
    whole = file.read_bytes()
    place = whole.index(CHECKSUMS_KEY.encode())
    for number in range(8 * len(CHECKSUMS_KEY)):
        damaged = bytearray(whole)
        damaged[place + number // 8] ^= 1 << number % 8
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is damaged: its (header of|metadata has .* where 'mlspec_crc32' was)"):
            Checkpoint.read([file])
    refused(folder, ValueError, str(file), "is damaged")


def test_every_flipped_bit_of_the_data_is_found(folder):
    """One bit in the middle of each tensor of the file, in turn."""
    file = file_of(folder, f"{LAYER}.weight_packed")
    whole = file.read_bytes()
    for tensor in read_header(file)[0]:
        place = (tensor.begin + tensor.end) // 2
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        file.write_bytes(damaged)
        refused(folder, ValueError, f"{tensor.name} in {file} is damaged: its {tensor.end - tensor.begin} bytes have "
                                    "CRC-32", "saved was")


@pytest.mark.parametrize("cut", [1, 1000, -4, -20])
def test_a_truncated_file(folder, cut):
    """cut > 0: bytes missing at the end; below: all but the first few bytes are gone."""
    file = file_of(folder, f"{LAYER}.weight_packed")
    whole = file.read_bytes()
    left = whole[:-cut]
    file.write_bytes(left)
    refused(folder, ValueError, f"{file} is damaged: it has {len(left)} bytes")


def test_bytes_after_the_end(folder):
    file = file_of(folder, f"{LAYER}.weight_packed")
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"\0" * 3)
    refused(folder, ValueError, f"{file} is damaged: it has {size + 3} bytes, its header describes {size}")


@pytest.mark.parametrize(("old", "new", "words"), [
    (b'{"', b'["', "cannot be read"),
    (b"U8", b"F4", None),
    (b'"dtype":"F16"', b'"dtype":"F32"', "of F32 in 128 bytes"),
    (b'"data_offsets"', b'"data_offsetz"', "cannot be read ('data_offsets')"),
], ids=["json", "unknown dtype", "another dtype", "key"])  # fmt: skip
def test_a_damaged_header(folder, old, new, words):
    file = file_of(folder, f"{LAYER}.weight_scale")
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = whole[8 : 8 + length]
    assert old in header
    file.write_bytes(whole[:8] + header.replace(old, new, 1) + whole[8 + length :])
    refused(folder, (ValueError, TypeError), str(file), *([] if words is None else [words]))


@pytest.mark.parametrize(("change", "words"), [
    ({"__metadata__": 5}, "cannot be read"),
    ({"__metadata__": None}, "cannot be read"),
    ({"a": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}}, "a has -2 among its sizes and offsets"),
    ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0.0, 4.0]}}, "a has 0.0 among its sizes and offsets"),
    (b'{"a":' * 100_000, "cannot be read"),
    ({"__metadata__": {CHECKSUMS_KEY: "[" * 100_000}}, "its checksums cannot be read"),
    *[({"__metadata__": {CHECKSUMS_KEY: text}}, "damaged: its checksums cannot .* no JSON object of texts")
      for text in ("[]", '[["a", "00000000"]]', '["ab"]', '{"a": 5}', '{"a": {}}', '"ab"', "null")],
], ids=["metadata", "no metadata", "negative", "no integers", "nested", "nested checksums", "a list", "pairs",
        "a list of a text", "a number for a text", "an object for a text", "a text", "null"])  # fmt: skip
def test_a_strange_header(tmp_path, change, words):
    file = tmp_path / "model.safetensors"
    text = change if isinstance(change, bytes) else json.dumps(change).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"1234" * (b'"a"' in text and text[:1] == b"{"))
    with pytest.raises(ValueError, match=words) as raised:
        Checkpoint.read([file])
    assert str(file) in str(raised.value)


def test_an_overlapping_tensor(folder):
    file = file_of(folder, f"{LAYER}.weight_packed")
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    begin, end = header[f"{LAYER}.weight_packed"]["data_offsets"]
    header[f"{LAYER}.weight_packed"]["data_offsets"] = [begin + 1, end + 1]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    refused(folder, ValueError, f"{file} is damaged", f"{LAYER}.weight_packed begins at byte")


def test_a_missing_tensor(folder):
    rewrite(folder, f"{LAYER}.weight_scale", lambda tensors: tensors.pop(f"{LAYER}.weight_scale"))
    refused(folder, ValueError, "1 tensors of LlamaForCausalLM are missing from", str(folder), f"{LAYER}.weight_scale")


def test_a_missing_wide_tensor(folder):
    rewrite(folder, "model.norm.weight", lambda tensors: tensors.pop("model.norm.weight"))
    refused(folder, ValueError, "missing from", "model.norm.weight")


def test_a_tensor_too_many(folder):
    file = rewrite(folder, f"{LAYER}.weight_scale", lambda tensors: tensors.update(stranger=torch.zeros(2)))
    refused(folder, ValueError, "1 tensors belong to no part of LlamaForCausalLM", "stranger", str(file))


def test_zero_points_where_config_says_symmetric(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["symmetric"] = True
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, ValueError, "14 tensors belong to no part", "weight_zero", "restore the config.json")


def test_the_same_tensor_in_two_files(saved, tmp_path):
    shutil.copytree(saved["int4", "shards"], tmp_path, dirs_exist_ok=True)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    twice = next(iter(load_file(first)))
    save_file({**load_file(second), twice: load_file(first)[twice]}, second)
    refused(tmp_path, ValueError, twice, f"is also in {first}")


@pytest.mark.parametrize(("part", "change", "words"), [
    ("weight_packed", lambda t: t[:-1], "has shape [63, 16], config.json makes it [64, 16]: it is truncated"),
    ("weight_scale", lambda t: t.repeat(2, 1), "has shape [128, 1], config.json makes it [64, 1]: it is of another"),
    ("weight_scale", lambda t: t.float(), "is torch.float32, config.json makes it torch.float16"),
    ("weight_packed", lambda t: t.to(torch.int8), "is torch.int8, config.json makes it torch.uint8"),
    ("weight_zero", lambda t: t.to(torch.float16), "is torch.float16, config.json makes it torch.uint8"),
])  # fmt: skip
def test_wrong_shapes_and_dtypes(folder, part, change, words):
    name = f"{LAYER}.{part}"
    file = rewrite(folder, name, lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))
    refused(folder, (ValueError, TypeError), f"{name} in {file} {words}")


@pytest.mark.parametrize(("setting", "value", "words"), [
    ("hidden_size", 96, "has shape [64, 32], config.json makes it [64, 96]: hidden_size is 96 there, 7 of 7 tensors"),
    ("hidden_size", 48, "has shape [64, 32], config.json makes it [64, 48]: hidden_size is 48 there, 7 of 7 tensors"),
    ("vocab_size", 80, "has shape [64, 32], config.json makes it [80, 32]: vocab_size is 80 there, 2 of 7 tensors"),
    ("intermediate_size", 128, "config.json makes it [128, 1]: intermediate_size is 128 there, "),
    ("head_dim", 24, "config.json makes it [48, 1]: num_key_value_heads x head_dim is 48 there, "),
])  # fmt: skip
def test_a_config_of_other_sizes_is_said(folder, setting, value, words):
    """Not the files: they are whole."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, setting: value}))
    refused(folder, ValueError, f" in {folder}", words, "differ, config.json is of another model; restore the files")


@pytest.mark.parametrize(("part", "value", "words"), [
    *[("weight_scale", v, f"1 values that are NaN, Inf, zero or negative, the first ({v:g}) at row 3, group 0")
      for v in (float("nan"), float("inf"), -float("inf"), 0.0, -1.0)],
    ("weight_zero", 16, "1 zero points above 15, the first (16) at row 3, group 0"),
])  # fmt: skip
def test_values_no_quantizer_writes(folder, part, value, words):
    name = f"{LAYER}.{part}"
    file = rewrite(folder, name, lambda tensors: tensors[name].__setitem__((3, 0), value))
    refused(folder, ValueError, f"{LAYER}: {part} holds {words}", f"(in {file})")


def test_nan_codes_of_mxfp4(saved, tmp_path):
    shutil.copytree(saved["mxfp4", "shards"], tmp_path, dirs_exist_ok=True)
    name = f"{LAYER}.weight_scale"
    file = rewrite(tmp_path, name, lambda tensors: tensors[name].__setitem__((3, 0), 255))
    refused(tmp_path, ValueError, f"{LAYER}: weight_scale holds 1 NaN codes (255)", "row 3, block 0", f"(in {file})")


def test_values_in_a_state_dict_are_checked_as_well(saved):
    model = AutoModelForCausalLM.from_pretrained(saved["int4", "whole"])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[f"{LAYER}.weight_scale"][2, 0] = 0
    with pytest.raises(ValueError, match=rf"{LAYER}: weight_scale holds 1 values .*zero.* at row 2, group 0"):
        type(model).from_pretrained(
            None, config=AutoConfig.from_pretrained(saved["int4", "whole"]), state_dict=state
        )


@pytest.mark.parametrize(("change", "words"), [
    ({"format": "int3"}, "format 'int3' is unknown to this version, it has 'mxfp4' or 'int4' or 'nested-bf16'"),
    ({"format": ["int4"]}, "is unknown to this version"),
    ({"format_version": 2}, "format_version is 2, this hf_mlspec reads up to 1"),
    ({"format_version": "1"}, "format_version is '1'"),
    ({"group_size": 48}, "group_size is 48, int4 has 32 or 64 or 128"),
    ({"activation_bits": 2}, "activation_bits is 2: choose 16 (bfloat16) or 8 (int8) or 4 (int4) for int4 weights"),
    ({"planes": 4}, "unknown settings ['planes']; the model may need a newer hf_mlspec"),
])  # fmt: skip
def test_a_config_this_version_does_not_know(folder, change, words):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, ValueError, words)


def test_a_config_that_keeps_a_packed_layer(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] += [LAYER]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, ValueError, "missing from", f"{LAYER}.weight")


def test_checksums_that_cannot_be_read(folder):
    name = f"{LAYER}.weight_scale"
    file = file_of(folder, name)
    save_file(load_file(file), file, metadata={"format": "pt", CHECKSUMS_KEY: "{"})
    refused(folder, ValueError, f"{file} is damaged: its checksums cannot be read")


def test_a_missing_shard_is_named(saved, tmp_path):
    shutil.copytree(saved["int4", "shards"], tmp_path, dirs_exist_ok=True)
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    refused(tmp_path, OSError, lost.name)


def test_shards_of_two_models(saved, tmp_path):
    """Whole, of the same shapes and with good checksums, but not saved together."""
    shutil.copytree(saved["int4", "shards"], tmp_path, dirs_exist_ok=True)
    other = AutoModelForCausalLM.from_pretrained(saved["int4", "shards"])
    other.get_submodule(LAYER).weight_packed.data ^= 1
    other.save_pretrained(tmp_path / "other", max_shard_size="9KB")
    first, *_, last = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    shutil.copy(tmp_path / "other" / last, tmp_path)
    refused(tmp_path, ValueError, str(tmp_path / first), str(tmp_path / last), "of different saves", "differ for 1 of")


@pytest.mark.parametrize("part", ["weight_packed", "weight_zero"])
def test_tensors_missing_from_another_kind_of_file(saved, tmp_path, part):
    """transformers would fill the codes with what the memory happens to hold."""
    model = AutoModelForCausalLM.from_pretrained(saved["int4", "whole"])
    state = dict(model.state_dict())
    del state[f"{LAYER}.{part}"]
    shutil.copy(saved["int4", "whole"] / "config.json", tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=rf"{LAYER}: its packed tensors .* were not all among what was loaded"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    state[f"{LAYER}.{part}"] = model.state_dict()[f"{LAYER}.{part}"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    AutoModelForCausalLM.from_pretrained(tmp_path)
