"""Are QuaRot's weights read bit for bit, real and simulated, with what their inputs go through?"""

import sys
import types

import pytest
import torch
from rotated_files import CONFIG, LAYER, SHAPES, folder, hadamard12, held, integers, nibbles, read, scales

from hf_mlspec.checkpoints.layer import HeldTensor, StoredLayer
from hf_mlspec.checkpoints.llama_shape import LlamaShape
from hf_mlspec.checkpoints.pickles import read_pickle
from hf_mlspec.checkpoints.quarot import QuarotReader, sort_folder
from hf_mlspec.checkpoints.quarot_pickle import recovered, sort_pickle
from hf_mlspec.formats import Int4Weight

DOWN, OUT, QUERY = f"{LAYER}.mlp.down_proj", f"{LAYER}.self_attn.o_proj", f"{LAYER}.self_attn.q_proj"


def test_a_folder_bit_for_bit():
    tensors, meant = folder()
    checkpoint = sort_folder(held(tensors), CONFIG)
    assert set(checkpoint.layers) == set(meant)
    for name, (ints, scale) in meant.items():
        layer = checkpoint.layers[name]
        assert checkpoint.reader.holds(layer)
        plan = checkpoint.reader.plan(layer)
        assert (plan.format, plan.options["group_size"], plan.ordered) == ("int4", 32 if name == DOWN else 64, False)
        weight = read(plan).weight
        assert isinstance(weight, Int4Weight)
        assert weight.symmetric
        assert torch.equal(weight.dequantize(), ints.float() * scale.float())
        assert weight.group_size == plan.options["group_size"]


def test_one_byte_by_hand():
    layer = StoredLayer("q", 32, 1, held({
        "weight": torch.tensor([[0x8F, 0x07] + [0] * 14], dtype=torch.uint8),  # -1, -8, 7, 0, ...
        "weight_scales": torch.tensor([[0.5]]).half()}))  # fmt: skip
    weight = read(QuarotReader(LlamaShape(1, 32, 32, 1, 1, 32)).plan(layer)).weight
    assert weight.dequantize()[0, :5].tolist() == [-0.5, -4.0, 3.5, 0.0, 0.0]


def test_what_inputs_go_through_is_recorded():
    checkpoint = sort_folder(held(folder()[0]), CONFIG)
    down = checkpoint.reader.plan(checkpoint.layers[DOWN]).online
    assert (down.size, down.inner, down.matrix.tolist()) == (96, 1, hadamard12().tolist())
    out = checkpoint.reader.plan(checkpoint.layers[OUT]).online
    assert (out.size, out.inner, out.order) == (12, 16, 12)
    assert checkpoint.reader.plan(checkpoint.layers[QUERY]).online is None
    rotation = checkpoint.rotation
    assert (rotation.residual, rotation.value_heads, rotation.o_proj, rotation.down_proj) == (True, 16, 12, 96)
    assert rotation.folded_norms[-1] == "model.norm"


def test_every_norm_weight_is_ignored():
    tensors, _ = folder()
    tensors[f"{LAYER}.input_layernorm.weight"] = torch.ones(192)
    tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    checkpoint = sort_folder(held(tensors), CONFIG)
    assert sorted(checkpoint.unused) == [
        "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.norm.weight"
    ]  # fmt: skip
    assert sorted(checkpoint.others) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_inputs_that_no_group_divides_are_dense():
    ints, scale = integers((4, 48)), scales(4)
    layer = StoredLayer("q", 48, 4, held({"weight": nibbles(ints), "weight_scales": scale}))
    plan = QuarotReader(LlamaShape(1, 48, 48, 1, 1, 48)).plan(layer)
    assert (plan.format, plan.read_as) == ("", "dense")
    assert "no multiple of 32" in plan.why_dense
    assert torch.equal(read(plan).weight, ints.float() * scale.float())


