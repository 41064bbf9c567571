"""Does a prepared model stay right while it is changed, copied, cast, saved, shared by threads and forked?"""

from __future__ import annotations

import copy
import multiprocessing
import threading

import pytest
import torch
from models import near, prompts, tiny
from torch import nn
from transformers import DynamicCache, GenerationConfig

import hf_mlspec
from hf_mlspec.nn.linear import KernelLinear
from hf_mlspec.nn.state import is_prepared
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]

OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
ONE_ROW = prompts([9])


@pytest.fixture
def target():
    return tiny(seed=2, dtype=torch.bfloat16)


def test_changed_weights_are_seen_by_the_next_call(target):
    inputs = ONE_ROW
    hf_mlspec.prepare(target)
    first = target.generate(**inputs, **OPTIONS)
    target.load_state_dict(tiny(seed=7, dtype=torch.bfloat16).state_dict())
    second = target.generate(**inputs, **OPTIONS)
    fresh = tiny(seed=7, dtype=torch.bfloat16).generate(**inputs, **OPTIONS, assistant_models=[])
    assert torch.equal(second, fresh)
    assert not torch.equal(first, second)
    out = target.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"])
    assert torch.equal(out, fresh)
    target.float()
    fresh = tiny(seed=7, dtype=torch.bfloat16).float().generate(**inputs, **OPTIONS, assistant_models=[])
    assert torch.equal(target.generate(**inputs, **OPTIONS), fresh)


def test_a_cast_that_was_loaded_anew_is_read_anew(target):
    inputs = ONE_ROW
    cast = hf_mlspec.prepare(hf_mlspec.direct_cast(target))
    other = hf_mlspec.direct_cast(tiny(seed=7, dtype=torch.bfloat16))
    first = cast.generate(**inputs, **OPTIONS)
    expected = other.generate(**inputs, **OPTIONS, assistant_models=[])
    assert other.model.layers[0].mlp.up_proj.is_prepacked
    cast.load_state_dict(other.state_dict())
    assert torch.equal(cast.generate(**inputs, **OPTIONS), expected)
    assert not torch.equal(first, expected)
    for module in cast.modules():
        if hasattr(module, "unprepack_"):
            module.unprepack_()
    assert torch.equal(cast.generate(**inputs, **OPTIONS), expected)


def test_a_prepared_model_is_copied_and_saved_like_any_other(target, tmp_path):
    inputs = ONE_ROW
    cast = hf_mlspec.direct_cast(target)
    for number, model in enumerate((target, cast)):
        expected = hf_mlspec.prepare(model).generate(**inputs, **OPTIONS)
        twin = copy.deepcopy(model)
        assert not is_prepared(twin)
        assert torch.equal(twin.generate(**inputs, **OPTIONS, assistant_models=[]), expected)
        model.save_pretrained(tmp_path / str(number))
        loaded = type(model).from_pretrained(tmp_path / str(number)).eval()
        assert torch.equal(loaded.generate(**inputs, **OPTIONS, assistant_models=[]), expected)


def test_a_prepared_model_may_be_cast(target):
    inputs = ONE_ROW
    before = hf_mlspec.direct_cast(target)
    after = hf_mlspec.direct_cast(hf_mlspec.prepare(target))
    outs = [cast.generate(**inputs, **OPTIONS, assistant_models=[]) for cast in (before, after)]
    assert torch.equal(*outs)
    out = target.generate(**inputs, **OPTIONS, assistant_models=[after])
    assert torch.equal(out, target.generate(**inputs, **OPTIONS))


def test_an_unknown_architecture_is_cast_in_any_order(caplog):
    model = tiny("diffllama", dtype=torch.bfloat16)
    linears = sum(type(module) is nn.Linear for module in model.modules())
    before = hf_mlspec.direct_cast(model)
    hf_mlspec.prepare(model)
    assert "DiffLlamaForCausalLM" in caplog.text
    assert sum(type(module) is KernelLinear for module in model.modules()) == linears > 0
    after = hf_mlspec.direct_cast(model)
    kinds = [[type(module).__name__ for module in cast.modules()] for cast in (before, after)]
    assert kinds[0] == [name.replace("KernelLinear", "Linear") for name in kinds[1]]
    assert "Mxfp4Linear" in kinds[0]
    inputs = prompts([3, 17, 1, 9])
    out = model.generate(**inputs, **OPTIONS, assistant_models=[after])
    assert out.shape == (4, 17 + 40)
    copied = copy.deepcopy(model)
    hf_mlspec.restore(copied)
    hf_mlspec.restore(model)
    for restored in (copied, model):
        assert not any(type(module) is KernelLinear for module in restored.modules())


def test_kernel_linears_leave_autograd_and_other_dtypes_to_torch():
    model = hf_mlspec.prepare(tiny("diffllama", dtype=torch.float32))
    ids = ONE_ROW["input_ids"]
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        served = model.double()(ids).logits
        assert served.dtype == torch.float64
        assert torch.equal(hf_mlspec.restore(model)(ids).logits, served)


def test_kernel_linears_leave_autocast_and_other_memory_orders_to_torch():
    model = hf_mlspec.prepare(tiny("diffllama", dtype=torch.float32))
    linear, x = model.model.layers[0].self_attn.q_proj, torch.randn(3, 32)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert linear(x).dtype == torch.bfloat16
        linear.weight = nn.Parameter(linear.weight.t().contiguous().t())
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.to("meta"), "the model is on meta"),
        (lambda model: model.model.layers[1].to("meta"), "the model is on cpu and meta"),
        (lambda model: model.double(), "weights are torch.float64; load the model in bfloat16 or float32"),
    ],
)
def test_prepare_refuses(target, change, words):
    change(target)
    with pytest.raises(ValueError, match=words):
        hf_mlspec.prepare(target)
    assert not is_prepared(target)


