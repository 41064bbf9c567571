"""Does from_pretrained read other libraries' checkpoints, and is what they decode what their weights say?"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig
from hf_mlspec.checkpoints.readers import PACKAGES
from hf_mlspec.integration.quantizer.mapped_memory import let_go
from hf_mlspec.nn.linear import Int4Linear
from hf_mlspec.nn.packed import PackedLinear
from hf_mlspec.nn.planes import PlanesLinear
from tests.foreign_checkpoints import autoround, awq, dense_twin, gptq, linears, rounded, write
from tests.models import tiny

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 3]])
SIZES = {"hidden_size": 64, "intermediate_size": 128}
KINDS = {
    "gptq": ({"bits": 4, "sym": True, "desc_act": False}, {"symmetric": True}),
    "gptq-zeros": ({"bits": 4, "sym": False, "desc_act": False}, {"symmetric": False}),
    "gptq-act-order": ({"bits": 4, "sym": True, "desc_act": True}, {"symmetric": True, "act_order": True}),
    "gptq-8": ({"bits": 8, "sym": True, "desc_act": False}, {"symmetric": True}),
    "gptq-3": ({"bits": 3, "sym": True, "desc_act": False}, {"symmetric": True}),
    "awq": ({"bits": 4, "zero_point": True, "version": "gemm"}, {"symmetric": False}),
    "auto-round": ({"bits": 4, "sym": True, "packing_format": "auto_round:auto_gptq"}, {"symmetric": True}),
    "auto-round-zeros": ({"bits": 4, "sym": False, "packing_format": "auto_round"}, {"symmetric": False}),
    "auto-round-awq": ({"bits": 4, "sym": False, "packing_format": "auto_round:auto_awq"}, {"symmetric": False}),
}


def model_of(dtype=torch.bfloat16, **options):
    return tiny("llama", dtype=dtype, **SIZES | options)


def written(folder, kind, size=32, model=None):
    """The folder, and the weights that it means."""
    own, options = KINDS[kind]
    method = "auto-round" if kind.startswith("auto-round") else kind.partition("-")[0]
    model = model or model_of()
    # What reads one input has one order of it, as these libraries have it.
    seeds = {"q_proj": 1, "k_proj": 1, "v_proj": 1, "gate_proj": 2, "up_proj": 2}
    layers = {
        name: rounded(linear.weight, own["bits"], size, seed=seeds.get(name.rpartition(".")[2], 3), **options)
        for name, linear in linears(model).items()
    }
    save = awq if method == "awq" else lambda codes: gptq(codes, own["bits"])
    if method == "auto-round":
        save = lambda codes: autoround(codes, own["bits"], own["packing_format"])  # noqa: E731
    config = {"quant_method": method, "group_size": size, **own}
    write(folder, model, {name: save(codes) for name, codes in layers.items()}, config)
    return folder, {name: codes.values for name, codes in layers.items()}


@pytest.fixture
def no_packages(monkeypatch):
    """As if none of the packages that stock transformers wants were installed."""
    find, missing = importlib.util.find_spec, {name for names in PACKAGES.values() for name in names}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more)
    )


@pytest.fixture
def packages(monkeypatch):
    """As if all of them were."""
    find, there = importlib.util.find_spec, {name for names in PACKAGES.values() for name in names}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: object() if name in there else find(name, *more)
    )


def weight_of(layer):
    wide = layer.dequantized(torch.float32)
    order = layer._buffers.get("transform_order")
    return wide if order is None else wide[:, torch.argsort(order)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_where_a_package_is_missing(kind, tmp_path, no_packages):
    folder, values = written(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, expected in values.items():
        layer = model.get_submodule(name)
        assert type(layer) is (PlanesLinear if kind in ("gptq-3", "gptq-8") else Int4Linear)
        assert torch.equal(weight_of(layer).half(), expected)
    assert model.config.quantization_config.quant_method == "mlspec"
    assert len({id(module.switch) for module in model.modules() if isinstance(module, PackedLinear)}) == 1
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_weights(kind, tmp_path):
    folder, values = written(tmp_path / "packed", kind, model=model_of(torch.float32))
    twin = AutoModelForCausalLM.from_pretrained(dense_twin(tmp_path / "dense", model_of(torch.float32), values))
    expected = twin.double()(IDS).logits
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    with torch.inference_mode():
        ours = hf_mlspec.load(folder, dtype=torch.bfloat16)(IDS).logits.double()
        error, theirs = (ours - expected).norm(), (stock(IDS).logits.double() - expected).norm()
    assert error <= 1.2 * theirs


@pytest.mark.parametrize("kind", ["gptq", "gptq-act-order", "awq"])
@pytest.mark.parametrize("levels", [["w4a8"], ["qspec"], ["w4a8", "prompt_lookup"]])
def test_it_drafts_for_itself(kind, levels, tmp_path):
    model = hf_mlspec.load(written(tmp_path, kind)[0])
    alone = model.generate(IDS, assistant_models=[], max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(IDS, assistant_models=levels, max_new_tokens=12, do_sample=False), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_a_level(kind, tmp_path):
    folder, _ = written(tmp_path, kind)
    target = model_of()
    alone = target.generate(IDS, assistant_models=[], max_new_tokens=12, do_sample=False)
    chain = target.generate(IDS, assistant_models=[str(folder)], max_new_tokens=12, do_sample=False)
    assert torch.equal(chain, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_as_ours(kind, tmp_path):
    model = hf_mlspec.load(written(tmp_path / "theirs", kind)[0])
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mlspec"
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_installed_packages_keep_stock_behaviour_unless_asked(tmp_path, packages):
    folder, values = written(tmp_path, "gptq")
    with pytest.raises(Exception, match=r"(?i)gptq|QuantizeConfig|optimum"):  # they are not there in truth
        AutoModelForCausalLM.from_pretrained(folder)
    asked = MLSpecConfig.for_checkpoint(str(folder))
    for model in (AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked), hf_mlspec.load(folder)):
        name, expected = next(iter(values.items()))
        assert torch.equal(weight_of(model.get_submodule(name)).half(), expected)


def test_disable_gives_stock_its_own_choice_back(tmp_path, no_packages):
    folder, _ = written(tmp_path, "gptq")
    hf_mlspec.disable()
    try:
        with pytest.raises(Exception, match=r"(?i)gptq|QuantizeConfig|optimum"):
            AutoModelForCausalLM.from_pretrained(folder)
        assert type(hf_mlspec.load(folder).model.layers[0].mlp.up_proj) is Int4Linear
    finally:
        hf_mlspec.enable()
    assert type(AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj) is Int4Linear


def test_older_folders_keep_their_settings_in_a_file_of_their_own(tmp_path):
    folder, values = written(tmp_path, "gptq")
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    del own["quant_method"]
    (folder / "quantize_config.json").write_text(json.dumps(own))
    name, expected = next(iter(values.items()))
    asked = MLSpecConfig.for_checkpoint(str(folder))
    for model in (hf_mlspec.load(folder), AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked)):
        assert torch.equal(weight_of(model.get_submodule(name)).half(), expected)


def test_float16_checkpoints_are_loaded_in_bfloat16(tmp_path):
    folder, _ = written(tmp_path, "gptq", model=model_of(torch.float16))
    assert hf_mlspec.load(folder).dtype == torch.bfloat16
    assert hf_mlspec.load(folder, dtype="auto").dtype == torch.float16


def test_shards(tmp_path):
    folder, values = written(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    model = hf_mlspec.load(folder)
    for name, expected in values.items():
        assert torch.equal(weight_of(model.get_submodule(name)).half(), expected)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises((ValueError, OSError), match="model-00002-of-00002"):
        hf_mlspec.load(folder)


def test_layers_of_several_kinds_run_and_are_not_saved(tmp_path):
    model = model_of()
    layers = {}
    for place, (name, linear) in enumerate(linears(model).items()):
        bits = 8 if place % 2 else 4
        layers[name] = gptq(rounded(linear.weight, bits, 32, True), bits)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:.*": {"bits": 8}}}
    loaded = hf_mlspec.load(write(tmp_path / "mixed", model, layers, config))
    kinds = {type(module) for module in loaded.modules() if isinstance(module, PackedLinear)}
    assert kinds == {Int4Linear, PlanesLinear}
    loaded.generate(IDS, max_new_tokens=4, do_sample=False)
    with pytest.raises(ValueError, match="not serializable"):
        loaded.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_what_no_format_holds_becomes_dense_and_is_said(tmp_path):
    model = model_of()
    layers = {name: rounded(linear.weight, 8, 32, False) for name, linear in linears(model).items()}
    config = {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False}
    folder = write(tmp_path, model, {name: gptq(codes, 8) for name, codes in layers.items()}, config)
    with pytest.warns(UserWarning, match=r"14 of 14 quantized layers .* 8-bit codes with zero points of their own"):
        loaded = hf_mlspec.load(folder)
    assert getattr(loaded.config, "quantization_config", None) is None
    for name, codes in layers.items():
        assert torch.equal(loaded.get_submodule(name).weight, codes.values.bfloat16())


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{UP}.scales"), f"{UP}: scales is missing"),
        (lambda t: [t.pop(n) for n in list(t) if n.startswith(UP)], rf"1 tensors .* missing from .*{UP}.weight"),
        (lambda t: t.pop("model.norm.weight"), "1 tensors of LlamaForCausalLM are missing .* model.norm.weight"),
        (lambda t: t.update({"model.layers.9.extra": torch.ones(3)}), "1 tensors belong to no part .*layers.9.extra"),
        (lambda t: t.update({f"{UP}.bias": torch.ones(128)}), f"{UP}.bias .* is not zero"),
        (lambda t: t[f"{UP}.g_idx"][0].fill_(1), f"{UP}.g_idx .* group 0 has 31"),
        (lambda t: t[f"{UP}.scales"].fill_(float("nan")), f"{UP}.scales .* 256 scales that are NaN"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "model.norm.weight .* shape"),
    ],
)
def test_damage_is_refused_before_anything_is_allocated(change, said, tmp_path, monkeypatch):
    folder, _ = written(tmp_path, "gptq")
    change_tensors(folder, change)
    monkeypatch.setattr(
        "hf_mlspec.integration.quantizer.source.convert_layers", lambda *a: pytest.fail("it was loaded first")
    )
    with pytest.raises(ValueError, match=said):
        hf_mlspec.load(folder)


def test_a_bias_of_zeros_that_the_model_has_none_of_passes(tmp_path):
    folder, _ = written(tmp_path, "gptq")
    change_tensors(folder, lambda t: t.update({f"{UP}.bias": torch.zeros(128)}))
    assert hf_mlspec.load(folder).get_submodule(UP).bias is None


def test_a_truncated_file_is_named(tmp_path):
    folder, _ = written(tmp_path, "gptq")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is damaged: .* truncated"):
        hf_mlspec.load(folder)


def test_a_config_without_quantized_layers_is_named(tmp_path):
    folder = tmp_path / "plain"
    model_of().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json says 'gptq', but no linear layer"):
        hf_mlspec.load(folder)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (None, "it is not quantized"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes' is not read"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
    ],
)
def test_what_is_not_read_is_named(own, said, tmp_path):
    model_of().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **({"quantization_config": own} if own else {})}))
    with pytest.raises(ValueError, match=said):
        MLSpecConfig.for_checkpoint(str(tmp_path))


def test_a_pickled_checkpoint_is_refused(tmp_path):
    folder, _ = written(tmp_path, "gptq")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"GPTQ checkpoints are read from safetensors files, here are \['.bin'\]"):
        hf_mlspec.load(folder)


def test_the_folder_is_left_as_it_was(tmp_path):
    folder, _ = written(tmp_path / "a", "awq")
    shutil.copytree(folder, tmp_path / "b")
    hf_mlspec.load(folder)
    for file in (tmp_path / "b").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_pages_of_a_file_are_let_go_and_keep_their_bytes(tmp_path):
    save_file({"a": torch.arange(1 << 20, dtype=torch.int32)}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        tensor = file.get_tensor("a")
        assert int(tensor.sum()) > 0
        resident = [resident_pages(tensor)]
        let_go(tensor, keep_cached=True)
        resident.append(resident_pages(tensor))
        assert torch.equal(tensor, torch.arange(1 << 20, dtype=torch.int32))
    if resident[0]:  # else the library made a copy, whose memory stays
        assert resident[1] < resident[0] // 2


def resident_pages(tensor):
    """KiB of the mapped file that holds a tensor, as the kernel counts them; 0 for other memory."""
    address, inside = tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds, *_ = line.split(maxsplit=1)
        if "-" in bounds and ":" not in bounds:
            begin, end = (int(bound, 16) for bound in bounds.split("-"))
            inside = begin <= address < end and "safetensors" in line
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1])
    return 0


def test_another_config_of_the_user_is_not_dropped(tmp_path, no_packages):
    folder, _ = written(tmp_path, "gptq")
    with pytest.raises(Exception, match=r"(?i)gptq|MLSpecConfig|QuantizeConfig"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=MLSpecConfig(format="mxfp4"))


def test_loading_info_comes_with_the_model(tmp_path):
    model, info = hf_mlspec.load(written(tmp_path, "gptq")[0], output_loading_info=True)
    assert type(model.model.layers[0].mlp.up_proj) is Int4Linear
    assert not info["missing_keys"]
    assert hf_mlspec.load(tmp_path, torch_dtype=torch.float32).dtype == torch.float32


def test_a_folder_in_a_folder(tmp_path):
    written(tmp_path / "sub", "gptq")
    model = hf_mlspec.load(tmp_path, subfolder="sub")
    assert type(model.model.layers[0].mlp.up_proj) is Int4Linear


def test_a_folder_that_says_no_dtype_and_holds_float16(tmp_path):
    folder, _ = written(tmp_path, "gptq", model=model_of(torch.float16))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    assert hf_mlspec.load(folder).dtype == torch.bfloat16


def test_the_base_model_alone(tmp_path):
    folder, values = written(tmp_path, "gptq")
    base = AutoModel.from_pretrained(folder, quantization_config=MLSpecConfig.for_checkpoint(str(folder)))
    name, expected = next(iter(values.items()))
    assert torch.equal(weight_of(base.get_submodule(name.removeprefix("model."))).half(), expected)


def test_a_tied_head_that_is_quantized_by_itself_is_named(tmp_path):
    model = model_of(tie_word_embeddings=True)
    layers = {name: gptq(rounded(linear.weight, 4, 32, True), 4) for name, linear in linears(model).items()}
    folder = write(tmp_path, model, layers, {"quant_method": "gptq", "bits": 4, "group_size": 32})
    head = gptq(rounded(model.lm_head.weight, 4, 32, True), 4)
    change_tensors(folder, lambda t: t.update({f"lm_head.{key}": tensor for key, tensor in head.items()}))
    with pytest.raises(ValueError, match=r"config\.json ties the weight of lm_head"):
        hf_mlspec.load(folder)


def test_scales_of_a_quantized_cache_are_said_and_left(tmp_path):
    folder, _ = written(tmp_path, "gptq")
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    with pytest.warns(UserWarning, match="1 scales of a KV cache in fewer bits"):
        hf_mlspec.load(folder)
