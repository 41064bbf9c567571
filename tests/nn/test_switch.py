"""Does one assignment, or one `with` block of one thread, change the precision of all packed layers of a model?"""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

import hf_mlspec
from hf_mlspec import direct_cast, early_exit, precision_switch
from hf_mlspec.nn.linear import Int4Linear, Mxfp4Linear
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.precision import Precision

pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    switch = PrecisionSwitch("int4")
    linears = [nn.Linear(64, 64).requires_grad_(False) for _ in range(2)]
    return nn.Sequential(*(Int4Linear.from_linear(linear, switch=switch, group_size=32) for linear in linears))


def test_one_assignment_changes_every_layer(model, x):
    wide = model(x)
    precision_switch(model).activation_bits = 4
    assert [layer.activation_bits for layer in model] == [4, 4]
    narrow = model(x)
    expected = x
    for layer in model:
        own = Int4Linear(layer.packed_weight(), layer.bias, PrecisionSwitch("int4", 4))
        expected = own(expected)
    assert torch.equal(narrow, expected)
    assert not torch.equal(narrow, wide)


@pytest.mark.parametrize("word", ["w4a8", Precision("w", 4, 8), 8])
def test_a_block_overrides_and_gives_back(model, x, word):
    switch = precision_switch(model)
    wide = model(x)
    with switch.at(word) as same:
        assert same is switch
        assert (switch.activation_bits, str(switch.precision), switch.default_activation_bits) == (8, "w4a8", 16)
        eight = model(x)
        with switch.at("w4a4"):
            four = model(x)
        assert torch.equal(model(x), eight)
        switch.activation_bits = 4  # the default: it shows behind the block
        assert switch.activation_bits == 8
    assert switch.activation_bits == 4
    assert torch.equal(model(x), four)
    switch.activation_bits = 16
    assert torch.equal(model(x), wide)
    assert not torch.equal(wide, eight)
    assert not torch.equal(eight, four)


def test_an_error_inside_a_block_gives_back_too(model):
    switch = precision_switch(model)
    with pytest.raises(KeyError), switch.at("w4a4"):
        raise KeyError
    assert switch.activation_bits == 16


def test_an_override_is_its_threads_own(model, x):
    switch, seen = precision_switch(model), {}
    entered, leave = threading.Event(), threading.Event()

    def draft() -> None:
        with switch.at("w4a4"):
            entered.set()
            leave.wait(10)
            seen["draft"] = switch.activation_bits, model(x)

    wide = model(x)
    thread = threading.Thread(target=draft)
    thread.start()
    assert entered.wait(10)
    assert switch.activation_bits == 16
    assert torch.equal(model(x), wide)
    leave.set()
    thread.join()
    with switch.at(4):
        assert (seen["draft"][0], True) == (4, torch.equal(seen["draft"][1], model(x)))


def test_copies_share_a_switch_of_their_own(model):
    switch = precision_switch(model)
    switch.activation_bits = 8
    switch.multiply = "dequant"
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with switch.at("w4a4"):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for twin in copies:
        own = precision_switch(twin)
        assert own is not switch
        assert (own.weights, own.activation_bits, own.multiply) == ("int4", 8, "dequant")
        own.activation_bits = 16
    assert switch.activation_bits == 8


def test_a_cast_has_one_switch_and_views_have_their_own(tiny_model, ids):
    cast = direct_cast(tiny_model("llama"), activation_bits=16)
    switch = precision_switch(cast)
    assert {id(m.switch) for m in cast.modules() if isinstance(m, Mxfp4Linear)} == {id(switch)}
    assert (switch.weights, str(switch.precision)) == ("mxfp4", "mxfp4")
    view = early_exit(cast, 2)
    before = view(ids).logits
    with switch.at("mxfp4a8"):
        assert precision_switch(view).activation_bits == 16
        assert torch.equal(view(ids).logits, before)
    assert view.model.layers[0].mlp.up_proj.weight_packed is cast.model.layers[0].mlp.up_proj.weight_packed


def test_models_without_one_switch_are_refused(model, tiny_model):
    assert hf_mlspec.precision_switch is precision_switch
    with pytest.raises(ValueError, match="LlamaForCausalLM holds no packed layer: load it with"):
        precision_switch(tiny_model("llama"))
    model[0].switch = PrecisionSwitch("int4", 8)
    with pytest.raises(ValueError, match=r"with 2 switches \(\[PrecisionSwitch\('int4', activation_bits=8, multiply"):
        precision_switch(model)


@pytest.mark.parametrize(
    ("weights", "precision", "message"),
    [
        ("int4", "mxfp4", r"precision mxfp4: this model's weights are int4, choose one of w4a16, w4a8, w4a4"),
        ("int4", "w8a8", r"precision w8a8: this model's weights are int4"),
        ("int4", "planes4", r"precision planes4: this model's weights are int4"),
        ("mxfp4", "w4a8", r"precision w4a8: this model's weights are mxfp4, choose one of mxfp4, mxfp4a8"),
        ("mxfp4", "mxfp4a4", r"activation_bits is 4: choose 16 \(bfloat16\) or 8 \(int8\) for mxfp4 weights"),
        ("int4", 7, r"activation_bits is 7: choose 16 \(bfloat16\) or 8 \(int8\) or 4 \(int4\) for int4 weights"),
        ("int4", "fp4", r"unknown precision 'fp4'"),
        ("int4", 8.0, r"activation_bits is 8\.0"),
        ("int4", True, r"activation_bits is True"),
        ("int4", None, r"activation_bits is None"),
    ],
)
def test_other_precisions_are_refused_before_the_block(weights, precision, message):
    switch = PrecisionSwitch(weights)
    with pytest.raises(ValueError, match=message):
        switch.at(precision)
    if not isinstance(precision, str):
        with pytest.raises(ValueError, match=message):
            switch.activation_bits = precision
    assert switch.activation_bits == 16


def test_other_settings_are_refused(model):
    with pytest.raises(ValueError, match="weights is 'w4', choose one of mxfp4, int4"):
        PrecisionSwitch("w4")
    with pytest.raises(ValueError, match="multiply is 'slow', choose one of fused, dequant"):
        PrecisionSwitch("int4").multiply = "slow"
    with pytest.raises(ValueError, match="multiply 'dequant' is for int4 weights, these are mxfp4"):
        PrecisionSwitch("mxfp4").multiply = "dequant"
    weight = model[0].packed_weight()
    with pytest.raises(ValueError, match="weight: the weight is int4, its switch is for mxfp4 weights"):
        Int4Linear(weight, switch=PrecisionSwitch("mxfp4"))
    with pytest.raises(TypeError, match="weight: switch is a int, expected a PrecisionSwitch"):
        Int4Linear(weight, switch=8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_follow_the_switch_of_their_thread(model, x):
    switch = precision_switch(model)
    expected = {}
    for bits in switch.choices:
        with switch.at(bits):
            expected[bits] = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for bits in (16, 4, 8, 16):
        with switch.at(bits):
            assert torch.equal(compiled(x), expected[bits])
    results = []

    def draft() -> None:
        with switch.at("w4a4"):
            results.append(compiled(x))

    thread = threading.Thread(target=draft)
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected[4])
    assert torch.equal(compiled(x), expected[16])
