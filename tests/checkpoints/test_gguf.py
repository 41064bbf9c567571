"""Has every weight that is made of a GGUF file the values that the `gguf` package reads from it?"""

import numpy as np
import pytest
import torch

from hf_mlspec.checkpoints import gguf as reading
from hf_mlspec.checkpoints.gguf import GgufReader, dense, stored_layer
from hf_mlspec.checkpoints.gguf_file import open_gguf
from hf_mlspec.checkpoints.layer import StoredLayer
from hf_mlspec.formats import FORMATS, Int4Weight, Mxfp4Weight, PlanesWeight
from tests.gguf_files import SCALES, gguf, random_blocks, values_of, write

ROWS, COLS = 48, 512
PACKED = {  # type and scales -> format, its options, bits of a weight on disk
    ("Q4_0", "any"): ("int4", {"group_size": 32, "symmetric": False}, 4.5),
    ("Q4_0", "positive"): ("int4", {"group_size": 32, "symmetric": True}, 4.5),
    ("Q4_0", "not negative"): ("int4", {"group_size": 32, "symmetric": True}, 4.5),
    ("Q5_0", "any"): ("planes", {"num_planes": 6, "group_size": 32}, 5.5),
    ("Q5_0", "positive"): ("planes", {"num_planes": 6, "group_size": 32}, 5.5),
    ("Q8_0", "positive"): ("planes", {"num_planes": 8, "group_size": 32}, 8.5),
    ("Q8_0", "not negative"): ("planes", {"num_planes": 8, "group_size": 32}, 8.5),
    ("MXFP4", "any"): ("mxfp4", {}, 4.25),
}
WHOLE = {"Q4_1": ("int4", {"group_size": 32, "symmetric": False}, 5.0)}  # where minima are whole zero points
DENSE = [("Q4_1", "any"), ("Q5_1", "any"), ("Q8_0", "any"), ("Q4_K", "any"), ("Q5_K", "any"), ("Q6_K", "any")]


def layer_of(tmp_path, kind: str, raw: np.ndarray) -> StoredLayer:
    file = open_gguf(write(tmp_path / f"{kind}.gguf", {"blk.0.ffn_up.weight": (kind, raw)}))
    return stored_layer("model.layers.0.mlp.up_proj", file.tensors["blk.0.ffn_up.weight"])


