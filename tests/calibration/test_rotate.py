"""Does a rotated model compute what the original does, for every family and for sizes that others cannot rotate?"""

from __future__ import annotations

import json

import pytest
import torch
from accelerate.hooks import attach_execution_device_hook
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import hf_mlspec
from hf_mlspec.calibration import rotation
from hf_mlspec.calibration.rotation import rotate
from hf_mlspec.formats.hadamard import Hadamard, fitting_hadamard
from hf_mlspec.integration.quantizer.examine import examine
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.transforms import HADAMARD, TransformedLinear, hadamard_of

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")
FAMILIES = {  # factors 7, 11, 19, 37 in widths; 9, 14, 28 heads; heads of another size than hidden / heads
    "llama": (LlamaConfig, {"hidden_size": 9 * 16, "intermediate_size": 11 * 16, "num_attention_heads": 9,
                            "num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, {"hidden_size": 14 * 16, "intermediate_size": 19 * 16, "num_attention_heads": 14,
                            "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"hidden_size": 28 * 8, "intermediate_size": 37 * 8, "num_attention_heads": 28,
                                "num_key_value_heads": 4, "head_dim": 16}),
    "qwen3": (Qwen3Config, {"hidden_size": 64, "intermediate_size": 7 * 16, "num_attention_heads": 4,
                            "num_key_value_heads": 2, "head_dim": 20}),
    "phi3": (Phi3Config, {"hidden_size": 96, "intermediate_size": 12 * 9, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "eos_token_id": 1, "bos_token_id": 1}),
    "gemma2": (Gemma2Config, {"hidden_size": 72, "intermediate_size": 44, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "head_dim": 16}),
    "gemma3": (Gemma3TextConfig, {"hidden_size": 72, "intermediate_size": 44, "num_attention_heads": 4,
                                  "num_key_value_heads": 2, "head_dim": 16}),
}  # fmt: skip


def model_of(family: str, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
    """With gains and biases that are not 1 and 0."""
    kind, sizes = FAMILIES[family]
    torch.manual_seed(0)
    settings = {"vocab_size": 200, "num_hidden_layers": 2, "max_position_embeddings": 128, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(kind(**{**settings, **sizes, **changes}), dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
            elif "embed" not in name:
                parameter *= 4
    return model


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.randint(1, 199, (2, 17), generator=torch.Generator().manual_seed(1))
        return model(ids).logits.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay(family):
    model = model_of(family)
    before, weights = logits_of(model), {name: tensor.clone() for name, tensor in model.named_parameters()}
    done = rotate(model, seed=3, residual="gemma" not in family)
    assert (logits_of(model) - before).norm() <= 1e-5 * before.norm()
    assert isinstance(model.model.layers[1].mlp.down_proj, TransformedLinear)
    assert hadamard_of(model.model.layers[0].mlp.down_proj.transform_tensors()) == done.down
    changed = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, weights.get(name, tensor))}
    assert any("down_proj" in name for name in changed)
    assert ("model.embed_tokens.weight" in changed) == (done.residual is not None)
    assert (done.across_heads is None) == (family == "llama")  # 9 heads


@pytest.mark.parametrize("size", [896, 4864, 5632, 9728, 11008, 13696, 18944, 25600, 29568])
def test_outputs_stay_at_the_widths_of_models(size):
    """Those of Qwen2.5, Qwen3, Llama 2 and TinyLlama, ChatGLM in front of down_proj; 896 is Qwen2.5's stream, too."""
    heads = {"hidden_size": 896, "num_attention_heads": 14} if size == 896 else {"hidden_size": 64, "head_dim": 16}
    model = model_of("mistral", intermediate_size=size, num_hidden_layers=1, **{"num_key_value_heads": 2, **heads})
    before = logits_of(model)
    done = rotate(model, seed=3)
    assert done.down == fitting_hadamard(size)
    assert (logits_of(model) - before).norm() <= 1e-5 * before.norm()


@pytest.mark.parametrize("parts", [{"residual": False}, {"heads": False}, {"online": False}], ids=str)
def test_each_part_can_be_left_out(parts):
    model = model_of("qwen2")
    before = logits_of(model)
    done = rotate(model, **parts)
    assert (logits_of(model) - before).norm() <= 1e-5 * before.norm()
    assert (done.residual is None, done.value is None, done.down is None) == (
        "residual" in parts, "heads" in parts, "online" in parts
    )  # fmt: skip
    assert done.untied == ("residual" not in parts)
    assert any(isinstance(m, TransformedLinear) for m in model.modules()) == ("online" not in parts)


def test_down_alone_can_be_rotated_at_run_time():
    model = model_of("qwen2")
    before = logits_of(model)
    done = rotate(model, online="down")
    assert (logits_of(model) - before).norm() <= 1e-5 * before.norm()
    assert (done.across_heads, done.down is None) == (None, False)
    turned = {name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, TransformedLinear)}
    assert turned == {"down_proj"}
    with pytest.raises(ValueError, match="online is 'o', choose True, False or 'down'"):
        rotate(model_of("qwen2"), online="o")


