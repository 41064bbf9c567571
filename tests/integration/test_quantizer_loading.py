"""Does from_pretrained quantize as it loads, to exactly the bits of each layer quantized alone?"""

import copy
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging

from hf_mlspec import MLSpecConfig, precision_switch
from hf_mlspec.integration.quantizer.packing import packed_modules
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from tests.models import tiny

IDS = torch.arange(3, 17).view(2, 7)
FORMATS = {
    "int4": {"format": "int4", "group_size": 32},
    "int4-asymmetric": {"format": "int4", "group_size": 32, "symmetric": False},
    "mxfp4": {"format": "mxfp4", "rule": "even_bump"},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a tiny model, by kind and dtype; made once."""
    made = {}

    def folder(kind="llama", dtype=torch.bfloat16, shards=None, **options):
        key = (kind, dtype, shards, *sorted(options.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            sharding = {} if shards is None else {"max_shard_size": shards}
            tiny(kind, dtype=dtype, **options).save_pretrained(made[key], **sharding)
        return made[key]

    return folder


def load(folder, settings=None, **options):
    if settings is not None:
        options["quantization_config"] = MLSpecConfig(**settings)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def packed_by_hand(folder, settings, **options):
    """The wide model, loaded whole, then every linear layer but the head quantized on its own."""
    model = load(folder, **options)
    settings = {name: value for name, value in settings.items() if name != "format"}
    kind = Int4Linear if "rule" not in settings else Mxfp4Linear
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            model.set_submodule(name, kind.from_linear(module, name=name, **settings))
    return model


def same(model, other):
    first, second = model.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name
    return True


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("qwen2", {}), ("llama", {"tie_word_embeddings": True})],
                         ids=["llama", "qwen2-bias", "tied"])
def test_quantized_while_loading_is_quantized_layer_by_layer(folders, tmp_path, kind, options, settings):
    folder = folders(kind, shards="15KB", **options)
    model = load(folder, settings)
    reference = packed_by_hand(folder, settings)
    assert same(model, reference)
    assert torch.equal(model(IDS).logits, reference(IDS).logits)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(options)
    model.save_pretrained(tmp_path, max_shard_size="9KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again, report = load(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert same(again, model)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.tie_word_embeddings is model.config.tie_word_embeddings


@pytest.mark.parametrize("stored", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("wanted", ["auto", torch.bfloat16, torch.float32])
def test_every_dtype_in_and_out(folders, stored, wanted):
    folder = folders(dtype=stored)
    model = load(folder, FORMATS["int4"], dtype=wanted)
    assert same(model, packed_by_hand(folder, FORMATS["int4"], dtype=wanted))
    assert model.dtype == (stored if wanted == "auto" else wanted)
    assert model.model.layers[0].mlp.up_proj.weight_scale.dtype == torch.float16
    assert model(IDS).logits.dtype == model.dtype


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_device_maps(folders, device_map):
    model = load(folders(), FORMATS["int4"], device_map=device_map)
    assert same(model, load(folders(), FORMATS["int4"]))
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 9)


def test_what_a_loaded_model_is(folders):
    model = load(folders(), {**FORMATS["int4"], "activation_bits": 8, "skip_modules": ["down_proj"]})
    assert not any(module.training for module in model.modules())
    assert model.is_quantized
    assert type(model.hf_quantizer).__name__ == "MLSpecQuantizer"
    config = model.config.quantization_config
    assert config.modules_to_not_convert == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))]
    layers = [module for _, module in packed_modules(model)]
    assert len(layers) == 12
    assert {id(layer.switch) for layer in layers} == {id(precision_switch(model))}
    assert precision_switch(model).activation_bits == 8
    assert not any(parameter.requires_grad for layer in layers for parameter in layer.parameters())
    assert not any("weight" in layer._parameters for layer in layers)


def test_in_memory_without_a_folder(folders):
    folder = folders()
    wide = load(folder)
    model = LlamaForCausalLM.from_pretrained(
        None, config=wide.config, state_dict=wide.state_dict(), dtype="auto",
        quantization_config=MLSpecConfig(**FORMATS["int4"]),
    )  # fmt: skip
    assert same(model, load(folder, FORMATS["int4"]))


def test_the_callers_config_is_left_alone_and_serves_again(folders):
    config = MLSpecConfig(**FORMATS["int4"])
    before = copy.deepcopy(vars(config))
    for kind in ("llama", "qwen2"):
        AutoModelForCausalLM.from_pretrained(folders(kind), quantization_config=config)
        assert vars(config) == before


def test_a_dict_is_a_config(folders):
    settings = {"quant_method": "mlspec", **FORMATS["int4"]}
    model = AutoModelForCausalLM.from_pretrained(folders(), quantization_config=settings)
    assert same(model, load(folders(), FORMATS["int4"]))


def test_copies_and_moves_keep_the_bits(folders):
    model = load(folders(), FORMATS["int4-asymmetric"])
    twin = copy.deepcopy(model)
    assert same(twin, model)
    assert precision_switch(twin) is not precision_switch(model)
    logits = model(IDS).logits
    assert torch.equal(twin(IDS).logits, logits)
    assert same(model.to("cpu").to(torch.float32).to(torch.bfloat16), twin)


@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
def test_dequantize_gives_a_plain_model_that_saves_as_one(folders, tmp_path, settings):
    model = load(folders("qwen2"), settings, dtype=torch.float32)
    layer = model.model.layers[1].self_attn.v_proj
    dense, bias = layer.dequantized(torch.float32), layer.bias
    model.save_pretrained(tmp_path / "packed")  # which makes config.dtype a word
    plain = model.dequantize()
    assert not list(packed_modules(plain))
    assert torch.equal(plain.model.layers[1].self_attn.v_proj.weight, dense)
    assert plain.model.layers[1].self_attn.v_proj.bias is bias
    assert not hasattr(plain.config, "quantization_config")
    plain.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert torch.equal(again(IDS).logits, plain(IDS).logits)


def test_a_base_model_reads_a_causal_lms_checkpoint(folders, tmp_path):
    load(folders(), {**FORMATS["int4"], "skip_modules": ["v_proj"]}).save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    whole = load(tmp_path)
    assert same(base, whole.model)
    base.save_pretrained(tmp_path / "base")
    headless, found = AutoModelForCausalLM.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert same(headless.model, base)
    assert not found["unexpected_keys"]
    assert found["missing_keys"] == {"lm_head.weight"}


def test_the_progress_bar_counts_tensors_and_can_be_disabled(folders, monkeypatch):
    folder = folders()
    for enabled in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        (logging.enable_progress_bar if enabled else logging.disable_progress_bar)()
        try:
            load(folder, FORMATS["int4"])
        finally:
            logging.enable_progress_bar()
        assert ("Quantizing to int4" in stream.getvalue()) is enabled
    assert "/14" in stream.getvalue() or not enabled


def test_modules_that_cannot_be_packed_are_named_once(folders):
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel: modules that are not packed: 8 Conv1D"), \
            pytest.raises(ValueError, match="holds no layer that can be packed"):
        load(folders("gpt2"), FORMATS["int4"])


PEAK = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
import transformers.models.llama.modeling_llama
import hf_mlspec


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


torch.set_num_threads(1)
AutoModelForCausalLM.from_pretrained(sys.argv[2], quantization_config=hf_mlspec.MLSpecConfig())  # imports, pools
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=hf_mlspec.MLSpecConfig())
print(status("VmHWM") - before, hf_mlspec.resident_bytes(model))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks of resident memory are read as on Linux")
def test_memory_never_holds_more_than_a_shard_and_the_packed_model(folders, tmp_path):
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    tiny(dtype=torch.bfloat16, **shape).save_pretrained(tmp_path, max_shard_size="10MB")
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(folders())]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    peak, packed = map(int, ran.stdout.split())
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert max(sizes) + packed < 0.5 * sum(sizes)  # holding the wide model would be seen
    assert peak <= max(sizes) + packed


def test_a_state_dict_in_memory_survives_being_quantized(folders):
    wide = load(folders(hidden_size=256, intermediate_size=512))
    state = {name: tensor.clone() for name, tensor in wide.state_dict().items()}
    LlamaForCausalLM.from_pretrained(None, config=wide.config, state_dict=state, quantization_config=MLSpecConfig())
    assert all(torch.equal(tensor, state[name]) for name, tensor in wide.state_dict().items())


# What cannot work is refused before a tensor is read.


@pytest.fixture
def nothing_read(monkeypatch):
    """Fails the test when transformers begins to load tensors."""
    def reads(*args, **kwargs):
        raise AssertionError("tensors were read")

    monkeypatch.setattr("transformers.modeling_utils.convert_and_load_state_dict_in_model", reads)


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize(("settings", "options", "message"), [
    ({"format": "int4"}, {},
     r"int4 with group_size=128 does not divide the in_features of 14 layers of LlamaForCausalLM, the first is "
     r"model\.layers\.0\.self_attn\.q_proj with in_features 32 = 0 x 128 \+ 32: use group_size=32, or leave"),
    ({"format": "int4", "group_size": 32}, {"intermediate_size": 72},
     r"2 layers .* model\.layers\.0\.mlp\.down_proj with in_features 72 = 2 x 32 \+ 8: leave them unpacked with "
     r"skip_modules=\['mlp\.down_proj'\]"),
    ({}, {"intermediate_size": 72}, r"mxfp4, in blocks of 32, does not divide .* in_features 72"),
    ({"skip_modules": ["dwn_proj"]}, {}, r"'dwn_proj' matches no module of LlamaForCausalLM; did you mean down_proj"),
    ({"skip_modules": ["("]}, {}, r"skip_modules: '\(' is not a regular expression"),
    ({"skip_modules": ["model"]}, {}, r"LlamaForCausalLM holds no layer that can be packed"),
], ids=["group", "down", "mxfp4", "typo", "regex", "nothing left"])  # fmt: skip
def test_settings_that_do_not_fit_the_model(folders, settings, options, message):
    with pytest.raises(ValueError, match=message):
        load(folders(**options), settings)


@pytest.mark.usefixtures("nothing_read")
def test_a_source_that_lacks_a_weight(folders, tmp_path):
    copy_of(folders(), tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"1 tensors .* missing from .*model\.safetensors: "
                                         r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path, FORMATS["int4"])


@pytest.mark.usefixtures("nothing_read")
def test_a_truncated_source_is_named(folders, tmp_path):
    copy_of(folders(), tmp_path, lambda tensors: None)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    said = rf"safetensors is damaged: it has {len(whole) - 100} bytes, its header describes {len(whole)}: it is trunc"
    with pytest.raises(ValueError, match=said):
        load(tmp_path, FORMATS["int4"])


def copy_of(folder, target, change):
    """The single-file checkpoint of ``folder``, changed, as a foreign tool would write it: without checksums."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS)
def test_nan_and_inf_end_the_load_and_name_the_tensor(folders, tmp_path, settings, value):
    name = "model.layers.1.mlp.gate_proj.weight"
    copy_of(folders(), tmp_path, lambda tensors: tensors[name].__setitem__((2, 5), value))
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.gate_proj\.weight: .*NaN or Inf"):
        load(tmp_path, settings)


def test_a_scale_beyond_float16_is_named(folders, tmp_path):
    name = "model.layers.1.mlp.gate_proj.weight"
    copy_of(folders(), tmp_path, lambda tensors: tensors[name].__setitem__((2, 5), 1e7))
    with pytest.raises(ValueError, match=r"gate_proj\.weight: int4: row 2, group 0 .* float16 ends at"):
        load(tmp_path, FORMATS["int4"])


def test_a_dtype_that_cannot_be_quantized_is_named(tmp_path):
    tiny("llama", dtype=torch.float64).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"down_proj\.weight: int4 quantizes float32.*not torch\.float64"):
        load(tmp_path, FORMATS["int4"])


def test_a_state_dict_that_lacks_a_weight(folders):
    wide = load(folders())
    state = wide.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"1 weights .* the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        LlamaForCausalLM.from_pretrained(
            None, config=wide.config, state_dict=state, quantization_config=MLSpecConfig(**FORMATS["int4"])
        )


def test_disk_offload_is_refused(folders, tmp_path):
    device_map = {"model.layers.0": "disk", "model.layers.1": "cpu", "model.embed_tokens": "cpu", "model.norm": "cpu",
                  "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    with pytest.raises(ValueError, match="device_map sends modules to disk"):
        load(folders(), FORMATS["int4"], device_map=device_map, offload_folder=tmp_path)


def test_another_quantization_is_not_ours(folders, tmp_path):
    copy_of(folders(), tmp_path, lambda tensors: None)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantized with FineGrainedFP8Config but you are passing a MLSpecConfig"):
        load(tmp_path, FORMATS["int4"])
