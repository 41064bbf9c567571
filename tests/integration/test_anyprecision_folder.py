"""Does a folder in Any-Precision's layout load packed, decode what its tables say, and draft for itself?"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.integration.quantizer.examine import examine
from hf_mlspec.nn.lut import LutLinear
from tests.anyprecision_files import write_folder

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")
TARGET = Path(hf_mlspec.__file__).parent / "demo_pair" / "target"
IDS = torch.tensor([[1, 5, 9, 11, 30, 12, 290, 507, 298]])
HOW = {"max_new_tokens": 48, "do_sample": False, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("anyprec") / "w4_orig3"
    return folder, write_folder(TARGET, folder)


@pytest.fixture(scope="module")
def model(written):
    return hf_mlspec.load(written[0])


def test_every_layer_is_packed_and_means_what_was_written(written, model):
    for name, widths in written[1].items():
        layer = model.get_submodule(name)
        assert type(layer) is LutLinear
        for bits, weight in widths.items():
            assert torch.equal(layer.dequantized(torch.float16, bits), weight)
    assert not hasattr(model.config, "anyprec")


def test_alone_is_the_chain_over_its_own_planes_and_its_dense_twin(written, model):
    hf_mlspec.prepare(model)
    alone = model.generate(IDS, **HOW)
    assert torch.equal(alone, model.generate(IDS, assistant_models=["planes3"], **HOW))
    assert torch.equal(alone, model.generate(IDS, assistant_models=["planes3", "prompt_lookup"], **HOW))
    twin = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16)
    for name, widths in written[1].items():
        twin.get_submodule(name).weight.data = widths[4].to(torch.bfloat16)
    with torch.no_grad():
        logits, expected = model(IDS).logits.float(), twin.double()(IDS).logits
        stock = twin.bfloat16()(IDS).logits.double()
    error, allowed = (logits.double() - expected).abs().max(), (stock - expected).abs().max()
    assert error <= 1.2 * allowed


def test_a_width_without_a_table_is_no_level(model):
    with pytest.raises(ValueError, match=r"level 'planes2': .* no table of 2 bits: its levels are called"):
        model.generate(IDS, assistant_models=["planes2"], **HOW)


def test_it_is_saved_as_ours_and_loads_again(model, tmp_path):
    model.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (settings["format"], settings["num_planes"], settings["least_planes"]) == ("lut-planes", 4, 3)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    own, other = model.state_dict(), again.state_dict()
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert examine(str(tmp_path)).levels[0] == "planes3"


def test_it_is_examined_without_loading(written):
    found = examine(str(written[0]))
    assert (found.method, found.title, found.levels[0]) == ("anyprec", "Any-Precision", "planes3")
    (layers,) = found.layers
    assert (layers.count, layers.stored_as) == (56, "Any-Precision, 3 to 4 bits, a table a row")
    assert layers.becomes == "lookup-table planes (num_planes 4, least_planes 3)"
    assert found.stock.startswith("no")


def test_from_pretrained_takes_its_config_and_safetensors(written, tmp_path):
    folder = written[0]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    for place in (folder, tmp_path):
        config = MLSpecConfig.for_checkpoint(str(place))
        read = AutoModelForCausalLM.from_pretrained(place, quantization_config=config, dtype=torch.bfloat16)
        assert type(read.model.layers[0].mlp.up_proj) is LutLinear


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: s.pop("model.layers.1.mlp.up_proj.lut3"), r"model\.layers\.1\.mlp\.up_proj: lut3 is missing"),
    (lambda s: s["model.layers.0.mlp.up_proj.lut4"].fill_(torch.inf), "lut4 holds .* values that are NaN or Inf"),
    (lambda s: s.update({"model.layers.0.self_attn.q_proj.qweight": torch.zeros(4, 1, 1, dtype=torch.int32)}),
     r"q_proj\.qweight in .*pytorch_model\.bin has shape \[4, 1, 1\]"),
])  # fmt: skip
def test_damage_is_named_before_anything_is_loaded(written, tmp_path, change, message):
    (tmp_path / "config.json").write_bytes((written[0] / "config.json").read_bytes())
    state = torch.load(written[0] / "pytorch_model.bin", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        hf_mlspec.load(tmp_path)


def test_groups_of_tables_are_refused(written, tmp_path):
    config = json.loads((written[0] / "config.json").read_text())
    config["anyprec"]["group_count"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="anyprec has group_count 2, one table a row was expected"):
        hf_mlspec.load(tmp_path)


def test_no_model_is_quantized_to_it():
    with pytest.raises(ValueError, match="no model is quantized to 'lut-planes': tables are fitted to calib"):
        AutoModelForCausalLM.from_pretrained(TARGET, quantization_config=MLSpecConfig("lut-planes"))
