"""Do zipper weights get their codes on a text: GPTQ over rows, smoothing behind the split, rotations, and both?"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from models import prompts, tiny, together
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec import MLSpecConfig, ops
from hf_mlspec.calibration.coding import factor_of
from hf_mlspec.calibration.matrices import write_rotations
from hf_mlspec.calibration.methods import method_for
from hf_mlspec.calibration.row_codes import row_feedback_weight
from hf_mlspec.calibration.trials import zipper_trial
from hf_mlspec.cli import main
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.hessian import inverse_factor
from hf_mlspec.formats.zipper import MODES, Split
from hf_mlspec.nn.transforms import HADAMARD, hadamard_of
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

ROWS = [torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)]
IDS = torch.tensor(ROWS[:1])
OPTIONS = {"bits": 6, "low_bits": 4, "mode": "exact", "high_part": "device"}
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel", "ignore:.*runs module by module")


def layer(size: int = 192, out: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight, and inputs whose channels are correlated and differ in size."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(size, size, generator=generator) * torch.logspace(-1, 1, size)
    return torch.randn(out, size, generator=generator), torch.randn(900, size, generator=generator) @ mixing / 8


@pytest.mark.parametrize("mode", MODES)
def test_row_codes_are_gptqs_written_out(mode):
    weight, x = layer()
    found = row_feedback_weight(weight, factor_of(x.T @ x, "up"), {**OPTIONS, "mode": mode}, "up").validate(24, 192)
    plain = ZipperWeight.from_dense(weight, mode=mode)
    assert torch.equal(found.weight_scale, plain.weight_scale)
    factor, left = inverse_factor(x.T @ x, 192, 0.1).double(), weight.double().clone()
    step, values = found.weight_scale.double()[:, 0], torch.empty(24, 192, dtype=torch.float64)
    for column in range(192):
        code = left[:, column] / step
        code = (code / 2).round().clamp(-16, 15) * 2 if mode == "paper" else code.round().clamp(-31, 31)
        values[:, column] = code * step
        error = (left[:, column] - values[:, column]) / factor[column, column]
        left[:, column:] -= torch.outer(error, factor[column, column:])
    same = (found.dequantize(torch.float64) - values).abs().amax(1) < 1e-6
    assert same.double().mean() > 0.5  # float32 may round a value to the other of two codes, and then that row differs
    errors = [float((x @ (own.double() - weight.double()).float().T).square().sum())
              for own in (found.dequantize(), values, plain.dequantize())]  # fmt: skip
    assert errors[0] == pytest.approx(errors[1], rel=0.03)
    assert errors[0] < 0.9 * errors[2]


def test_what_has_no_codes_is_named():
    weight, x = layer()
    with pytest.raises(ValueError, match=r"h\.up: zipper: row 0 reaches"):
        row_feedback_weight(weight * 1e6, factor_of(x.T @ x, "h.up"), OPTIONS, "h.up")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_trial_gives_what_the_packed_layer_will(mode, bits):
    weight, x = layer()
    x = x[:32].bfloat16().float()
    own = ZipperWeight.from_dense(weight, mode=mode)
    wanted = ops.zipper_linear(x, ops.prepack_zipper(*own.parts), 24, how=own.how, activation_bits=bits)
    (found,) = zipper_trial(Split(mode=mode), bits)(x, [weight])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def quantize(method: str, kind: str = "llama", dtype: torch.dtype = torch.float32, **options):
    model = tiny(kind, dtype=dtype)
    before = model(IDS).logits
    found = hf_mlspec.quantize(model, method, "zipper", **{"calibration": ROWS, "mode": "clamp", **options})
    return model, before, found


@pytest.mark.parametrize(("kind", "method", "options"), [
    ("llama", "gptq", {"mode": "exact"}),
    ("llama", "smoothquant", {"search_bits": 4}),
    ("qwen2", "quarot", {"mode": "paper"}),
    ("llama", "quarot+smoothquant+gptq", {"search_bits": 4}),
    ("qwen2", "smoothquant+gptq", {"bits": 8, "low_bits": 5}),
    ("llama", "gptq", {"act_order": True})])
def test_saved_and_loaded_bit_for_bit_and_lossless_with_its_low_part(tmp_path, kind, method, options):
    model, before, found = quantize(method, kind, **options)
    after = model(IDS).logits
    assert (after - before).norm() < 0.5 * before.norm()
    assert min(own.sqnr for own in found.layers) > 20
    if "smoothquant" in method:
        scaled = {own.name for own in found.layers if own.alpha is not None}
        assert scaled >= {"self_attn.q_proj", "mlp.up_proj"}
        assert ("mlp.down_proj" in scaled) == ("quarot" not in method)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again.model.layers[0].mlp.down_proj) is ZipperLinear
    assert torch.equal(again(IDS).logits, after)
    if has_compiled_decoder():
        assert decoder_of(again, "cpu") is not None
    inputs = prompts([9, 4, 17])
    alone = together(again, inputs, [], max_new_tokens=24)
    assert together(again, inputs, ["zipper-low"], max_new_tokens=24) == alone
    (level,) = hf_mlspec.last_stats(again).levels
    assert level.accepted <= level.drafted > 0
    single = [together(again, {name: rows[2:] for name, rows in inputs.items()}, [], max_new_tokens=24)]
    assert alone[2] == single[0][0]


def test_rotations_lie_on_the_layers_that_were_turned_and_both_ways_apply_them():
    model, _, _ = quantize("quarot+gptq")
    block = model.model.layers[0]
    assert {own.transform for own in block.modules() if isinstance(own, ZipperLinear)} == {HADAMARD}
    turned = {name for name, own in block.named_modules()
              if isinstance(own, ZipperLinear) and not hadamard_of(own.transform_tensors()).is_nothing}  # fmt: skip
    assert "mlp.down_proj" in turned
    assert turned <= {"mlp.down_proj", "self_attn.o_proj"}
    down = block.mlp.down_proj
    x = torch.randn(3, down.in_features, generator=torch.Generator().manual_seed(1))
    rotated = hadamard_of(down.transform_tensors()).rotate(x.double()).float().bfloat16().float()
    with hf_mlspec.precision_switch(model).at("zippera4"):
        four = down(x)
    torch.testing.assert_close(down(x), F.linear(rotated, down.dequantized()), rtol=2e-2, atol=2e-3)
    (wanted,) = zipper_trial(down.how, 4)(rotated, [down.dequantized()])
    assert (four - wanted).norm() < 0.05 * wanted.norm()  # the high part met inputs as they are


def test_smoothing_and_rotation_are_words_of_the_config(tmp_path):
    dense, matrices = tmp_path / "dense", tmp_path / "R.bin"
    tiny(dtype=torch.float32).save_pretrained(dense)
    size = tiny().config.hidden_size
    write_rotations(matrices, torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0].float())
    words = [
        ({"smoothing": "auto"}, "smoothquant"),
        ({"rotation": "hadamard", "method": "gptq"}, "quarot+gptq"),
        ({"smoothing": "auto", "rotation": matrices, "method": "gptq"}, "quarot+smoothquant+gptq"),
    ]
    for given, method in words:
        config = MLSpecConfig(format="zipper", mode="clamp", calibration=ROWS, **given)
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, quantization_config=config).eval()
        said = model.config.quantization_config
        assert (said.format, said.mode, said.calibration["method"]) == ("zipper", "clamp", method)
        assert ("rotations_sha256" in said.calibration) == ("rotation" in given and given["rotation"] == matrices)
        options = {} if given.get("rotation") != matrices else {"rotations": matrices}
        wanted, _, _ = quantize(method, **options)
        assert torch.equal(model(IDS).logits, wanted(IDS).logits)


@pytest.mark.parametrize("method", ["quarot+smoothquant", "quarot+smoothquant+gptq"])
def test_a_file_of_a_learned_rotation_is_read_under_smoothing(tmp_path, method):
    """Its matrix, and no other, turned what the embedding writes; then inputs behind norms were scaled."""
    size, file = tiny().config.hidden_size, tmp_path / "R.bin"
    matrix = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(7)).double())[0].float()
    write_rotations(file, matrix)
    model, before, found = quantize(method, rotations=file)
    other, _, _ = quantize(method)
    table, turned = tiny(dtype=torch.float32).model.embed_tokens.weight, model.model.embed_tokens.weight
    torch.testing.assert_close(turned, table @ matrix, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(turned, other.model.embed_tokens.weight, atol=1e-2)
    assert {own.name for own in found.layers if own.alpha is not None} >= {"self_attn.q_proj", "mlp.up_proj"}
    after = model(IDS).logits
    assert (after - before).norm() < 0.5 * before.norm()
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(IDS).logits, after)


@pytest.mark.parametrize(("shape", "words"), [((32, 48), "the rotation belongs to another model"), (None, "R.bin")])
def test_a_file_that_is_no_rotation_is_named_under_smoothing(tmp_path, shape, words):
    file = tmp_path / "R.bin"
    if shape:
        torch.save({"R1": torch.ones(shape)}, file)
    with pytest.raises((ValueError, OSError), match=words):
        quantize("quarot+smoothquant", rotations=file)


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path):
    whole, _, _ = quantize("quarot+smoothquant", work_folder=tmp_path / "work")
    (tmp_path / "work" / "block_0001.safetensors").unlink()
    resumed, _, _ = quantize("quarot+smoothquant", work_folder=tmp_path / "work")
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in resumed.state_dict().items())
    with pytest.raises(ValueError, match="mode 'clamp', now it is 'exact'"):
        quantize("quarot+smoothquant", work_folder=tmp_path / "work", mode="exact")


@pytest.mark.parametrize(("given", "words"), [
    ({"format": "int4", "smoothing": "auto"}, "smoothing is 'auto', a word of format 'zipper'"),
    ({"smoothing": "auto"}, "chooses codes on a text: add calibration"),
    ({"smoothing": 0.5, "calibration": ROWS}, "smoothing is 0.5, choose 'auto'"),
    ({"rotation": "hadamard", "method": "smoothquant", "calibration": ROWS}, "give one word with all steps"),
    ({"rotation": "a", "rotations": "b", "calibration": ROWS}, "rotation and rotations name files"),
    ({"method": "awq", "calibration": ROWS}, "method 'awq' does not fit format 'zipper'"),
    ({"method": "atom", "calibration": ROWS}, "method 'atom' does not fit format 'zipper'"),
    ({"method": "gptq", "group_size": 64, "calibration": ROWS}, "format 'zipper' has no group_size")])
def test_what_does_not_fit_together_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        MLSpecConfig(**{"format": "zipper", **given})


def test_words_of_other_calls_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'modes'"):
        quantize("gptq", modes="clamp")
    with pytest.raises(ValueError, match=r"'quarot.smoothquant' does not fit format 'int4-int8': .* codes of 'zip"):
        method_for("quarot+smoothquant", "int4-int8")


def test_command(tmp_path, capsys, saved_model):
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 400, encoding="utf-8")
    asked = ["--format", "zipper", "--mode", "clamp", "--method", "quarot+smoothquant+gptq"]
    asked += ["--calibration", str(text), "--samples", "2", "--tokens", "32"]
    assert main(["quantize", str(saved_model), str(out), *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["quantized"]["format"] == "zipper"
    assert told["calibrated"]["record"]["method"] == "quarot+smoothquant+gptq"
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["mode"], config["transform"]) == ("clamp", "hadamard")
    assert main(["info", "--json"]) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert (methods["quarot+smoothquant"], methods["gptq"]) == ("zipper, int4", "int4, zipper")