@pytest.mark.parametrize("what", [None, "folder/of/a/model"])
def test_prepare_and_restore_name_what_is_no_model(what):
    for change in (hf_mlspec.prepare, hf_mlspec.restore):
        with pytest.raises(TypeError, match=f"takes a model, not a {type(what).__name__}"):
            change(what)


def test_float64_runs_module_by_module(runners, caplog):
    tiny(seed=2, dtype=torch.float64).generate(**ONE_ROW, **OPTIONS, assistant_models=["early_exit:1"])
    assert runners == ["ModuleEngine", "ModuleEngine"]
    assert "LlamaForCausalLM runs module by module: its embedding is torch.float64" in caplog.text


def test_a_model_that_became_float64_after_prepare_still_decodes(target, runners):
    hf_mlspec.prepare(target)
    target.double()
    out = target.generate(**ONE_ROW, **OPTIONS)
    assert runners == ["ModuleEngine"]
    hf_mlspec.restore(target)
    assert torch.equal(target.generate(**ONE_ROW, **OPTIONS), out)


def test_a_cache_goes_in_and_comes_back(target):
    inputs = ONE_ROW
    whole = target.generate(**inputs, **OPTIONS, assistant_models=[])
    for levels in ([], ["mxfp4"]):
        cache = DynamicCache()
        asked = {**OPTIONS, "max_new_tokens": 15, "assistant_models": levels, "past_key_values": cache}
        first = target.generate(**inputs, **asked)
        assert cache.get_seq_length() == 9 + 15 - 1
        assert cache.layers[0].keys.dtype == torch.bfloat16
        rest = target.generate(first, attention_mask=torch.ones_like(first), **{**asked, "max_new_tokens": 25})
        assert torch.equal(rest, whole)
    hf_mlspec.prepare(target)
    cache = DynamicCache()
    first = target.generate(**inputs, **{**OPTIONS, "max_new_tokens": 15}, past_key_values=cache)
    assert cache.get_seq_length() == 9 + 15 - 1
    with torch.no_grad():
        stock = target(whole[:, :23]).past_key_values
    torch.testing.assert_close(cache.layers[1].keys, stock.layers[1].keys, atol=0.1, rtol=0.1)


def test_two_threads_decode_on_one_prepared_model(target):
    draft = near(target, 0.05)
    hf_mlspec.prepare(target)
    inputs = [prompts([4 + n], seed=n) for n in range(4)]
    asked = {**OPTIONS, "max_new_tokens": 300}
    expected = [target.generate(**one, **asked) for one in inputs]
    fresh = hf_mlspec.prepare(tiny(seed=2, dtype=torch.bfloat16))  # whose tables have yet to grow
    got: dict[int, list[torch.Tensor]] = {}

    def work(first: int) -> None:
        got[first] = [fresh.generate(**inputs[n], **asked, assistant_models=levels)
                      for n in (first, first + 1) for levels in ([], ["mxfp4", draft])]  # fmt: skip

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert all(torch.equal(one, expected[first + i // 2]) for first, outs in got.items() for i, one in enumerate(outs))
    assert [len(got[first]) for first in (0, 2)] == [4, 4]


def _decode_in_child(model, inputs, connection) -> None:
    connection.send(model.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"]).tolist())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_decodes_after_its_parent_did(target, threads):
    inputs = ONE_ROW
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = target.generate(**inputs, **OPTIONS, assistant_models=["mxfp4"]).tolist()
    finally:
        torch.set_num_threads(before)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_decode_in_child, args=(target, inputs, theirs))
    child.start()
    assert ours.poll(60)
    assert ours.recv() == expected
    child.join(60)
    assert child.exitcode == 0


def test_a_call_that_asked_for_hidden_states_leaves_the_engine_as_it_was(target, runners):
    hf_mlspec.prepare(target)
    first = target.generate(**ONE_ROW, **OPTIONS)
    noted = target(**ONE_ROW, output_hidden_states=True)
    assert len(noted.hidden_states) == len(target.model.layers) + 1
    assert any(layer._forward_hooks for layer in target.modules())  # transformers leaves them there
    runners.clear()
    assert torch.equal(target.generate(**ONE_ROW, **OPTIONS), first)
    assert runners == ["CpuEngine"]
    target.model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)
    runners.clear()
    assert not torch.equal(target.generate(**ONE_ROW, **OPTIONS), first)
    assert runners == ["ModuleEngine"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"dola_layers": "low"}, "dola_layers"), ({"num_return_sequences": 2}, "num_return_sequences")],
)
@pytest.mark.parametrize("place", ["the model's", "the call's"])
def test_settings_that_only_transformers_serves_are_left_to_it(target, setting, said, place, caplog):
    hf_mlspec.prepare(target)
    own = GenerationConfig(max_new_tokens=4, do_sample=False)
    for name, value in setting.items():
        setattr(target.generation_config if place == "the model's" else own, name, value)
    with pytest.raises(ValueError, match=r"(?i)dola|num_return_sequences"):
        target.generate(**ONE_ROW, generation_config=own)
    assert said in caplog.text