def test_gains_are_folded_and_a_tied_head_is_untied_and_said(caplog):
    model = model_of("qwen2")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert rotate(model).untied
    assert "has its head tied to its embedding; the head gets a weight of its own" in caplog.text
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    norms = [module.weight for name, module in model.named_modules() if name.endswith(("layernorm", "norm"))]
    assert len(norms) == 5
    assert all(bool((weight == 1).all()) for weight in norms)


def test_norms_of_queries_and_keys_are_left_alone():
    model = model_of("qwen3")
    before = model.model.layers[0].self_attn.q_norm.weight.clone()
    rotate(model)
    assert torch.equal(model.model.layers[0].self_attn.q_norm.weight, before)


def test_a_seed_gives_the_same_weights_and_another_one_others():
    first, second, other = model_of("mistral"), model_of("mistral"), model_of("mistral")
    rotate(first, seed=1), rotate(second, seed=1), rotate(other, seed=2)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two, _ in pairs)
    assert not all(torch.equal(one, three) for one, _, three in pairs)


def test_an_outlier_of_the_residual_stream_is_spread():
    model = model_of("mistral")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 100

    def crest(embedding: torch.Tensor) -> float:
        rows = embedding.detach()[1:]  # the first is padding
        return float((rows.abs().amax(1) / rows.norm(dim=1)).mean())

    before = crest(model.model.embed_tokens.weight)
    rotate(model)
    assert crest(model.model.embed_tokens.weight) < before / 4


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_norms_behind_a_block_refuse_the_residual_part_by_name_and_change_nothing(family):
    model = model_of(family)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    words = r"norms behind its blocks \(post_attention_layernorm, .*\).*rotate\(model, residual=False\)"
    with pytest.raises(ValueError, match=words):
        rotate(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_what_cannot_be_rotated_is_named():
    model = model_of("llama")
    rotate(model)
    with pytest.raises(ValueError, match="rotated already"):
        rotate(model)
    with pytest.raises(ValueError, match=r"down_proj is dense and transforms its inputs \(hadamard\)|o_proj is dense"):
        model.state_dict()
    with pytest.raises(ValueError, match="BloomForCausalLM is unknown, choose one of LlamaForCausalLM"):
        rotate(AutoModelForCausalLM.from_config(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=50)))
    with pytest.raises(ValueError, match="GPT2LMHeadModel takes the mean off what it norms"):
        rotate(AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)))
    with pytest.raises(ValueError, match="already quantized"):
        rotate(hf_mlspec.direct_cast(model_of("mistral", torch.bfloat16, intermediate_size=32 * 9), "mxfp4"))
    partly = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.8}  # 12 of 15 values turn
    odd = model_of("qwen3", intermediate_size=7 * 9)
    with pytest.raises(ValueError, match=r"intermediate_size 63, is odd: .* leave it out, rotate\(model, online=F"):
        rotate(odd)
    with pytest.raises(ValueError, match=r"the size of a head, 15, is odd: .* leave it out, rotate\(model, heads=F"):
        rotate(model_of("qwen3", head_dim=15, rope_parameters=partly))


def test_hooks_of_accelerate_stay():
    model = model_of("llama")
    wanted = logits_of(model)
    attach_execution_device_hook(model, "cpu")
    rotate(model)
    down = model.model.layers[0].mlp.down_proj
    assert down._hf_hook.execution_device == "cpu"
    assert (logits_of(model) - wanted).norm() < 1e-4 * wanted.norm()


def test_a_head_over_the_tables_memory_is_untied():
    model = model_of("llama")
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    wanted = logits_of(model)
    assert rotate(model).untied
    assert (logits_of(model) - wanted).norm() < 1e-4 * wanted.norm()


def test_what_was_rotated_in_part_is_refused(monkeypatch):
    def stops(*_):
        raise KeyboardInterrupt

    model = model_of("llama")
    with monkeypatch.context() as patch:
        patch.setattr(rotation, "rotate_values", stops)
        with pytest.raises(KeyboardInterrupt):
            rotate(model)
    with pytest.raises(ValueError, match="was rotated in part, by a call that did not end: load it again"):
        rotate(model)


