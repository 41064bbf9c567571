"""Do quantized experts of mixtures load with the very values of their files, and is what does not fit named?"""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.integration.quantizer.convert import convert_folder
from hf_mlspec.integration.quantizer.examine import examine
from hf_mlspec.nn.experts import PackedExperts
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.plane_experts import PlaneExperts
from tests.foreign_mixtures import CONFIGS, KINDS, mixture, of_expert, stored, write_mixture

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 3], [4, 8, 15, 16, 23, 42, 2]])
PACKED = [kind for kind in KINDS if kind != "gptq-8"]
CASES = [("qwen3_moe", kind) for kind in PACKED] + [
    (arch, kind) for arch in CONFIGS if arch != "qwen3_moe" for kind in ("gptq", "awq", "compressed-tensors", "mxfp4")
]
EXPERT = "model.layers.1.mlp.experts.2"
REAL = Path(os.environ.get("MLSPEC_MODELS", "../shared/models"), "code-moe")


def same_experts(model, values, dtype=torch.float32):
    """How many values of the experts were compared; fails where one differs."""
    count = 0
    for index, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for expert in range(experts.num_experts):
            for key, expected in of_expert(values, index, expert).items():
                packed = isinstance(experts, PackedExperts)
                found = experts.dequantized(key, dtype) if packed else getattr(experts, key)
                assert torch.equal(found[expert], expected.to(dtype)), (index, expert, key)
                count += expected.numel()
    return count


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def requantize(folder, values, name, kind, **options):
    """One matrix of the files in another way, from its values."""
    own, values[name] = stored(values[name], kind, **options)

    def change(tensors):
        for key in [key for key in tensors if key.startswith(f"{name}.")]:
            del tensors[key]
        tensors |= {f"{name}.{key}": tensor for key, tensor in own.items()}

    change_tensors(folder, change)


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_values_are_those_of_the_files(arch, kind, tmp_path):
    original = mixture(arch)
    folder, values = write_mixture(tmp_path, original, kind)
    model = hf_mlspec.load(folder)
    assert all(type(layer.mlp.experts) is PackedExperts for layer in model.model.layers)
    assert same_experts(model, values) == sum(w.numel() for n, w in values.items() if ".experts." in n) > 0
    for name, expected in values.items():
        if ".experts." not in name:
            layer = model.get_submodule(name)
            assert isinstance(layer, PackedLinear)
            assert torch.equal(layer.dequantized(torch.float64), expected.double())
    for layer, before in zip(model.model.layers, original.model.layers, strict=True):
        assert torch.equal(layer.mlp.gate.weight, before.mlp.gate.weight)


@pytest.mark.parametrize("arch", CONFIGS)
def test_logits_are_those_of_the_weights(arch, tmp_path):
    """Gate and up in their order, every expert under its number: the dense model with these weights says the same."""
    folder, values = write_mixture(tmp_path / "packed", mixture(arch), "gptq-zeros")
    mixture(arch).save_pretrained(tmp_path / "dense")
    change_tensors(tmp_path / "dense", lambda t: t.update({f"{n}.weight": v.float() for n, v in values.items()}))
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    with torch.inference_mode():
        expected, found = dense(IDS).logits, hf_mlspec.load(folder)(IDS).logits
    assert (found - expected).norm() < 0.03 * expected.norm()  # activations are rounded to bfloat16


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors", "mxfp4"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral"])
def test_it_drafts_for_itself(arch, kind, tmp_path):
    model = hf_mlspec.load(write_mixture(tmp_path, mixture(arch), kind)[0])
    alone = model.generate(IDS, assistant_models=[], max_new_tokens=12, do_sample=False)
    word = "mxfp4a8" if kind == "mxfp4" else "w4a8"
    for levels in ([word], [word, "prompt_lookup"]):
        assert torch.equal(model.generate(IDS, assistant_models=levels, max_new_tokens=12, do_sample=False), alone)


@pytest.mark.parametrize("kind", ["gptq", "mxfp4"])
def test_it_is_saved_and_converted_as_ours(kind, tmp_path):
    folder, values = write_mixture(tmp_path / "theirs", mixture("mixtral"), kind)
    model = hf_mlspec.load(folder)
    model.save_pretrained(tmp_path / "saved")
    convert_folder(str(folder), str(tmp_path / "ours"))
    for place in ("saved", "ours"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / place)
        same_experts(again, values)
        with torch.inference_mode():
            assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("to", ["gptq", "compressed-tensors", "gguf"])