@pytest.mark.parametrize(("name", "change", "error", "message"), [
    ("mlp.down_proj.0.had_rem_dim", None, ValueError, r"mlp.down_proj: had_rem_dim is missing: 96 is no power of two"),
    ("self_attn.o_proj_hadamard.had_rem_dim", None, ValueError, r"o_proj: had_rem_dim is missing: 12 is no power"),
    ("mlp.down_proj.0.had_rem_dim", lambda t: t.abs(), ValueError, r"down_proj.0.had_rem_dim in f is no Hadamard"),
    ("mlp.down_proj.0.had_rem_dim", lambda t: t * 2, ValueError, r"had_rem_dim in f holds 144 numbers other"),
    ("self_attn.o_proj.1.weight", lambda t: t[:, :-1], ValueError, r"o_proj.1.weight in f has shape \[192, 95\]"),
    ("mlp.up_proj.weight", lambda t: t.to(torch.int8), TypeError, r"up_proj.weight in f is torch.int8"),
    ("mlp.up_proj.weight_scales", lambda t: t.float(), TypeError, r"weight_scales in f is torch.float32"),
    ("mlp.up_proj.weight_scales", lambda t: t.T, ValueError, r"weight_scales in f has shape \[1, 96\]"),
    ("mlp.up_proj.weight_scales", lambda t: t * 0, ValueError, r"up_proj: weight_scales holds 96 values that are NaN"),
    ("mlp.up_proj.weight_scales", lambda t: -t, ValueError, r"up_proj: weight_scales holds 96 values"),
    ("mlp.up_proj.weight_scales", lambda t: t * torch.nan, ValueError, r"up_proj: weight_scales holds 96 values"),
    ("mlp.up_proj.weight", None, ValueError, r"model.layers.0.mlp.up_proj.weight is missing"),
    ("mlp.up_proj.weight_scales", None, ValueError, r"up_proj.weight_scales is missing"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(name, change, error, message):
    tensors, _ = folder()
    whole = f"{LAYER}.{name}"
    tensors[whole] = tensors[whole] if change is None else change(tensors[whole])
    if change is None:
        del tensors[whole]

    def plan_all():
        checkpoint = sort_folder(held(tensors), CONFIG)
        return [checkpoint.reader.plan(layer) for layer in checkpoint.layers.values()]

    with pytest.raises(error, match=message):
        plan_all()


@pytest.mark.parametrize(("changed", "config", "message"), [
    ({"model.embed_tokens.weight": None}, {}, r"model.embed_tokens.weight is missing"),
    ({"lm_head.weight": None}, {}, r"lm_head.weight is missing or tied"),
    ({}, {"tie_word_embeddings": True}, r"lm_head.weight is missing or tied"),
    ({"model.odd": torch.ones(1)}, {}, r"model.odd in f: this layout has no tensor of that name"),
    ({}, {"model_type": "llama"}, r"model_type is 'llama', expected 'llama_quarot'"),
    ({}, {"num_attention_heads": 20, "hidden_size": 2560}, r"20 heads of 128 cannot be rotated"),
])  # fmt: skip
def test_a_folder_of_another_kind_is_refused(changed, config, message):
    tensors = {name: tensor for name, tensor in {**folder()[0], **changed}.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        sort_folder(held(tensors), {**CONFIG, **config})


# Simulated quantization: float weights and objects, in a pickle.


@pytest.fixture
def quantizer_class(monkeypatch):
    module = types.ModuleType("quant_utils")

    class WeightQuantizer(torch.nn.Module):
        def __init__(self, scale, bits=4, sym=True, zero=None):
            super().__init__()
            self.register_buffer("maxq", torch.tensor(7))
            self.register_buffer("scale", scale)
            self.register_buffer("zero", torch.zeros_like(scale) if zero is None else zero)
            self.bits, self.sym = bits, sym

    WeightQuantizer.__module__, WeightQuantizer.__qualname__ = "quant_utils", "WeightQuantizer"
    module.WeightQuantizer = WeightQuantizer
    monkeypatch.setitem(sys.modules, "quant_utils", module)
    return WeightQuantizer


def simulated(quantizer_class, rotated=True, dtype=torch.float16):
    state, quantizers, meant = {}, {}, {}
    for seed, (linear, shape) in enumerate(SHAPES.items()):
        name, ints, scale = f"{LAYER}.{linear}", integers(shape, seed), scales(shape[0], seed)
        weight = (ints.float() * scale.float()).to(dtype)
        state[f"{name}.weight"] = state[f"{name}.module.weight"] = weight
        state[f"{name}.quantizer.maxq"] = torch.tensor(7)
        state[f"{name}.out_quantizer.scale"] = torch.zeros(1)
        quantizers[f"{name}.module"] = quantizer_class(scale)
        meant[name] = (ints, scale)
    for norm in ("model.norm", f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"):
        state[f"{norm}.weight"] = torch.zeros(1) if rotated else torch.ones(192)
    if rotated:
        state[f"{DOWN}.had_K"] = state[f"{OUT}.had_K"] = hadamard12().float()
    state["model.embed_tokens.weight"] = torch.ones(5, 192).half()
    state["lm_head.weight"] = state["lm_head.module.weight"] = torch.ones(5, 192).half()
    return {"w_quantizers": quantizers, "model": state}, meant


def sorted_file(tmp_path, saved, **config):
    torch.save(saved, tmp_path / "q.pt")
    return sort_pickle(read_pickle(tmp_path / "q.pt"), tmp_path / "q.pt", {**CONFIG, **config})


def test_a_pickle_bit_for_bit(tmp_path, quantizer_class):
    saved, meant = simulated(quantizer_class)
    checkpoint = sorted_file(tmp_path, saved)
    assert set(checkpoint.layers) == set(meant)
    for name, (ints, scale) in meant.items():
        plan = checkpoint.reader.plan(checkpoint.layers[name])
        assert plan.format == "int4"
        weight = read(plan).weight
        assert torch.equal(weight.dequantize(), ints.float() * scale.float())
        assert torch.equal(weight.dequantize(torch.float16), saved["model"][f"{name}.weight"])
    assert checkpoint.rotation.residual
    assert checkpoint.reader.plan(checkpoint.layers[DOWN]).online.matrix.tolist() == hadamard12().tolist()
    assert checkpoint.reader.plan(checkpoint.layers[OUT]).online.inner == 16
    assert sorted(checkpoint.others) == ["lm_head.weight", "model.embed_tokens.weight"]


def test_a_pickle_of_a_model_that_was_not_rotated(tmp_path, quantizer_class):
    checkpoint = sorted_file(tmp_path, simulated(quantizer_class, rotated=False)[0])
    assert not checkpoint.rotation.residual
    assert not checkpoint.rotation.online
    assert checkpoint.reader.plan(checkpoint.layers[DOWN]).online is None
    assert "model.norm.weight" in checkpoint.others


def test_quantizers_may_be_dictionaries(tmp_path, quantizer_class):
    saved, meant = simulated(quantizer_class)
    saved["w_quantizers"] = {name: {"scale": q.scale, "bits": 4, "sym": True}
                             for name, q in saved["w_quantizers"].items()}  # fmt: skip
    checkpoint = sorted_file(tmp_path, saved)
    weight = read(checkpoint.reader.plan(checkpoint.layers[DOWN])).weight
    assert torch.equal(weight.dequantize(), meant[DOWN][0].float() * meant[DOWN][1].float())


def test_zero_points(tmp_path, quantizer_class):
    saved, _ = simulated(quantizer_class)
    codes, scale = integers((192, 192), 3) + 8, scales(192, 9)
    zero = torch.arange(192).view(-1, 1) % 16
    saved["model"][f"{QUERY}.weight"] = ((codes - zero).float() * scale.float()).half()
    del saved["model"][f"{QUERY}.module.weight"]
    saved["w_quantizers"][f"{QUERY}.module"] = quantizer_class(scale, sym=False, zero=zero.half())
    checkpoint = sorted_file(tmp_path, saved)
    plan = checkpoint.reader.plan(checkpoint.layers[QUERY])
    assert plan.options == {"group_size": 64, "symmetric": False}
    assert torch.equal(read(plan).weight.dequantize(), (codes - zero).float() * scale.float())


def test_scales_of_more_digits_leave_the_weight_as_it_is(tmp_path, quantizer_class):
    saved, meant = simulated(quantizer_class)
    scale = meant[QUERY][1].float() * (1 + 2.0**-12)
    weight = (meant[QUERY][0].float() * scale).half()
    saved["model"][f"{QUERY}.weight"] = saved["model"][f"{QUERY}.module.weight"] = weight
    saved["w_quantizers"][f"{QUERY}.module"] = quantizer_class(scale)
    checkpoint = sorted_file(tmp_path, saved)
    plan = checkpoint.reader.plan(checkpoint.layers[QUERY])
    assert plan.format == ""
    assert "no float16 numbers" in plan.why_dense
    assert torch.equal(read(plan).weight, weight)
    codes, _ = recovered("q", weight, scale)
    assert torch.equal(codes.int() - 8, meant[QUERY][0].int())


@pytest.mark.parametrize("bits", [8, None])
def test_a_layer_of_other_bits_is_dense(tmp_path, quantizer_class, bits):
    saved, _ = simulated(quantizer_class)
    saved["w_quantizers"].pop(f"{DOWN}.module")
    if bits:
        saved["w_quantizers"][f"{DOWN}.module"] = quantizer_class(scales(192), bits=bits)
    checkpoint = sorted_file(tmp_path, saved)
    plan = checkpoint.reader.plan(checkpoint.layers[DOWN])
    assert plan.why_dense == ("it has 8 bits" if bits else "it is not quantized")
    assert plan.online is not None
    assert torch.equal(read(plan).weight, saved["model"][f"{DOWN}.weight"])


@pytest.mark.parametrize("change", [
    {"w_quantizers": None}, {"model": None}, {"model": [1]}, {f"{LAYER}.mlp.up_proj.weight": "gone"},
])  # fmt: skip
def test_a_pickle_without_its_parts_is_refused(tmp_path, quantizer_class, change):
    saved, _ = simulated(quantizer_class)
    if "gone" in change.values():
        for name in (f"{LAYER}.mlp.up_proj.weight", f"{LAYER}.mlp.up_proj.module.weight"):
            del saved["model"][name]
    else:
        saved.update(change)
    with pytest.raises(ValueError, match=r"q.pt holds no|up_proj.weight is missing in"):
        sorted_file(tmp_path, saved)


def planned(tmp_path, saved, name=QUERY):
    checkpoint = sorted_file(tmp_path, saved)
    return checkpoint.reader.plan(checkpoint.layers[name])


@pytest.mark.parametrize(("change", "message"), [
    (lambda w: w.index_put((torch.tensor(5), torch.tensor(7)), torch.tensor(0.0031).half()),
     r"q_proj: weight holds 1 numbers .* at row 5, column 7: .*--w_groupsize"),
    (lambda w: w * 1.1, r"q_proj: weight holds \d+ numbers"),
    (lambda w: w * torch.nan, r"q_proj: weight holds 36864 numbers"),
    (lambda w: w * 2, r"q_proj: weight holds \d+ numbers"),  # integers beyond 7
    (lambda w: w[:, :-1], r"q_proj.weight in .* has shape \[192, 191\]"),
])  # fmt: skip
def test_weights_that_the_scale_does_not_explain_are_refused(tmp_path, quantizer_class, change, message):
    saved, _ = simulated(quantizer_class)
    weight = change(saved["model"][f"{QUERY}.weight"])
    saved["model"][f"{QUERY}.weight"] = saved["model"][f"{QUERY}.module.weight"] = weight
    with pytest.raises(ValueError, match=message):
        planned(tmp_path, saved)


@pytest.mark.parametrize(("scale", "message"), [
    (torch.zeros(192, 1).half(), r"q_proj: scale holds 192 values"),
    (torch.full((192, 1), torch.nan).half(), r"q_proj: scale holds 192 values"),
    (-torch.ones(192, 1).half(), r"q_proj: scale holds 192 values"),
    (torch.ones(96, 1).half(), r"q_proj scale in .* has shape \[96, 1\]"),
])  # fmt: skip
def test_scales_that_no_quantizer_has_are_refused(tmp_path, quantizer_class, scale, message):
    saved, _ = simulated(quantizer_class)
    saved["w_quantizers"][f"{QUERY}.module"] = quantizer_class(scale)
    with pytest.raises(ValueError, match=message):
        planned(tmp_path, saved)


def test_zero_points_beyond_the_codes_are_refused(tmp_path, quantizer_class):
    saved, _ = simulated(quantizer_class)
    for zero in (16.0, -1.0, 0.5, torch.nan):
        zeros = torch.full((192, 1), zero)
        saved["w_quantizers"][f"{QUERY}.module"] = quantizer_class(scales(192), sym=False, zero=zeros)
        with pytest.raises(ValueError, match=r"q_proj: zero holds numbers other than the integers 0 to 15"):
            planned(tmp_path, saved)


def test_a_quantizer_without_a_scale_is_refused(tmp_path, quantizer_class):
    saved, _ = simulated(quantizer_class)
    for odd in ({"bits": 4}, {"scale": scales(192), "bits": "4"}, 3):
        saved["w_quantizers"][f"{QUERY}.module"] = odd
        with pytest.raises(ValueError, match=r"q_proj: its quantizer in .*q.pt"):
            planned(tmp_path, saved)


def test_two_copies_that_differ_are_refused(tmp_path, quantizer_class):
    saved, _ = simulated(quantizer_class)
    saved["model"][f"{QUERY}.module.weight"] = saved["model"][f"{QUERY}.weight"].clone()
    sorted_file(tmp_path, saved)
    saved["model"][f"{QUERY}.module.weight"][3, 4] = 1
    with pytest.raises(ValueError, match=r"q_proj.weight in .* are one module's and differ"):
        sorted_file(tmp_path, saved)


def test_a_missing_online_matrix_is_refused(tmp_path, quantizer_class):
    saved, _ = simulated(quantizer_class)
    del saved["model"][f"{DOWN}.had_K"]
    with pytest.raises(ValueError, match=r"down_proj: had_rem_dim is missing: 96 is no power of two"):
        planned(tmp_path, saved, DOWN)


def test_norms_of_two_kinds_are_refused(tmp_path, quantizer_class):
    saved, _ = simulated(quantizer_class)
    saved["model"]["model.norm.weight"] = torch.ones(192)
    with pytest.raises(ValueError, match=r"norms have the shapes \[1\], \[192\]"):
        sorted_file(tmp_path, saved)


def test_rows_are_recovered_in_parts(monkeypatch):
    monkeypatch.setattr("hf_mlspec.checkpoints.quarot_pickle._ELEMENTS", 100)
    ints, scale = integers((7, 64)), scales(7)
    weight = (ints * scale.float()).half()
    codes, _ = recovered("q", weight, scale)
    assert torch.equal(codes.int() - 8, ints.int())
    weight[6, 3] = 77
    with pytest.raises(ValueError, match=r"at row 6, column 3"):
        recovered("q", weight, scale)
    assert HeldTensor("a", weight).shape == (7, 64)
