"""Does a weight become nested in its own memory, and does it come back bit for bit from wherever that is cut short?"""

from __future__ import annotations

import copy
import io
import linecache
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_mlspec
from hf_mlspec.nn import nest_in_place
from hf_mlspec.nn.castable import is_nested
from hf_mlspec.nn.nested import NestedEmbedding, NestedLinear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.models import tiny

BF16 = torch.bfloat16
IDS = torch.arange(3, 17).view(2, 7)
pytestmark = pytest.mark.filterwarnings("ignore:no compiled kernel")


def model_of(tied: bool = True, layers: int = 1):
    """Every linear has outputs in whole tiles; one has escapes in two rows of its 256."""
    model = tiny("llama", dtype=BF16, hidden_size=64, head_dim=16, intermediate_size=256, num_hidden_layers=layers,
                 tie_word_embeddings=tied)  # fmt: skip
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[[3, 200], [5, 63]] = 2.0**-60
        model.model.layers[0].mlp.up_proj.weight[7, :4] = torch.tensor([0.0, -0.0, 2.0**-20, -(2.0**-20)])
    return model


def words(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().view(torch.int16).clone() for name, tensor in model.state_dict().items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def small_groups(monkeypatch):
    """One tile at a time."""
    monkeypatch.setattr(nest_in_place, "_LEAST", 1)


@pytest.mark.parametrize("codebook", ["lloyd_max", "fitted"])
@pytest.mark.parametrize("groups", [1, 1 << 12, 1 << 15])
def test_tiles_lie_where_the_weight_was_and_are_those_of_from_linear(monkeypatch, codebook, groups):
    monkeypatch.setattr(nest_in_place, "_LEAST", groups)
    model = model_of()
    before = words(model)
    places = {name: memory(module.weight) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = {
        name: NestedLinear.from_linear(model.get_submodule(name), codebook=codebook).prepack_() for name in places
    }
    hf_mlspec.nest(model, codebook)
    for name, place in places.items():
        layer = model.get_submodule(name)
        assert layer.is_prepacked
        assert place == memory(layer.weight_low) == memory(layer.weight_packed)
        assert layer.weight_low.untyped_storage().nbytes() == 2 * layer.in_features * layer.out_features
        for own, other in zip(layer.parts("weight"), wanted[name].parts("weight"), strict=True):
            assert own is other is None or torch.equal(own, other)
    assert same(words(hf_mlspec.unnest(model)), before)


@pytest.mark.parametrize("stop", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failure_at_any_group_leaves_the_model_as_it_was(monkeypatch, small_groups, stop):
    pack, calls, fail_at = nest_in_place.ops.prepack_nested, [], []

    def failing(*planes):
        calls.append(1)
        if len(calls) in fail_at:
            raise stop
        return pack(*planes)

    monkeypatch.setattr(nest_in_place.ops, "prepack_nested", failing)
    hf_mlspec.nest(model_of())
    total = len(calls)
    assert total == sum(m.out_features // 16 for m in model_of().modules() if isinstance(m, nn.Linear))
    for number in range(1, total + 1):
        fail_at[:] = [number]
        model = model_of()
        before, parameters = words(model), {name: id(p) for name, p in model.named_parameters()}
        calls.clear()
        with pytest.raises(type(stop)):
            hf_mlspec.nest(model)
        assert same(words(model), before)
        assert parameters.keys() == dict(model.named_parameters()).keys()
        assert model.get_input_embeddings().weight is model.lm_head.weight


def test_an_interrupt_at_any_line_leaves_the_model_as_it_was(small_groups):
    """Before each line that runs while a weight is rewritten; but not between a context's end and its exit, where
    Python looks for no signals."""
    functions = {"tiles", "_nest_in_place", "in_tiles", "put_nested", "_put", "_groups", "_outputs"}
    seen, stop_at = [], []

    def trace(frame, event, _):
        if "hf_mlspec" not in frame.f_code.co_filename or frame.f_code.co_name not in functions:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            seen.append(1)
            if len(seen) in stop_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    def nested(model) -> None:
        seen.clear()
        before_trace = sys.gettrace()
        sys.settrace(trace)
        try:
            hf_mlspec.nest(model)
        finally:
            sys.settrace(before_trace)

    nested(model_of())
    total = len(seen)
    assert total > 300
    for number in [*range(1, 100), *range(100, total + 1, 9)]:  # the first are those of the tied head
        stop_at[:] = [number]
        model = model_of()
        before = words(model)
        with pytest.raises(KeyboardInterrupt):
            nested(model)
        assert same(words(model), before)
        assert model.get_input_embeddings().weight is model.lm_head.weight
        assert not any(is_nested(module) or isinstance(module, NestedEmbedding) for module in model.modules())


def _optimizer(model):
    return torch.optim.SGD(model.parameters())


@pytest.mark.parametrize("holder", [
    _optimizer,
    lambda model: hf_mlspec.early_exit(model, 1),
    lambda model: model.state_dict(),
    lambda model: [p.untyped_storage() for p in model.parameters()],
    lambda model: list(model.parameters()),
])  # fmt: skip
def test_who_else_sees_a_weight_keeps_it(holder):
    model = model_of(layers=2)
    before = words(model)
    addresses = {name: (parameter.data_ptr(), parameter.numel()) for name, parameter in model.named_parameters()}
    held = holder(model)
    hf_mlspec.nest(model)
    assert is_nested(model.lm_head)
    layer = model.model.layers[0].mlp.up_proj
    assert memory(layer.weight_low) != memory(layer.weight_packed)
    for tensor in _tensors(held):
        name = next(name for name, (address, _) in addresses.items() if address == tensor.data_ptr())
        assert torch.equal(tensor.reshape(-1), before[name].view(-1))
    assert same(words(hf_mlspec.unnest(model)), before)


def _tensors(held) -> list[torch.Tensor]:
    if isinstance(held, torch.optim.Optimizer):
        held = held.param_groups[0]["params"]
    if isinstance(held, nn.Module):
        held = held.parameters()
    tensors = list(held.values()) if isinstance(held, dict) else list(held)
    if isinstance(tensors[0], torch.UntypedStorage):
        return [torch.empty(0, dtype=torch.int16).set_(storage) for storage in tensors]
    return [tensor.detach().view(torch.int16) for tensor in tensors]


def test_a_backward_pass_under_way_keeps_what_it_saved():
    model, plain = model_of(), model_of()
    plain.load_state_dict(model.state_dict())
    loss = model(IDS, labels=IDS).loss
    plain(IDS, labels=IDS).loss.backward()
    hf_mlspec.nest(model)
    loss.backward()
    assert torch.equal(model.model.norm.weight.grad, plain.model.norm.weight.grad)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_compiled_steps_let_go_of_the_plain_weights(monkeypatch):
    model = hf_mlspec.prepare(model_of(layers=2))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    tokens = model.generate(IDS, **options)
    with monkeypatch.context() as patch:
        patch.setattr(nest_in_place.ops, "unprepack_nested", _counted(nest_in_place.ops.unprepack_nested, calls := []))
        patch.setattr(NestedLinear, "in_tiles", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            hf_mlspec.nest(model)
    assert len(calls) == 1  # the head was written, whole, and brought back
    assert torch.equal(model.generate(IDS, **options), tokens)
    place = memory(model.lm_head.weight)
    hf_mlspec.nest(model)
    assert memory(model.lm_head.weight_low) == memory(model.lm_head.weight_packed) == place
    assert torch.equal(model.generate(IDS, **options), tokens)


def _counted(function, calls: list):
    def counted(*args):
        calls.append(1)
        return function(*args)

    return counted


def _interrupted(*args):
    raise KeyboardInterrupt


def test_parts_of_one_memory_are_left_alone():
    model = model_of()
    attention = model.model.layers[0].self_attn
    joined = torch.cat([attention.k_proj.weight.detach(), attention.v_proj.weight.detach()])
    attention.k_proj.weight, attention.v_proj.weight = map(nn.Parameter, joined.chunk(2))
    before, own = words(model), joined.view(torch.int16).clone()
    hf_mlspec.nest(model)
    assert torch.equal(joined.view(torch.int16), own)
    assert same(words(hf_mlspec.unnest(model)), before)


def test_outputs_that_no_tile_divides():
    model = tiny("llama", dtype=BF16, intermediate_size=72, hidden_size=64, head_dim=16, tie_word_embeddings=True)
    before = words(model)
    with pytest.warns(UserWarning, match="in_features 72 is no multiple of 32"):
        hf_mlspec.nest(model)
    layer = model.model.layers[0].mlp.up_proj
    assert is_nested(layer)
    assert not layer.is_prepacked
    assert same(words(hf_mlspec.unnest(model)), before)


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = model_of()
        before = words(model)
        hf_mlspec.nest(model)
        logits = model(IDS).logits
    assert torch.isfinite(logits).all()
    assert same(words(hf_mlspec.unnest(model)), before)


def test_copies_and_files_hold_each_byte_once():
    model = hf_mlspec.nest(model_of())
    size = hf_mlspec.resident_bytes(model)
    assert hf_mlspec.resident_bytes(copy.deepcopy(model)) == size
    assert hf_mlspec.resident_bytes(model.to("cpu")) == size
    for what in (model, dict(model.named_parameters())):
        buffer = io.BytesIO()
        torch.save(what, buffer)
        assert buffer.tell() < size + 60_000  # the zip's records and the config
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
    assert all(torch.equal(loaded[name], own) for name, own in model.named_parameters())


def test_a_tied_table_has_no_weight_to_be_resized():
    model = hf_mlspec.nest(model_of())
    assert not hasattr(model.get_input_embeddings(), "weight")
    with pytest.raises(ValueError, match=r"reads the nested one of the output head: hf_mlspec\.unnest\(model\) first"):
        model.resize_token_embeddings(80)
    with pytest.raises(AttributeError, match="no attribute 'wait'"):
        _ = model.get_input_embeddings().wait
    assert model(IDS).logits.shape[-1] == 64
    hf_mlspec.unnest(model).resize_token_embeddings(80)
    assert model(IDS).logits.shape[-1] == 80


_PEAK = """
import gc, sys, torch, hf_mlspec
from transformers import AutoModelForCausalLM, LlamaConfig

def of_process(what):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024

def model_of(vocabulary, hidden, layers):
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=3 * hidden // 32 * 32,
                         num_hidden_layers=layers, num_attention_heads=8, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_(0, 0.02)
    return model

hf_mlspec.nest(model_of(64, 64, 1))  # what is loaded and compiled once
model = model_of(int(sys.argv[1]), 768, 8)
gc.collect()
size, start = hf_mlspec.resident_bytes(model), of_process("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins anew
hf_mlspec.nest(model)
print((of_process("VmHWM") - start) / size, hf_mlspec.resident_bytes(model) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux")
@pytest.mark.parametrize("vocabulary", [64, 11_776])  # no head to speak of; one of 12 % of the model
def test_a_process_peaks_within_a_twentieth_of_the_model(vocabulary):
    ran = subprocess.run([sys.executable, "-c", _PEAK, str(vocabulary)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    more, resident = map(float, ran.stdout.split())
    assert resident <= 1.017
    assert 0.015 < more <= 0.05
