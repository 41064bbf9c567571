"""Does `hf_mlspec.quantize` give a model that loads bit for bit, resume to the same bits, and refuse bad input?"""

from __future__ import annotations

import json

import pytest
import torch
from accelerate.hooks import attach_execution_device_hook
from models import tiny
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.calibration import needed, pipeline
from hf_mlspec.calibration.matrices import write_rotations
from hf_mlspec.calibration.rotation import rotate
from hf_mlspec.integration.quantizer import calibrated
from hf_mlspec.nn.linear import Int4Linear
from hf_mlspec.nn.transforms import hadamard_of

IDS = torch.arange(3, 43).view(1, 40)
ROWS = [torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(6)]
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def model_of(kind: str = "llama"):
    return tiny(kind, dtype=torch.float32)


def quantize(model, method: str = "gptq", **options):
    return hf_mlspec.quantize(model, method, calibration=ROWS, **{"group_size": 32, **options})


@pytest.mark.parametrize(("kind", "method", "options"), [
    ("llama", "rtn", {}), ("gemma3", "gptq", {"act_order": True}), ("phi3", "awq", {"symmetric": False}),
    ("qwen2", "smoothquant+gptq", {"search_bits": 4}), ("llama", "quarot+smoothquant+gptq", {"format": "int4"})])
def test_a_model_is_saved_and_loads_bit_for_bit(tmp_path, kind, method, options):
    model = model_of(kind)
    before = model(IDS).logits
    found = quantize(model, method, **options)
    after = model(IDS).logits
    assert (after - before).norm() < 0.6 * before.norm()
    assert len(found.layers) == 2 * (4 if kind == "phi3" else 7)
    assert min(layer.sqnr for layer in found.layers) > 8
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again(IDS).logits, after)
    told = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["calibration"]
    assert told == found.record
    assert (told["method"], told["samples"], told["tokens"]) == (method, 6, 240)


def test_rtn_is_what_loading_makes(tmp_path):
    model = model_of()
    model.save_pretrained(tmp_path)
    config = hf_mlspec.MLSpecConfig(format="int4", group_size=32)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    quantize(model, "rtn")
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)


def test_layers_with_one_input_have_one_hessian(monkeypatch):
    groups, collect = [], pipeline.collect
    monkeypatch.setattr(pipeline, "collect", lambda *given: groups.append(collect(*given)) or groups[-1])
    quantize(model_of())
    assert [sorted(name.rpartition(".")[2] for name in inputs.names) for inputs in groups[0]] == [
        ["k_proj", "q_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, monkeypatch, method):
    whole = model_of()
    quantize(whole, method)
    packs, pack = [], pipeline._Work.pack

    def stops(self, block, where, index, passes):
        packs.append(index)
        if index == 1 and len(packs) == 2:
            raise KeyboardInterrupt
        return pack(self, block, where, index, passes)

    monkeypatch.setattr(pipeline._Work, "pack", stops)
    with pytest.raises(KeyboardInterrupt):
        quantize(model_of(), method, work_folder=tmp_path / "work")
    with pytest.raises(ValueError, match="holds blocks of a calibration with symmetric True, now it is False"):
        quantize(model_of(), method, symmetric=False, work_folder=tmp_path / "work")
    resumed = model_of()
    quantize(resumed, method, work_folder=tmp_path / "work")
    assert packs == [0, 1, 1]
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in resumed.state_dict().items())


def test_blocks_of_another_instruction_set_are_refused_by_name(tmp_path, monkeypatch):
    """With other ones sums are added up in another order, and codes differ; the processor's name does not matter."""
    quantize(model_of(), "rtn", work_folder=tmp_path / "work")
    quantize(model_of(), "rtn", work_folder=tmp_path / "work")
    here = torch.backends.cpu.get_cpu_capability()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")
    words = rf"holds blocks of a calibration with device 'a CPU, kernels \w+, torch {here}', now it is .*, torch AVX9'"
    with pytest.raises(ValueError, match=words):
        quantize(model_of(), "rtn", work_folder=tmp_path / "work")


def test_a_gpu_is_told_by_its_name(monkeypatch):
    named = {0: "NVIDIA H100", 1: "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: named[device.index])
    first, second = (calibrated._arithmetic(torch.device("cuda", index)) for index in named)
    assert (first, second) == ("NVIDIA H100", "NVIDIA H200")


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"method": "magic"}, ValueError, "method is 'magic', choose one of rtn, gptq, awq"),
    ({"format": "mxfp4", "group_size": 128}, ValueError, "does not fit format 'mxfp4'"),
    ({"method": "awq", "act_order": True}, ValueError, "act_order is GPTQ's"),
    ({"search_bits": 4}, ValueError, "search_bits is SmoothQuant's"),
    ({"calibration": [[3, 64]]}, ValueError, "holds token 64, the model has 64"),
    ({"calibration": ["some text"]}, ValueError, "give its tokenizer too"),
    ({"calibration": []}, ValueError, "calibration is empty"),
    ({"damping": -1.0}, ValueError, "damping is -1.0, it must be a number above 0"),
    ({"damping": "x"}, ValueError, "damping is 'x'"),
    ({"method": "rtn", "damping": 0.5}, ValueError, "damping is GPTQ's, method 'rtn' has none"),
    ({"method": "quarot", "seed": 1.5}, ValueError, r"seed is 1\.5, it must be a whole number"),
    ({"calibration": None}, TypeError, "calibration is None"),
    ({"calibration": True}, TypeError, "calibration is True"),
    ({"calibration": {"train": ROWS, "test": ROWS}}, TypeError, r"a dict with \['test', 'train'\]: give one of them"),
    ({"calibration": [[3] * 600]}, ValueError, "has 600 tokens, the model 512 positions")])