def blocks_of(kind: str, scales: str = "any", seed: int = 0) -> np.ndarray:
    return random_blocks(kind, ROWS, COLS // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0], seed, scales)


@pytest.fixture(params=[None, 700], ids=["one chunk", "chunks"])
def chunked(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(reading, "_CHUNK", request.param)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("order", [False, True], ids=["as stored", "other order"])
@pytest.mark.parametrize(("kind", "scales"), PACKED, ids=str)
def test_a_packed_layer_has_the_files_values(tmp_path, kind, scales, order):
    raw = blocks_of(kind, scales)
    layer = layer_of(tmp_path, kind, raw)
    rows = torch.randperm(ROWS) if order else None
    reader = GgufReader({layer.name: rows} if order else {})
    assert reader.holds(layer)
    plan = reader.plan(layer)
    assert (plan.format, plan.options, plan.bits_per_weight) == PACKED[kind, scales]
    assert plan.why_dense == ""
    assert not plan.ordered
    assert kind in plan.stored_as
    read = plan.read({name: tensor.load() for name, tensor in plan.tensors.items()})
    weight = read.weight
    assert read.order is None
    assert isinstance(weight, {"int4": Int4Weight, "mxfp4": Mxfp4Weight, "planes": PlanesWeight}[plan.format])
    assert weight.name == layer.name
    weight.validate(ROWS, COLS)
    empty = FORMATS[plan.format].zeros((ROWS, COLS), torch.device("cpu"), **plan.options)
    what = [[None if part is None else (part.dtype, part.shape) for part in parts] for parts in (weight.parts, empty)]
    assert what[0] == what[1]  # what a checkpoint of these options holds
    expected = values_of(raw, kind)
    assert torch.equal(weight.dequantize(torch.float32), expected[rows] if order else expected)


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize(("kind", "scales"), DENSE, ids=str)
def test_a_dense_layer_has_the_files_values(tmp_path, kind, scales):
    raw = blocks_of(kind, scales)
    layer, rows = layer_of(tmp_path, kind, raw), torch.randperm(ROWS)
    plan = GgufReader({layer.name: rows}).plan(layer)
    assert (plan.format, plan.read_as) == ("", "dense")
    assert kind in plan.why_dense
    weight = plan.read({"weight": layer.tensors["weight"].load()}).weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight.view(torch.int32), values_of(raw, kind)[rows].view(torch.int32))


@pytest.mark.parametrize("kind", [*SCALES, "MXFP4"])
def test_any_tensor_can_be_read_dense(tmp_path, kind):
    raw = blocks_of(kind)
    tensor, expected = layer_of(tmp_path, kind, raw).tensors["weight"], values_of(raw, kind)
    assert torch.equal(dense(tensor), expected)
    assert torch.equal(dense(tensor, torch.bfloat16), expected.bfloat16())
    rows = torch.randperm(ROWS)
    assert torch.equal(dense(tensor, torch.float16, rows), expected[rows].half())


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_0", "MXFP4"])
def test_what_the_gguf_package_quantizes(tmp_path, kind):
    """Weights as a model has them: half of the scales of Q4_0 and Q5_0 are negative."""
    torch.manual_seed(3)
    dense_weight = torch.randn(ROWS, COLS) * 0.02
    dense_weight[5] = 0
    raw = gguf.quants.quantize(dense_weight.numpy(), gguf.GGMLQuantizationType[kind])
    layer = layer_of(tmp_path, kind, raw)
    plan = GgufReader().plan(layer)
    weight = plan.read({"weight": layer.tensors["weight"].load()}).weight.validate(ROWS, COLS)
    assert torch.equal(weight.dequantize(torch.float32), values_of(raw, kind))
    assert plan.options.get("symmetric", False) is False
    assert (weight.dequantize(torch.float32) - dense_weight).norm() < 0.2 * dense_weight.norm()


def whole_minima() -> np.ndarray:
    """Random blocks of Q4_1, m = -z * d for every z; d has few bits, so that float16 holds the product. Some are 0."""
    raw = blocks_of("Q4_1", "positive")
    rng, count = np.random.default_rng(5), ROWS * COLS // 32
    d = (rng.integers(1, 128, count) * 2.0 ** rng.integers(-20, -9, count)).astype(np.float16)
    d[::9] = 0
    z = np.arange(len(d)) % 16
    m = (-z * d).astype(np.float16)
    assert (m.astype(np.float64) == -z * d.astype(np.float64)).all()
    raw.reshape(-1, 20)[:, :4] = np.stack((d, m), axis=1).view(np.uint8)
    return raw


@pytest.mark.usefixtures("chunked")
def test_q4_1_with_whole_zero_points_is_packed(tmp_path):
    raw, rows = whole_minima(), torch.randperm(ROWS)
    layer = layer_of(tmp_path, "Q4_1", raw)
    plan = GgufReader({layer.name: rows}).plan(layer)
    assert (plan.format, plan.options, plan.bits_per_weight) == WHOLE["Q4_1"]
    weight = plan.read({"weight": layer.tensors["weight"].load()}).weight.validate(ROWS, COLS)
    assert torch.equal(weight.dequantize(torch.float32), values_of(raw, "Q4_1")[rows])
    assert set(weight.weight_zero.flatten().tolist()) == {*range(16)}


@pytest.mark.parametrize(("d", "m"), [(0.5, -0.4998), (0.5, 0.5), (0.5, -8.0), (-0.5, 2.0), (0.0, 0.1), (0.1, -0.3)])
def test_one_other_minimum_makes_q4_1_dense(tmp_path, d, m):
    """-0.3 is not the float16 nearest to three times the one nearest to .1."""
    raw = whole_minima()
    raw[7, 40:44] = np.array([d, m], dtype=np.float16).view(np.uint8)
    layer = layer_of(tmp_path, "Q4_1", raw)
    plan = GgufReader().plan(layer)
    assert (plan.format, "no whole zero points" in plan.why_dense) == ("", True)
    weight = plan.read({"weight": layer.tensors["weight"].load()}).weight
    assert torch.equal(weight.view(torch.int32), values_of(raw, "Q4_1").view(torch.int32))


def test_every_code_of_q4_0_with_either_sign(tmp_path):
    """By hand: codes 0 to 15 and again, d = 2 and d = -2."""
    nibbles = np.array([code << 4 | code for code in range(16)], dtype=np.uint8)
    raw = np.stack([np.concatenate((np.array([d], dtype=np.float16).view(np.uint8), nibbles)) for d in (2, -2)])
    layer = layer_of(tmp_path, "Q4_0", raw)
    weight = GgufReader().plan(layer).read({"weight": layer.tensors["weight"].load()}).weight
    steps = (torch.arange(16.0) - 8).repeat(2)
    assert torch.equal(weight.dequantize(torch.float32), torch.stack((2 * steps, -2 * steps)))
    assert weight.weight_zero.tolist() == [[8], [7]]
    assert weight.weight_scale.tolist() == [[2], [2]]


@pytest.mark.parametrize(("kind", "place", "number"), [
    ("Q4_0", 0, np.nan), ("Q4_0", 0, np.inf), ("Q8_0", 0, -np.inf), ("Q5_0", 0, np.nan), ("Q4_1", 2, np.inf),
    ("Q6_K", 208, np.nan), ("MXFP4", 0, 255)])  # fmt: skip
def test_a_scale_that_is_no_number_is_refused(tmp_path, kind, place, number):
    raw = blocks_of(kind)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    stored = np.array([number], dtype=np.uint8 if kind == "MXFP4" else np.float16).view(np.uint8)
    raw[7, size + place : size + place + len(stored)] = stored
    layer = layer_of(tmp_path, kind, raw)
    expected = r"blk\.0\.ffn_up\.weight in .* is damaged: the scale of row 7, block 1 is NaN or Inf; download"
    with pytest.raises(ValueError, match=expected):
        GgufReader().plan(layer)
    with pytest.raises(ValueError, match=expected):
        dense(layer.tensors["weight"])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "TQ2_0", "NVFP4", "Q8_K"])