def test_other_targets_are_refused_before_anything_is_written(to, tmp_path):
    folder, _ = write_mixture(tmp_path / "theirs", mixture("qwen3_moe"), "gptq")
    target = tmp_path / ("out.gguf" if to == "gguf" else "out")
    with pytest.raises(ValueError, match=r"experts is packed as PackedExperts|'qwen3_moe' are not written"):
        convert_folder(str(folder), str(target), to)
    assert not target.exists()


def test_it_is_told(tmp_path):
    folder, values = write_mixture(tmp_path, mixture("mixtral"), "gptq")
    found = examine(str(folder))
    told = {own.stored_as: (own.count, own.becomes) for own in found.layers}
    assert told["GPTQ, 4 bits, groups of 32, symmetric, experts"] == (2, "int4 (group_size 32, symmetric True)")
    assert told["GPTQ, 4 bits, groups of 32, symmetric"][0] == 8
    assert found.weights == mixture("mixtral").num_parameters()
    experts = next(own for own in found.layers if own.stored_as.endswith("experts"))
    assert experts.weights == sum(w.numel() for n, w in values.items() if ".experts." in n)
    assert 4.5 < experts.bits_per_weight < 6


def test_groups_and_zero_points_that_differ_become_the_finer(tmp_path):
    folder, values = write_mixture(tmp_path, mixture("qwen3_moe"), "gptq", size=64)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"+:.*experts.2.*": {"sym": False}}
    (folder / "config.json").write_text(json.dumps(config))
    requantize(folder, values, f"{EXPERT}.up_proj", "gptq-zeros", size=32)
    model = hf_mlspec.load(folder)
    same_experts(model, values)
    # 64 divides the 64 inputs of gate and up, and not the 96 of down: the last group has half of it.
    assert [(e.group_size, e.symmetric) for e in (layer.mlp.experts for layer in model.model.layers)] == [
        (32, True), (32, False)
    ]  # fmt: skip


