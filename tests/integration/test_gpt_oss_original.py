"""Is a gpt-oss checkpoint in its original layout the model that transformers' layout is?"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

import hf_mlspec
from hf_mlspec.integration.quantizer.examine import examine
from hf_mlspec.nn.experts import PackedExperts
from tests.integration.test_gpt_oss_checkpoints import EXPERTS, IDS, folder

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")
__all__ = ["folder"]
NAMES = {
    r"model.embed_tokens.weight": "embedding.weight", r"model.norm.weight": "norm.scale",
    r"lm_head.weight": "unembedding.weight", r"model.layers.(\d+).input_layernorm.weight": r"block.\1.attn.norm.scale",
    r"model.layers.(\d+).self_attn.sinks": r"block.\1.attn.sinks",
    r"model.layers.(\d+).self_attn.o_proj.(weight|bias)": r"block.\1.attn.out.\2",
    r"model.layers.(\d+).post_attention_layernorm.weight": r"block.\1.mlp.norm.scale",
    r"model.layers.(\d+).mlp.router.(weight|bias)": r"block.\1.mlp.gate.\2",
    r"model.layers.(\d+).mlp.experts.gate_up_proj_(blocks|scales)": r"block.\1.mlp.mlp1_weight.\2",
    r"model.layers.(\d+).mlp.experts.down_proj_(blocks|scales)": r"block.\1.mlp.mlp2_weight.\2",
    r"model.layers.(\d+).mlp.experts.gate_up_proj_bias": r"block.\1.mlp.mlp1_bias",
    r"model.layers.(\d+).mlp.experts.down_proj_bias": r"block.\1.mlp.mlp2_bias",
}  # fmt: skip


def original_name(name):
    return next(re.sub(f"^{own}$", theirs, name) for own, theirs in NAMES.items() if re.fullmatch(own, name))


def config_words(config):
    rope = config["rope_parameters"]
    same = ("num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads",
            "num_key_value_heads", "sliding_window")  # fmt: skip
    return {
        **{word: config[word] for word in same}, "num_experts": config["num_local_experts"],
        "swiglu_limit": config.get("swiglu_limit", 7.0),
        "experts_per_token": config["num_experts_per_tok"], "rope_theta": rope["rope_theta"],
        "initial_context_length": rope["original_max_position_embeddings"], "rope_scaling_factor": rope["factor"],
        "rope_ntk_alpha": rope["beta_slow"], "rope_ntk_beta": rope["beta_fast"],
    }  # fmt: skip


@pytest.fixture
def original(folder, tmp_path):
    """The tensors of that folder under their original names, in two files."""
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if ".self_attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        end = name.rpartition(".")[2]
        found[f"block.{name.split('.')[2]}.attn.qkv.{end}"] = torch.cat(parts)
    found |= {original_name(name): tensor for name, tensor in tensors.items()}
    place, names = tmp_path / "original", sorted(found)
    place.mkdir()
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = place / f"model--0000{number}-of-00002.safetensors"
        save_file({name: found[name].contiguous() for name in part}, file)
    (place / "config.json").write_text(json.dumps(config_words(json.loads((folder / "config.json").read_text()))))
    return place


def test_it_is_the_same_model(folder, original):
    ours, expected = hf_mlspec.load(original), hf_mlspec.load(folder)
    assert type(ours.get_submodule(EXPERTS)) is PackedExperts
    found, wanted = ours.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    same, own = expected.config.to_dict(), ours.config.to_dict()
    for key in ("rope_parameters", "layer_types", "sliding_window", "num_experts_per_tok", "swiglu_limit"):
        assert own[key] == same.get(key, 7.0), key
    with torch.inference_mode():
        assert torch.equal(ours(IDS).logits, expected(IDS).logits)


def test_it_is_a_level_and_is_saved(original, tmp_path):
    model = hf_mlspec.load(original)
    alone = model.generate(IDS, assistant_models=[], max_new_tokens=6, do_sample=False)
    chain = model.generate(IDS, assistant_models=[str(original)], max_new_tokens=6, do_sample=False)
    assert torch.equal(chain, alone)
    model.save_pretrained(tmp_path / "ours")
    again = hf_mlspec.load(tmp_path / "ours")
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_inspect_says_what_reads_it(original):
    with pytest.raises(ValueError, match=r"original layout of gpt-oss, .* hf_mlspec\.load reads it"):
        examine(str(original))


def _change_config(place, **words):
    file = place / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **words}))


@pytest.mark.parametrize(("change", "said"), [
    (lambda place: (place / "model--00002-of-00002.safetensors").unlink(), "has no tensor .*: a file is missing"),
    (lambda place: _change_config(place, num_hidden_layers=1), "is no part of the model that its config.json"),
    (lambda place: _change_config(place, num_key_value_heads=1), r"attn\.qkv\..* expected 48 rows of"),
    (lambda place: _change_config(place, num_hidden_layers=0), "num_hidden_layers is 0, expected a number above 0"),
    (lambda place: _change_config(place, sliding_window="all"), "sliding_window is 'all', expected a number above 0"),
    (lambda place: _change_config(place, new_word=1), "new_word is 1, which this package does not know"),
])  # fmt: skip
def test_what_does_not_fit_is_named(original, change, said):
    change(original)
    with pytest.raises(ValueError, match=said):
        hf_mlspec.load(original)


@pytest.mark.skipif(hasattr(GptOssConfig, "swiglu_limit"), reason="this transformers has it")
def test_a_limit_that_transformers_does_not_have_is_refused(original):
    _change_config(original, swiglu_limit=5.0)
    with pytest.raises(ValueError, match=r"swiglu_limit is 5\.0, this transformers computes with 7\.0"):
        hf_mlspec.load(original)


@pytest.mark.parametrize(("name", "change", "error", "said"), [
    ("block.1.mlp.gate.weight", lambda t: t[:, :-1], ValueError, r"mlp\.gate\.weight .*shape"),
    ("block.1.mlp.mlp2_weight.scales", lambda t: t[:, :-1], ValueError, r"mlp2_weight\.scales .* has shape"),
    ("block.0.mlp.mlp1_weight.blocks", lambda t: t.int(), TypeError, "torch.int32, expected torch.uint8"),
    ("block.0.mlp.mlp1_weight.scales", lambda t: t.fill_(255), ValueError, r"mlp1_weight\.scales .* NaN codes"),
])  # fmt: skip
def test_damage_is_named_before_anything_is_loaded(original, monkeypatch, name, change, error, said):
    for file in original.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file({**tensors, name: change(tensors[name]).contiguous()}, file)
    monkeypatch.setattr(GptOssForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("it was made first"))
    with pytest.raises(error, match=said):
        hf_mlspec.load(original)