def test_bad_input_is_refused_before_a_layer_is_packed(given, error, words):
    model = model_of()
    with pytest.raises(error, match=words):
        hf_mlspec.quantize(model, **{"method": "gptq", "calibration": ROWS, "group_size": 32, **given})
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_a_damaged_block_of_a_work_folder_is_refused(tmp_path):
    quantize(model_of(), "rtn", work_folder=tmp_path / "work")
    file = tmp_path / "work" / "block_0001.safetensors"
    said = bytearray(file.read_bytes())
    said[-5] ^= 1
    file.write_bytes(said)
    with pytest.raises(ValueError, match=r"block_0001\.safetensors is damaged: remove it, and its block is done"):
        quantize(model_of(), "rtn", work_folder=tmp_path / "work")
    file.write_bytes(said[:100])
    with pytest.raises(ValueError, match=r"block_0001\.safetensors is damaged"):
        quantize(model_of(), "rtn", work_folder=tmp_path / "work")


def errors_of(model, wanted, **options):
    """Of the logits, in parts of their size."""
    found = hf_mlspec.quantize(model, calibration=ROWS, **options)
    with torch.no_grad():
        return float((model(IDS).logits - wanted).norm() / wanted.norm()), found


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3"])
def test_a_rotated_model_gets_its_codes_on_what_its_weights_multiply(tmp_path, kind):
    wanted = model_of(kind)(IDS).logits
    model, other = model_of(kind), model_of(kind)
    rotate(other, seed=3)
    error, found = errors_of(model, wanted, method="quarot+gptq", group_size=32, seed=3)
    again, _ = errors_of(other, wanted, method="gptq", group_size=32, seed=3)
    assert error == again < 0.6
    assert min(layer.sqnr for layer in found.layers) > 8
    blocks = [module for module in model.modules() if isinstance(module, Int4Linear)]
    assert {module.transform.word for module in blocks} == {"hadamard"}
    down = model.model.layers[0].mlp.down_proj
    assert not hadamard_of(down.transform_tensors()).is_nothing
    model.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("method", ["gptq", "quarot+gptq"])
def test_hooks_of_accelerate_go_on_with_the_packed_layers(method):
    model, plain = model_of("llama"), model_of("llama")
    attach_execution_device_hook(model, "cpu")
    quantize(model, method)
    quantize(plain, method)
    assert model.model.layers[0].mlp.down_proj._hf_hook.execution_device == "cpu"
    assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_given_rotations_take_the_place_of_hadamards(tmp_path):
    wanted = model_of("qwen3")(IDS).logits
    model, other, resumed = model_of("qwen3"), model_of("qwen3"), model_of("qwen3")
    drawn = torch.Generator().manual_seed(0)
    size, dim, layers = model.config.hidden_size, model.config.head_dim, model.config.num_hidden_layers
    residual, *heads = (torch.linalg.qr(torch.randn(n, n, generator=drawn))[0] for n in (size, *[dim] * layers))
    write_rotations(tmp_path / "R.bin", residual, heads)
    rotate(other, seed=3, residual=residual, heads=heads)
    options = {"method": "quarot+gptq", "group_size": 32, "seed": 3, "rotations": tmp_path / "R.bin"}
    error, found = errors_of(model, wanted, **options, work_folder=tmp_path / "work")
    again, _ = errors_of(other, wanted, method="gptq", group_size=32, seed=3)
    assert error == again < 0.6
    assert len(found.record["rotations_sha256"]) == 64
    write_rotations(tmp_path / "R.bin", residual)
    with pytest.raises(ValueError, match="holds blocks of a calibration with rotations_sha256"):
        errors_of(resumed, wanted, **options, work_folder=tmp_path / "work")


