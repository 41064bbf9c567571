"""Do the experts of a gpt-oss checkpoint stay in MXFP4, with the values that stock transformers gives them?"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.formats import Mxfp4Weight
from hf_mlspec.integration.quantizer.convert import convert_folder
from hf_mlspec.integration.quantizer.examine import examine
from hf_mlspec.nn.experts import PackedExperts
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 3]])
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def folder(tmp_path):
    """Written as transformers has the layout: experts [E, in, out] are quantized along ``in``."""
    model = tiny("gpt_oss", dtype=torch.bfloat16, hidden_size=64, intermediate_size=64)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        wide = tensors.pop(name)
        parts = [Mxfp4Weight.from_dense(expert.T.contiguous()).parts for expert in wide]
        blocks = torch.stack([part.packed for part in parts])
        tensors[f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = torch.stack([part.scale for part in parts])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    own = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": own}))
    return tmp_path


def test_values_are_those_of_stock_transformers(folder):
    stock = AutoModelForCausalLM.from_pretrained(folder)
    ours = hf_mlspec.load(folder)
    experts = ours.get_submodule(EXPERTS)
    assert type(experts) is PackedExperts
    for key in ("gate_up_proj", "down_proj"):
        expected = getattr(stock.get_submodule(EXPERTS), key)
        assert torch.equal(experts.dequantized(key, torch.bfloat16).transpose(1, 2), expected)
    with torch.inference_mode():
        logits, expected = ours(IDS).logits.float(), stock(IDS).logits.float()
    assert (logits - expected).norm() < 0.03 * expected.norm()


def test_it_is_told_and_converted(folder, tmp_path):
    found = examine(str(folder))
    assert [(own.stored_as, own.count, own.bits_per_weight) for own in found.layers] == [("MXFP4, experts", 2, 4.25)]
    assert found.weights == tiny("gpt_oss", hidden_size=64, intermediate_size=64).num_parameters()
    convert_folder(str(folder), str(tmp_path / "ours"))
    models = [hf_mlspec.load(folder), AutoModelForCausalLM.from_pretrained(tmp_path / "ours")]
    with torch.inference_mode():
        assert torch.equal(models[0](IDS).logits, models[1](IDS).logits)


def test_it_decodes_and_is_saved_as_ours(folder, tmp_path):
    model = hf_mlspec.load(folder)
    alone = model.generate(IDS, assistant_models=[], max_new_tokens=8, do_sample=False)
    chain = model.generate(IDS, assistant_models=["prompt_lookup"], max_new_tokens=8, do_sample=False)
    assert chain.shape == alone.shape
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.pop(f"{EXPERTS}.down_proj_scales"), ValueError, f"{EXPERTS}: down_proj_scales is missing"),
        (lambda t: t[f"{EXPERTS}.down_proj_scales"].fill_(255), ValueError, r"down_proj_scales .* NaN codes \(255\)"),
        (lambda t: t.update({f"{EXPERTS}.down_proj_blocks": t[f"{EXPERTS}.down_proj_blocks"][:, :-1]}), ValueError,
         r"down_proj_blocks .* has shape \[4, 63, 2, 16\]"),
        (lambda t: t.update({f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].int()}), TypeError,
         "torch.int32, expected torch.uint8"),
    ],
)  # fmt: skip
def test_damage_is_named(folder, change, error, said):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=said):
        hf_mlspec.load(folder)