def test_weights_of_inference_mode_are_refused_behind_it_and_rotated_inside():
    with torch.inference_mode():
        model = model_of("llama")
    with pytest.raises(ValueError, match=r"weights were made under torch\.inference_mode, the first is model\.em"):
        rotate(model)
    with torch.inference_mode():
        before = logits_of(model)
        rotate(model)
        assert (logits_of(model) - before).norm() < 1e-4 * before.norm()


def test_a_weight_that_float16_does_not_hold_is_named():
    def with_row(value: float) -> nn.Module:
        model = model_of("qwen3", torch.float16)
        with torch.no_grad():
            model.model.layers[1].mlp.gate_proj.weight[0] = value
        return model

    rotate(with_row(6000.0), heads=False, online=False)  # of 64 values: 8 times as much at most
    words = r"rotate: model\.layers\.1\.mlp\.gate_proj\.weight would hold .*e\+05, float16 holds 65504 at most"
    with pytest.raises(ValueError, match=words):
        rotate(model := with_row(60000.0), heads=False, online=False)
    with pytest.raises(ValueError, match="was rotated in part"):
        rotate(model)


def test_layers_that_share_weights_are_refused():
    model = model_of("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(ValueError, match="shares its weight with another layer"):
        rotate(model)


def test_weights_of_16_bits_are_rounded_once():
    model, wide = (model_of("qwen3", torch.bfloat16, **PACKABLE) for _ in range(2))
    wide.load_state_dict(model.state_dict())
    wide.float()
    for one in (model, wide):
        rotate(one, seed=1)
    for (name, found), wanted in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted.bfloat16()), name


PACKABLE = {"hidden_size": 128, "intermediate_size": 7 * 64, "head_dim": 32}


def rotated_cast() -> tuple[nn.Module, nn.Module]:
    """A rotated model in bfloat16 and a cast of it."""
    model = model_of("qwen3", torch.bfloat16, **PACKABLE)
    rotate(model, seed=1)
    return model, hf_mlspec.direct_cast(model, "mxfp4", activation_bits=16)


def test_quantizing_keeps_the_transforms_and_all_layers_have_one_kind():
    model, cast = rotated_cast()
    packed = {name: module for name, module in cast.named_modules() if isinstance(module, PackedLinear)}
    assert {module.transform for module in packed.values()} == {HADAMARD}
    turned = {name.rpartition(".")[2] for name, module in packed.items()
              if not hadamard_of(module.transform_tensors()).is_nothing}  # fmt: skip
    assert turned == {"o_proj", "down_proj"}
    exact = logits_of(model)
    assert (logits_of(cast) - exact).norm() < 0.5 * exact.norm()
    assert cast.config.quantization_config.transform == "hadamard"


def test_a_packed_model_is_saved_and_loaded_with_its_transforms(tmp_path):
    _, cast = rotated_cast()
    cast.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits_of(again), logits_of(cast))
    down = again.model.layers[1].mlp.down_proj
    assert hadamard_of(down.transform_tensors()) == Hadamard(7 * 64, 28)
    assert all(torch.equal(tensor, cast.state_dict()[name]) for name, tensor in again.state_dict().items())
    plain = again.dequantize()
    exact = logits_of(cast)
    assert (logits_of(plain) - exact).norm() < 0.03 * exact.norm()
    assert not any(isinstance(module, TransformedLinear) for module in plain.modules())


def broken(folder, change) -> None:
    """Change a saved checkpoint: its quantization settings and its tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config["quantization_config"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


RECORD = "model.layers.1.mlp.down_proj.transform_hadamard"


@pytest.mark.parametrize(("change", "words"), [
    (lambda config, tensors: config.pop("transform"), "transform_hadamard"),
    (lambda config, tensors: tensors.pop(RECORD), "down_proj.transform_hadamard"),
    (lambda config, tensors: tensors[RECORD].copy_(torch.tensor([1024, 1, 1])),
     r"down_proj\.transform_hadamard: Hadamard matrices of size 1024 .* do not divide 448 inputs: the record"),
    (lambda config, tensors: tensors[RECORD].copy_(torch.tensor([448, 30, 1])),
     r"down_proj\.transform_hadamard: a Hadamard matrix of order 30: choose one of"),
], ids=["no word", "no record", "of another width", "of no order"])  # fmt: skip
def test_a_rotated_checkpoint_without_its_record_or_with_another_is_refused(tmp_path, change, words):
    rotated_cast()[1].save_pretrained(tmp_path)
    broken(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_inspected_checkpoint_tells_its_transform(tmp_path):
    rotated_cast()[1].save_pretrained(tmp_path)
    assert "inputs transformed (hadamard)" in str(examine(str(tmp_path)))