def test_other_types_are_refused_by_name(tmp_path, kind):
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    layer = layer_of(tmp_path, kind, np.zeros((4, 2 * size), dtype=np.uint8))
    assert GgufReader().holds(layer)
    for read in (lambda: GgufReader().plan(layer), lambda: dense(layer.tensors["weight"])):
        with pytest.raises(ValueError, match=rf"ffn_up\.weight in .* is of ggml's {kind}, which .*llama-quantize"):
            read()


def test_a_layer_of_another_model_is_refused(tmp_path):
    layer = layer_of(tmp_path, "Q4_0", blocks_of("Q4_0"))
    wrong = StoredLayer(layer.name, COLS, ROWS + 1, layer.tensors)
    with pytest.raises(ValueError, match=r"up_proj: .* has shape \[48, 512\], expected \[49, 512\]: the config"):
        GgufReader().plan(wrong)
    with pytest.raises(TypeError, match="up_proj: weight is nothing, expected a tensor of a GGUF file"):
        GgufReader().plan(StoredLayer(layer.name, COLS, ROWS, {}))


def test_floats_are_left_to_others(tmp_path):
    values = torch.randn(4, 6)
    layer = layer_of(tmp_path, "F16", values.numpy())
    assert not GgufReader().holds(layer)
    assert torch.equal(dense(layer.tensors["weight"]), values.half())
    assert torch.equal(dense(layer.tensors["weight"], torch.float32, torch.tensor([3, 1, 0, 2])),
                       values.half().float()[[3, 1, 0, 2]])  # fmt: skip


def test_three_axes_are_no_layer(tmp_path):
    raw = random_blocks("Q4_0", 6, 2)
    file = open_gguf(write(tmp_path / "x.gguf", {"e": ("Q4_0", raw.reshape(2, 3, -1))}))
    assert torch.equal(dense(file.tensors["e"]), values_of(raw, "Q4_0").view(2, 3, 64))
    with pytest.raises(ValueError, match=r"e in .* has shape \[2, 3, 64\], a linear layer's has two axes"):
        stored_layer("e", file.tensors["e"])