@pytest.mark.parametrize(("given", "error", "words"), [
    ({"rotations": "no.bin"}, FileNotFoundError, r"'no\.bin' is no file of rotations, such as SpinQuant's R\.bin"),
    ({"rotations": 5}, TypeError, r"rotations is a int, it must be the name of a file such as R\.bin"),
    ({"rotations": "no.bin", "method": "gptq"}, ValueError, "rotations are of quarot .*, method 'gptq'"),
    ({"rotations": "small.bin"}, ValueError, r"residual is \[8, 8\], this model's is \[\d+, \d+\]"),
], ids=["no file", "no name", "method", "another model"])  # fmt: skip
def test_rotations_that_do_not_fit_are_refused_before_the_model_changes(tmp_path, monkeypatch, given, error, words):
    monkeypatch.chdir(tmp_path)
    write_rotations("small.bin", torch.eye(8))
    model = model_of("qwen3")
    before = model(IDS).logits
    with pytest.raises(error, match=words):
        quantize(model, **{"method": "quarot", **given})
    assert torch.equal(model(IDS).logits, before)


def test_hessians_of_rotated_layers_are_those_of_rotated_inputs(monkeypatch):
    seen, factor_of = [], pipeline.factor_of

    def noting(hessian, name, damping):
        seen.append((name, hessian.clone()))  # which the factor overwrites
        return factor_of(hessian, name, damping)

    monkeypatch.setattr(pipeline, "factor_of", noting)
    model = model_of()
    rotate(model)
    down, inputs = model.model.layers[0].mlp.down_proj, []
    down.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    hessian = torch.zeros(down.in_features, down.in_features)
    for row in ROWS:
        model(torch.tensor([row]))
        x = down.transform.apply(inputs.pop(), down.transform_tensors())[0]
        hessian += x.T @ x
    quantize(model)
    (given,) = (one for one in seen if one[0] == "model.layers.0.mlp.down_proj")
    # What comes before it in the block is not rounded yet.
    torch.testing.assert_close(given[1], hessian, rtol=1e-3, atol=1e-3)


def test_a_tied_model_in_16_bits_is_rotated_and_loads_bit_for_bit(tmp_path):
    model = tiny("qwen2", dtype=torch.bfloat16, tie_word_embeddings=True)
    wanted = model(IDS).logits.float()
    error, _ = errors_of(model, wanted, method="quarot+gptq", group_size=32)
    assert error < 0.6
    assert {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} >= {torch.bfloat16}
    model.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert not loaded.config.tie_word_embeddings
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_heads_alone_are_rotated_where_nothing_is_in_front_of_layers():
    model = model_of("gemma3")
    wanted = model(IDS).logits
    with pytest.raises(ValueError, match="norms behind its blocks"):
        quantize(model, "quarot+gptq")
    assert torch.equal(model(IDS).logits, wanted)
    rotate(model, residual=False, online=False)
    assert errors_of(model, wanted, method="gptq", group_size=32)[0] < 0.6
    assert {one.transform.word for one in model.modules() if isinstance(one, Int4Linear)} == {"none"}


def test_memory_for_a_rotation_is_asked_for_before_it(monkeypatch):
    model = model_of()
    before = model(IDS).logits
    monkeypatch.setattr(needed, "available", lambda device: needed.memory_to_rotate(model) - 1)
    with pytest.raises(MemoryError, match=r"calibration needs .* use a method without quarot, or free some"):
        quantize(model, "quarot")
    assert torch.equal(model(IDS).logits, before)


