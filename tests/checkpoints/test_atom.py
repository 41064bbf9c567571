"""Are Atom's integers and orders recovered from weights that it has multiplied out?"""


import pytest
import torch

from hf_mlspec.checkpoints.atom import AtomReader, read_orders, sort_state
from hf_mlspec.checkpoints.grids import recover_grid
from hf_mlspec.checkpoints.layer import HeldTensor, StoredLayer

CONFIG = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2,
          "num_key_value_heads": 1}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256), "mlp.gate_proj": (384, 256), "mlp.up_proj": (384, 256),
    "mlp.down_proj": (256, 384),
}  # fmt: skip
LAYER = "model.layers.0"


def permutation(count, seed=0):
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def quantized(weight, grid, half_scales):
    """(float16 values, 4-bit integers, 8-bit integers), group by group, two rows sharing a group's step."""
    rows, inputs = weight.shape
    values = torch.zeros(rows, inputs, dtype=torch.float16)
    fours, eights = torch.zeros(rows, inputs - 128), torch.zeros(rows, 128)
    for row in range(0, rows, 2):
        for first in range(0, inputs - 128, 128):
            part = weight[row : row + 2, first : first + 128]
            amax = part.abs().max()
            step = 2 * 0.85 * amax / 15 if grid == "gptq" else 0.85 * amax / 7
            step = step.half().float() if half_scales else step
            codes = (part / step).round().clamp(-8, 7)
            fours[row : row + 2, first : first + 128] = codes
            values[row : row + 2, first : first + 128] = (codes * step).half()
    for row in range(rows):
        step = weight[row, -128:].abs().max() / 127
        step = step.half().float() if half_scales else step
        eights[row] = (weight[row, -128:] / step).round().clamp(-127, 127)
        values[row, -128:] = (eights[row] * step).half()
    return values, fours, eights


def layer_of(weight, order=None, row_order=None):
    order = torch.arange(weight.shape[1]) if order is None else order
    tensors = {"weight": HeldTensor("q.weight in f", weight), "input_order": HeldTensor("q.input in f", order)}
    if row_order is not None:
        tensors["row_order"] = HeldTensor("down.input in f", row_order)
    return StoredLayer("q", weight.shape[1], weight.shape[0], tensors)


def read(plan):
    return plan.read({name: tensor.load() for name, tensor in plan.tensors.items()})


@pytest.mark.parametrize("half_scales", [True, False])
@pytest.mark.parametrize("grid", ["gptq", "rtn"])
def test_integers_are_recovered_on_both_grids(grid, half_scales):
    values, fours, eights = quantized(randn(16, 512, seed=3), grid, half_scales)
    layer = AtomReader().layer_of(layer_of(values))
    assert torch.equal(layer.codes4, fours.to(torch.int8))
    assert torch.equal(layer.codes8, eights.to(torch.int8))
    assert torch.equal(layer.dequantize(), values)
    assert (layer.scale4.shape, layer.scale8.shape) == ((16, 3), (16,))
    if half_scales:
        assert torch.equal(layer.scale4, layer.scale4.half().float())


@pytest.mark.parametrize("rows_too", [True, False])
def test_the_models_own_order_bit_for_bit(rows_too):
    own, order = randn(8, 384, seed=5), permutation(384)
    row_order = permutation(8, seed=1) if rows_too else None
    moved = torch.zeros_like(own)
    for row in range(8):
        for column in range(384):
            moved[row, column] = own[row_order[row] if rows_too else row, order[column]]
    values, *_ = quantized(moved, "rtn", True)
    expected = torch.zeros_like(values)
    for row in range(8):
        for column in range(384):
            expected[row_order[row] if rows_too else row, order[column]] = values[row, column]
    stored = layer_of(values, order, row_order)
    plan = AtomReader().plan(stored)
    assert AtomReader().holds(stored)
    assert (plan.format, plan.ordered, plan.read_as) == ("", False, "dense")
    assert "outliers have codes to 127" in plan.why_dense
    assert torch.equal(read(plan).weight, expected)
    layer = AtomReader().layer_of(stored)
    assert torch.equal(layer.dequantize(), expected)
    assert torch.equal(layer.order, order)
    assert (layer.row_order is not None) == rows_too


