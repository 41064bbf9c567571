"""Does whoever wants a model of a research project's folder hear what it is, and what can be done with it?"""

import json

import pytest
import torch
from safetensors.torch import save_file

import hf_mlspec
from hf_mlspec.integration.quantizer.convert import convert_folder
from hf_mlspec.integration.quantizer.examine import examine
from tests.checkpoints.rotated_files import CONFIG
from tests.checkpoints.rotated_files import folder as rotated
from tests.models import tiny


@pytest.fixture
def quarot(tmp_path):
    tensors, config = rotated()[0], CONFIG
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["QuarotLlamaForCausalLM"]}))
    return str(tmp_path)


@pytest.fixture
def atom(tmp_path):
    tiny("llama", dtype=torch.float16).save_pretrained(tmp_path)
    torch.save({"layers.0.self_attn.q_proj.input": torch.arange(32)}, tmp_path / "llama_reorder_index_wikitext2.pt")
    return str(tmp_path)


@pytest.mark.parametrize("call", [hf_mlspec.load, lambda folder: convert_folder(folder, f"{folder}/ours")])
def test_what_can_be_done_is_said(call, quarot):
    with pytest.raises(ValueError, match=r"checkpoint of QuaRot, or QSpec.*rotated.*checkpoints.qspec checks"):
        call(quarot)


@pytest.mark.parametrize("call", [hf_mlspec.load, lambda folder: convert_folder(folder, f"{folder}/ours")])
def test_weights_in_another_order_are_not_loaded_as_they_are(call, atom):
    with pytest.raises(ValueError, match=r"checkpoint of Atom: .*llama_reorder_index_wikitext2.pt.*checkpoints.atom"):
        call(atom)


def test_it_is_told(quarot):
    found = examine(quarot)
    assert found.model_class == "QuarotLlamaForCausalLM"
    assert found.title == "QuaRot, or QSpec, which has the same layout"
    assert [own.stored_as for own in found.layers] == ["QuaRot, 4 bits, a scale a row"]
    assert 4 < found.layers[0].bits_per_weight < 6
    assert found.engines["cpu"].startswith("nothing: its weights were rotated")
    assert not found.levels


def test_an_order_of_inputs_is_told(atom):
    found = examine(atom)
    assert found.title == "Atom"
    assert "llama_reorder_index_wikitext2.pt" in found.engines["cpu"]
    assert found.weights == tiny("llama").num_parameters()