def make_dense(folder, values):
    def change(tensors):
        for key in [key for key in tensors if key.startswith(f"{EXPERT}.down_proj.")]:
            del tensors[key]
        tensors[f"{EXPERT}.down_proj.weight"] = values[f"{EXPERT}.down_proj"].float()

    change_tensors(folder, change)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (make_dense, rf"{EXPERT}.down_proj is not quantized, other experts are"),
        (lambda f, v: requantize(f, v, f"{EXPERT}.up_proj", "gptq", act_order=True), "up_proj takes its inputs in an"),
    ],
)
def test_experts_that_do_not_fit_one_format_become_dense_and_are_named(change, why, tmp_path):
    folder, values = write_mixture(tmp_path / "theirs", mixture("qwen3_moe"), "gptq")
    change(folder, values)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = "act" in why or "order" in why
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=rf"1 of 10 quantized layers .* become dense.*{why}"):
        model = hf_mlspec.load(folder)
    assert [isinstance(layer.mlp.experts, PackedExperts) for layer in model.model.layers] == [True, False]
    for expert in range(4):
        for key, expected in of_expert(values, 1, expert).items():
            found = getattr(model.model.layers[1].mlp.experts, key)[expert]
            if "not quantized" in why and (expert, key) == (2, "down_proj"):  # float32 in the file
                assert torch.equal(found, expected.float())
            else:  # as whoever wrote it computes it: in the dtype of the scales
                assert torch.equal(found.half(), expected.half())
                assert torch.equal(found.half().float(), found)
    alone = model.generate(IDS, assistant_models=[], max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(IDS, assistant_models=["w4a8"], max_new_tokens=6, do_sample=False), alone)
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_layers_whose_experts_are_not_quantized_stay(tmp_path):
    """As an ignore list has it: the first layer's experts are dense, all of them."""
    original = mixture("mixtral")
    folder, _ = write_mixture(tmp_path / "theirs", original, "compressed-tensors")
    own = original.model.layers[0].mlp.experts

    def change(tensors):
        for key in [key for key in tensors if ".layers.0.block_sparse_moe.experts." in key]:
            del tensors[key]
        for expert in range(4):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}"
            gate, up = own.gate_up_proj[expert].chunk(2)
            tensors |= {f"{name}.w1.weight": gate, f"{name}.w3.weight": up, f"{name}.w2.weight": own.down_proj[expert]}

    change_tensors(folder, change)
    model = hf_mlspec.load(folder)
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj, own.gate_up_proj)
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj, own.down_proj)
    assert type(model.model.layers[1].mlp.experts) is PackedExperts
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_eight_bits_become_planes(tmp_path):
    folder, values = write_mixture(tmp_path, mixture("qwen3_moe"), "gptq")
    for name in list(values):
        requantize(folder, values, name, "gptq-8") if ".experts." in name else None
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"+:.*experts.*": {"bits": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    model = hf_mlspec.load(folder)
    experts = model.model.layers[1].mlp.experts
    assert type(experts.validate()) is PlaneExperts
    for expert in range(4):
        for key, expected in of_expert(values, 1, expert).items():
            assert torch.equal(experts.dequantized(key)[expert].half(), expected.half())
    with torch.inference_mode():
        assert model(IDS).logits.isfinite().all()


def drop(*names):
    return lambda t: [t.pop(key) for key in list(t) if key.startswith(names)]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (drop(f"{EXPERT}.gate_proj."), ValueError, r"model.layers.1.mlp.experts: 1 matrices .* gate_proj of expert 2"),
        (drop(f"{EXPERT}."), ValueError, r"model.layers.1.mlp.experts: 3 matrices .* gate_proj of expert 2"),
        (drop(f"{EXPERT}.up_proj.scales"), ValueError, rf"{EXPERT}.up_proj: scales is missing"),
        (lambda t: t.update({k.replace("experts.2", "experts.7"): v.clone() for k, v in t.items() if EXPERT in k}),
         ValueError, r"experts.7.* config.json has 4 experts"),
        (lambda t: t.update({f"{EXPERT}.up_proj.qweight": t[f"{EXPERT}.down_proj.qweight"].clone()}), ValueError,
         rf"{EXPERT}.up_proj.qweight .* has shape"),
        (lambda t: t[f"{EXPERT}.up_proj.scales"].fill_(float("nan")), ValueError, rf"{EXPERT}.up_proj.scales .* NaN"),
        (lambda t: t.update({f"{EXPERT}.up_proj.bias": torch.ones(96)}), ValueError,
         rf"{EXPERT}.up_proj.bias .* not zero"),
        (lambda t: t.update({"model.layers.1.mlp.gate.qweight": torch.zeros(8, 4, dtype=torch.int32)}), ValueError,
         "model.layers.1.mlp.gate is quantized .* is no linear layer"),
        (lambda t: t.update({f"{EXPERT}.extra.qweight": torch.zeros(8, 4, dtype=torch.int32)}), ValueError,
         rf"1 experts .* in a way that is not read.*{EXPERT}.extra"),
    ],
)  # fmt: skip
def test_damage_names_layer_and_expert(change, error, said, tmp_path, monkeypatch):
    folder, _ = write_mixture(tmp_path, mixture("qwen3_moe"), "gptq")
    change_tensors(folder, change)
    monkeypatch.setattr(
        "hf_mlspec.integration.quantizer.source.convert_layers", lambda *a: pytest.fail("it was loaded first")
    )
    with pytest.raises(error, match=said):
        hf_mlspec.load(folder)


def test_groups_that_do_not_divide_are_named(tmp_path):
    folder, _ = write_mixture(tmp_path, mixture("mixtral"), "compressed-tensors", size=32)
    scales = "model.layers.0.block_sparse_moe.experts.1.w2.weight_scale"
    change_tensors(folder, lambda t: t.update({scales: torch.ones(64, 5, dtype=torch.float16)}))
    with pytest.raises(ValueError, match=r"experts.1.w2.weight_scale .* 5 groups"):
        hf_mlspec.load(folder)


def test_biases_of_zeros_and_shards(tmp_path):
    folder, values = write_mixture(tmp_path, mixture("qwen3_moe"), "compressed-tensors")
    change_tensors(folder, lambda t: t.update({f"{EXPERT}.up_proj.bias": torch.zeros(96)}))
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    model, info = hf_mlspec.load(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    same_experts(model, values)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not there: MLSPEC_MODELS names its folder")
@pytest.mark.parametrize("kind", PACKED)
def test_a_real_mixture(kind, tmp_path):
    from transformers import AutoTokenizer

    original = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32)
    folder, values = write_mixture(tmp_path, original, kind, size=64)
    word = "mxfp4a8" if kind == "mxfp4" else "w4a8"
    model, tokenizer = hf_mlspec.load(folder), AutoTokenizer.from_pretrained(REAL)
    assert same_experts(model, values) == 6 * 8 * 3 * 384 * 320
    for prompt in ("def mean(values):\n", "class Stack:\n", "import os\n\n\ndef find(", "for line in open("):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, assistant_models=[], max_new_tokens=24, do_sample=False)
        assert torch.equal(model.generate(ids, assistant_models=[word], max_new_tokens=24, do_sample=False), alone)