def test_a_rotated_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    whole, resumed = model_of(), model_of()
    quantize(whole, "quarot+gptq", work_folder=tmp_path / "work")
    (tmp_path / "work" / "block_0001.safetensors").unlink()
    quantize(resumed, "quarot+gptq", work_folder=tmp_path / "work")
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in resumed.state_dict().items())
    other = model_of()
    before = other(IDS).logits
    with pytest.raises(ValueError, match="holds blocks of a calibration with seed 0, now it is 1"):
        quantize(other, "quarot+gptq", work_folder=tmp_path / "work", seed=1)
    assert torch.equal(other(IDS).logits, before)


@pytest.mark.parametrize(("turned", "given", "words"), [
    (True, {"method": "awq"}, r"(down|o)_proj has rotated inputs, whose scales 'awq'"),
    (True, {"method": "quarot"}, "is rotated already: start from the original model"),
    (True, {"method": "gptq", "skip_modules": ["down_proj"]}, "down_proj has rotated inputs, which no dense layer"),
    (True, {"method": "gptq", "act_order": True}, "two transforms of a layer's inputs: leave one out"),
    (False, {"method": "quarot", "skip_modules": ["down_proj"]}, "down_proj has rotated inputs, which no dense layer"),
    (False, {"method": "quarot+gptq", "act_order": True}, "two transforms of a layer's inputs: leave one out")])
def test_what_does_not_go_with_rotations_is_refused(turned, given, words):
    model = model_of()
    if turned:
        rotate(model)
    before = model(IDS).logits
    with pytest.raises(ValueError, match=words):
        quantize(model, **given)
    assert torch.equal(model(IDS).logits, before)
    assert isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)


def test_a_layer_without_signal_has_no_ratio():
    model = model_of()
    torch.nn.init.zeros_(model.model.layers[0].self_attn.v_proj.weight)
    found = {(one.block, one.name): one.sqnr for one in quantize(model, "rtn").layers}
    assert found[0, "self_attn.v_proj"] is None
    assert found[1, "self_attn.v_proj"] > 10


def test_nan_inputs_name_block_and_layer():
    model = model_of()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.nan
    with pytest.raises(ValueError, match=r"model\.layers\.1: the inputs of self_attn\.q_proj hold NaN or Inf"):
        quantize(model)


def test_too_little_memory_is_said_before_the_first_block(monkeypatch):
    monkeypatch.setattr(needed, "available", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"calibration needs .* MiB beside the model, 0 are free"):
        quantize(model_of())


@pytest.mark.parametrize("skipped", [["proj"], ["model.layers"], [".*mlp.*", ".*self_attn.*"]], ids=str)
def test_skipping_every_layer_is_refused(skipped):
    model = model_of()
    before = model(IDS).logits
    with pytest.raises(ValueError, match=r"skip_modules=\[.*\] leaves nothing to pack of the 14 linear layers"):
        quantize(model, "gptq", skip_modules=skipped)
    assert torch.equal(model(IDS).logits, before)
    assert model.config.to_dict().get("quantization_config") is None


ALONE = r"rotate\(model, online=False\)( on the original model)?, then quantize by rtn or gptq"


@pytest.mark.parametrize(("kind", "sizes", "given", "words"), [
    ("gemma3", {}, {}, r"quarot: Gemma3\w+ has norms behind.*call .*rotation\.rotate\(model, residual=False"),
    ("llama", {"intermediate_size": 63}, {}, f"quarot: intermediate_size 63, is odd: .*{ALONE}"),
    ("llama", {"intermediate_size": 48}, {}, f"{ALONE}; only then leave them unpacked with skip_modules"),
    ("llama", {}, {"skip_modules": ["down_proj"]}, f"down_proj has rotated inputs, .*do not skip it, or .*{ALONE}")])
def test_remedies_of_rotations_can_be_followed(kind, sizes, given, words):
    model = tiny(kind, dtype=torch.float32, **sizes)
    before = model(IDS).logits
    with pytest.raises(ValueError, match=words):
        quantize(model, "quarot+gptq", **given)
    assert torch.equal(model(IDS).logits, before)
    rotate(model, residual=kind != "gemma3", online=False)
    assert quantize(model, "gptq", skip_modules=["down_proj"]).layers


def test_a_model_of_inference_mode_is_not_rotated_by_a_method():
    with torch.inference_mode():
        model = model_of()
    with pytest.raises(ValueError, match=r"quarot: .* weights were made under torch\.inference_mode"):
        quantize(model, "quarot")
    quantize(model, "gptq")  # which changes no weight in place