def test_groups_of_few_values():
    values = torch.zeros(2, 256, dtype=torch.float16)
    values[0, :3] = torch.tensor([0.3, -0.3, 0.0]).half()
    layer = AtomReader().layer_of(layer_of(values))
    assert torch.equal(layer.dequantize(), values)
    assert layer.scale4[1].item() == 1
    assert not layer.codes8.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("top", range(1, 9))
def test_a_grid_of_any_largest_integer(dtype, top):
    codes = torch.arange(-top, min(top, 7) + 1).float().repeat(5, 1)
    steps = torch.tensor([0.01, 0.33, 1e-3, 2.5, 0.0771]).unsqueeze(-1)
    values = (codes * steps).to(dtype)
    grid = recover_grid(values, -8, 7, (8, 7, 6, 5, 4, 3, 2, 1))
    assert grid.fits.all()
    assert torch.equal((grid.codes.double() * grid.step.double().unsqueeze(-1)).to(dtype), values)


@pytest.mark.parametrize(("change", "message"), [
    (lambda w: w[3, 128:256].copy_(torch.linspace(-1, 1, 128)),
     r"q: row 3, group 1 of weight holds 128 different values, 4 bits have at most 16 \(1 of 16 groups\)"),
    (lambda w: w[3, 0].fill_(0.00123), r"q: row 3, group 0 of weight holds \d+ different values, "),
    (lambda w: w[2, -1].copy_(w[2, -128:].abs().max() * 1.003), r"q: row 2, the last 128 columns of weight holds \d+"),
    (lambda w: w[1, 5].fill_(torch.nan), r"q: weight holds 1 values that are NaN or Inf"),
])  # fmt: skip
def test_values_that_are_no_integers_are_refused(change, message):
    values, *_ = quantized(randn(8, 384), "gptq", True)
    change(values)
    plan = AtomReader().plan(layer_of(values))
    with pytest.raises(ValueError, match=message):
        read(plan)
    with pytest.raises(ValueError, match=message):
        AtomReader().layer_of(layer_of(values))


def test_too_few_values_off_the_grid_are_told_so():
    values = torch.zeros(1, 256, dtype=torch.float16)
    values[0, :3] = torch.tensor([1.0, 0.77, 0.31]).half()
    with pytest.raises(ValueError, match=r"holds 4 different values, and they are no integers of 4 bits times one"):
        AtomReader().layer_of(layer_of(values))


@pytest.mark.parametrize(("layer", "error", "message"), [
    (layer_of(torch.ones(4, 256, dtype=torch.int8)), TypeError, r"q.weight in f is torch.int8"),
    (layer_of(torch.ones(4, 200)), ValueError, r"q: 200 inputs are no groups of 128"),
    (layer_of(torch.ones(4, 128)), ValueError, r"q: 128 inputs are no groups of 128 beside"),
    (layer_of(torch.ones(4, 256), torch.zeros(256, dtype=torch.int64)), ValueError, r"q.input in f is no permutation"),
    (layer_of(torch.ones(4, 256), torch.arange(255)), ValueError, r"q.input in f has shape \[255\]"),
    (layer_of(torch.ones(4, 256), torch.arange(256).float()), TypeError, r"q.input in f is torch.float32"),
    (layer_of(torch.ones(4, 256), None, torch.tensor([0, 1, 1, 3])), ValueError, r"down.input in f is no permu"),
    (StoredLayer("q", 256, 4, {"weight": HeldTensor("w", torch.ones(4, 256))}), ValueError,
     r"q: input_order is missing"),
])  # fmt: skip
def test_a_layer_of_another_kind_is_refused(layer, error, message):
    with pytest.raises(error, match=message):
        AtomReader().plan(layer)


