"""Does `examine` tell what a checkpoint is and becomes, as loading it then shows, without loading a weight?"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.checkpoints import safetensors_file
from hf_mlspec.engines.architecture import UnknownArchitecture
from hf_mlspec.engines.choose import built_decoder
from hf_mlspec.engines.foreseen import why_not_decoded
from hf_mlspec.integration.quantizer.convert import convert_folder
from hf_mlspec.integration.quantizer.examine import examine
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.integration.test_convert import ours, theirs
from tests.models import ARCHITECTURES, packed, tiny

logging.disable_progress_bar()
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.mark.parametrize(("act_order", "told"), [(False, ""), (True, ", act-order")])
def test_gptq(tmp_path, act_order, told):
    found = examine(theirs(tmp_path, act_order=act_order))
    assert (found.method, found.title, found.model_class) == ("gptq", "GPTQ", "LlamaForCausalLM")
    grouped = next(own for own in found.layers if own.stored_as == f"GPTQ, 4 bits, groups of 32, symmetric{told}")
    assert grouped.becomes == "int4 (group_size 32, symmetric True)"
    assert sum(own.count for own in found.layers) == 14
    assert found.dense == ["lm_head"]
    assert found.levels[:2] == ["w4a8", "w4a4"]
    model = hf_mlspec.load(tmp_path / "theirs")
    assert found.weights == tiny(head_dim=16).num_parameters()
    assert found.dtype == str(model.dtype).removeprefix("torch.")


def test_layers_that_become_dense_say_why(tmp_path):
    found = examine(theirs(tmp_path, bits=8, symmetric=False))
    assert {own.becomes for own in found.layers} == {"dense"}
    assert {own.why_dense for own in found.layers} == {"8-bit codes with zero points of their own"}
    assert len(found.dense) == 15


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("shared", [True, False])
def test_orders_of_inputs_decide_on_the_engine(tmp_path, shared):
    """Those of q, k and v are one in files that GPTQ writes, and may be any in others."""
    folders = [theirs(tmp_path, act_order=True, hidden_size=32 if shared else 64), str(tmp_path / "ours")]
    convert_folder(folders[0], folders[1])
    for folder in folders:
        model = hf_mlspec.load(folder, dtype=torch.bfloat16)
        try:
            built_decoder(model, "cpu")
            why = "a compiled decoder"
        except UnknownArchitecture as error:
            why = f"module by module: {error}"
        assert ("in different ways" in why) is not shared
        assert examine(folder).engines["cpu"] == why


def test_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    from tests.integration.test_gguf_models import written

    path = str(written(tmp_path, "Q4_0"))
    found = examine(path)
    assert (found.method, found.model_class, found.dtype) == ("gguf", "LlamaForCausalLM", "bfloat16")
    assert [(own.count, own.bits_per_weight) for own in found.layers] == [(15, 4.5)]
    assert found.weights == hf_mlspec.load(path).dequantize().num_parameters()


@pytest.mark.parametrize(("settings", "bits", "level"), [
    ({"format": "int4"}, 4.5, "w4a8"), ({"format": "mxfp4"}, 4.25, "mxfp4a8"),
    ({"format": "bitplanes", "num_planes": 3}, 3.5, "planes2"),
    ({"format": "int4", "kind": "gpt_oss", "symmetric": False}, 4.75, "w4a4")])
def test_folders_of_this_package(tmp_path, settings, bits, level):
    folder = ours(tmp_path, **settings)
    found = examine(folder)
    assert found.method == "mlspec"
    assert found.stock == "with import hf_mlspec"
    assert level in found.levels
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert found.weights == tiny(settings.get("kind", "llama")).num_parameters()
    assert found.stored_bytes == sum(p.nbytes for p in model.parameters()) + 1  # and the guard's byte
    for own in found.layers:
        assert own.bits_per_weight == pytest.approx(bits, rel=1e-2)


def test_nested_and_unquantized(tmp_path):
    tiny("gemma2", dtype=torch.bfloat16).save_pretrained(tmp_path / "wide")
    config = MLSpecConfig(format="nested-bf16")
    AutoModelForCausalLM.from_pretrained(tmp_path / "wide", quantization_config=config).save_pretrained(tmp_path / "n")
    assert examine(str(tmp_path / "n")).layers[0].stored_as == "nested-bf16 (codebook lloyd_max)"
    found = examine(str(tmp_path / "wide"))
    assert (found.method, found.title, found.stock) == ("", "not quantized", "yes")
    assert [(own.stored_as, own.bits_per_weight) for own in found.layers] == [("dense, bfloat16", 16)]
    assert {"mxfp4", "nested"} <= {*found.levels}


def test_no_weight_is_read(tmp_path, monkeypatch):
    folders = [theirs(tmp_path), ours(tmp_path, format="int4"), str(tmp_path / "wide")]
    read = []
    for name in ("load", "read"):
        own = getattr(safetensors_file.StoredTensor, name)
        monkeypatch.setattr(safetensors_file.StoredTensor, name,
                            lambda self, *args, own=own: read.append(self.name) or own(self, *args))
    for folder in folders:
        examine(folder)
    assert {name.rpartition(".")[2] for name in read} <= {"scales", "qzeros", "g_idx"}


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("weights", [None, "int4"])
def test_the_engine_is_the_one_it_gets(tmp_path, kind, weights):
    model = tiny(kind, dtype=torch.bfloat16)
    model = packed(model, weights) if weights and kind != "gpt2" else model
    try:
        built_decoder(model, "cpu")
        why = None
    except UnknownArchitecture as error:
        why = str(error)
    assert why_not_decoded(model.to("meta") if kind not in ("gemma2", "gemma3") else on_meta(model), "cpu") == why


def test_what_a_gpu_does_not_decode_is_foreseen(monkeypatch):
    monkeypatch.setattr("hf_mlspec.ops.why_no_cuda_kernels", lambda: None)
    model = tiny("hunyuan", dtype=torch.bfloat16).to("meta")
    assert "its description says head_norms 'per rotated head'" in why_not_decoded(model, "cuda")


def on_meta(model):
    """But for the scale of its embedding, which is a number."""
    scale = model.get_input_embeddings().embed_scale.clone()
    model.to("meta").get_input_embeddings().embed_scale = scale
    return model


def spoil_header(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def other_width(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))


@pytest.mark.parametrize("make", [theirs, lambda path: ours(path, format="int4"), None], ids=["gptq", "ours", "wide"])
@pytest.mark.parametrize(("spoil", "message"), [
    (spoil_header, "model.safetensors is damaged: it has"),
    (other_width, r"has shape \[.*\], (config.json makes it|expected)"),
    (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json is damaged: it holds a list"),
    (lambda folder: (folder / "model.safetensors").unlink(), "holds no safetensors file")])
def test_damage_is_named(tmp_path, make, spoil, message):
    tiny(dtype=torch.float32).save_pretrained(tmp_path / "wide")
    folder = make(tmp_path) if make else str(tmp_path / "wide")
    spoil(tmp_path / folder.rpartition("/")[2])
    with pytest.raises(ValueError, match=message):
        examine(folder)


@pytest.mark.parametrize(("name", "message"), [("./nowhere", "does not exist"), ("some/name", "is no folder")])
def test_no_folder_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        examine(name)