def index_file():
    orders = {}
    for linear, (out_features, in_features) in SHAPES.items():
        orders[f"layers.0.{linear}.input"] = permutation(in_features)
        orders[f"layers.0.{linear}.output"] = permutation(out_features).to(torch.int16)
    for linear in ("q", "k", "v"):
        orders[f"layers.0.self_attn.{linear}_proj.input"] = permutation(256, seed=1)
    for linear in ("gate", "up"):
        orders[f"layers.0.mlp.{linear}_proj.input"] = permutation(256, seed=2).to(torch.int16)
    return orders


def orders_of(tmp_path, orders):
    torch.save(orders, tmp_path / "llama_reorder_index_wikitext2.pt")
    return read_orders(tmp_path / "llama_reorder_index_wikitext2.pt", CONFIG)


def test_the_file_of_orders(tmp_path):
    saved = index_file()
    orders = orders_of(tmp_path, saved)
    assert set(orders) == set(saved)
    assert all(orders[key].dtype == torch.int64 for key in saved)
    assert all(orders[key].load().tolist() == order.tolist() for key, order in saved.items())


def test_a_state_dict_and_its_orders(tmp_path):
    saved = index_file()
    state, expected = {f"{LAYER}.input_layernorm.weight": torch.ones(256)}, {}
    for linear, shape in SHAPES.items():
        values, *_ = quantized(randn(*shape, seed=len(linear)), "gptq", False)
        state[f"{LAYER}.{linear}.weight"] = values
        own = torch.zeros_like(values)
        own[:, saved[f"layers.0.{linear}.input"].long()] = values
        if linear in ("mlp.gate_proj", "mlp.up_proj"):
            own[saved["layers.0.mlp.down_proj.input"]] = own.clone()
        expected[f"{LAYER}.{linear}"] = own
    held = {name: HeldTensor(f"{name} in f", tensor) for name, tensor in state.items()}
    layers, rest = sort_state(held, orders_of(tmp_path, saved), CONFIG)
    assert list(rest) == [f"{LAYER}.input_layernorm.weight"]
    assert set(layers) == set(expected)
    for name, layer in layers.items():
        assert torch.equal(read(AtomReader().plan(layer)).weight, expected[name])
    del held[f"{LAYER}.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.up_proj.weight is missing"):
        sort_state(held, orders_of(tmp_path, saved), CONFIG)


KEY = "layers.0.self_attn.o_proj.input"


@pytest.mark.parametrize(("change", "message"), [
    ({KEY: torch.zeros(256, dtype=torch.int64)}, rf"{KEY} in .* is no permutation of 256 inputs: 256 entries"),
    ({KEY: torch.arange(256) - 1}, rf"{KEY} in .* is no permutation"),
    ({KEY: torch.arange(255)}, rf"{KEY} in .* has shape \[255\], expected \[256\]"),
    ({KEY: torch.arange(256).float()}, rf"{KEY} in .* is torch.float32, expected torch.int64 or torch.int16"),
    ({KEY: [1, 2]}, rf"{KEY} in .* is list, expected"),
    ({KEY: None}, rf"{KEY} is missing in"),
    ({"layers.0.self_attn.o_proj.output": torch.zeros(256, dtype=torch.int16)}, r"o_proj.output in .* is no permut"),
    ({"layers.1.self_attn.o_proj.input": torch.arange(256)}, r"'layers.1.* is no linear of a Llama with 1 layers"),
    ({"layers.0.block_sparse_moe.gate.input": torch.arange(256)}, r"'layers.0.block_sparse_moe.gate.input' is no"),
    ({3: torch.arange(256)}, r": 3 is no linear"),
    ({"layers.0.self_attn.q_proj.input": torch.arange(256)}, r"k_proj.input and .*q_proj.input in .* differ"),
    ({"layers.0.mlp.up_proj.input": torch.arange(256)}, r"gate_proj.input and .*up_proj.input in .* differ"),
])  # fmt: skip
def test_orders_that_are_none_are_refused_by_name(tmp_path, change, message):
    orders = {key: order for key, order in {**index_file(), **change}.items() if order is not None}
    with pytest.raises(ValueError, match=message):
        orders_of(tmp_path, orders)


def test_a_file_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds a list, a dictionary of orders was expected"):
        orders_of(tmp_path, [torch.arange(3)])
