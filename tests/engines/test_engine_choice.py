"""Does a model get the engine that was asked for, else the fastest, and is every other answer explained?"""

from __future__ import annotations

import threading

import pytest
import torch
from models import near, prompts, tiny
from torch import nn
from warned import forget_warnings

import hf_mlspec
from hf_mlspec.engines import choose
from hf_mlspec.engines.built import Walk, modules_of, standing, up_to_date, walk_of, walking_anew, walking_once
from hf_mlspec.engines.choose import decoder_of, engine_of, required_decoder, why_by_module, word_of
from hf_mlspec.engines.cpu.engine import CpuEngine
from hf_mlspec.engines.cuda.engine import CudaEngine
from hf_mlspec.engines.engine import Capabilities, Engine
from hf_mlspec.engines.modules.engine import ModuleEngine
from hf_mlspec.nn.linear import KernelLinear
from hf_mlspec.ops import KernelError
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
CLASSES = {"modules": ModuleEngine, "cpu": CpuEngine, "cuda": CudaEngine}
ABLE = {
    "modules": Capabilities(by_module=True, tapped=True, trees=True),
    "cpu": Capabilities(greedy_rounds=True, bit_exact=True, draft_window=True, tapped=True, trees=True),
    "cuda": Capabilities(capturable=True, bit_exact=True, draft_window=True),
}


@pytest.fixture(autouse=True)
def nothing_said_yet():
    forget_warnings()


@pytest.fixture
def model():
    return tiny(seed=2, dtype=torch.float32)


@pytest.mark.parametrize("name", choose.ENGINES)
def test_a_named_engine_is_that_engine_and_can_what_it_says(model, name):
    engine = engine_of(model, name=name, num_positions=64)
    assert type(engine) is CLASSES[name]
    assert (engine.name, engine.can) == (name, ABLE[name])
    assert (engine.dtype, engine.vocab_size, engine.max_positions) == (torch.float32, model.config.vocab_size, 64)
    names = [name for name in vars(Engine) if not name.startswith("_")]
    rounds = {"score", "draft", "draft_checked"}
    lanes = {"lane", "read", "hold"}  # of engines that read prompts beside running rows
    optional = (set() if engine.can.greedy_rounds else rounds | lanes) | (set() if engine.can.trees else {"keep"})
    assert all(hasattr(engine, name) for name in names if name not in optional)
    assert engine.can.greedy_rounds == all(hasattr(engine, name) for name in rounds)


def test_without_a_name_a_model_gets_the_fastest(model):
    assert engine_of(model).name == "cpu"
    assert engine_of(model, prepare=False).name == "modules"
    hf_mlspec.prepare(model)
    assert engine_of(model, prepare=False).name == "cpu"
    hf_mlspec.restore(model)
    assert engine_of(model, prepare=False).name == "modules"


@pytest.mark.parametrize("name", choose.ENGINES)
def test_a_prepared_model_keeps_the_engine_it_was_prepared_for(name):
    model = hf_mlspec.prepare(tiny(seed=2, dtype=torch.float32), engine=name)
    assert word_of(model) == word_of(model, prepare=False) == name
    assert engine_of(model).name == name
    served = [module for module in model.modules() if type(module) is KernelLinear]
    assert bool(served) == (name == "modules")
    hf_mlspec.restore(model)
    assert word_of(model) == "cpu"
    assert not [module for module in model.modules() if type(module) is KernelLinear]


@pytest.mark.parametrize("name", choose.ENGINES)
def test_generate_runs_target_and_levels_on_the_named_engine(model, name, monkeypatch):
    made, make = [], choose.engine_of

    def counted(model, **options):
        made.append(make(model, **options))
        return made[-1]

    monkeypatch.setattr(choose, "engine_of", counted)
    inputs, draft = prompts([5]), near(model, 0.05)
    alone = model.generate(**inputs, **OPTIONS, assistant_models=[], speculation_config={"engine": name})
    out = model.generate(**inputs, **OPTIONS, assistant_models=["mxfp4", draft], speculation_config={"engine": name})
    assert torch.equal(out, alone)
    assert [engine.name for engine in made] == [name] * 4


def test_an_engine_that_is_no_engine_is_refused(model):
    words = "choose one of modules, cpu, cuda or None"
    with pytest.raises(ValueError, match=f"engine is 'gpu', {words}"):
        hf_mlspec.SpeculationConfig(engine="gpu")
    with pytest.raises(ValueError, match=f"prepare: engine is 'gpu', {words}"):
        hf_mlspec.prepare(model, engine="gpu")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_named_engine_that_cannot_run_the_target_says_why(tiny_model, name):
    model = tiny_model("persimmon")
    words = f"engine '{name}' cannot run this PersimmonForCausalLM: the compiled decoder does not know this class"
    with pytest.raises(ValueError, match=words):
        hf_mlspec.prepare(model, engine=name)
    config = {"engine": name}
    with pytest.raises(ValueError, match=words):
        model.generate(**prompts([5]), **OPTIONS, assistant_models=[], speculation_config=config)


def test_a_level_that_the_named_engine_cannot_run_goes_module_by_module(model, tiny_model, caplog):
    level = tiny_model("diffllama", vocab_size=model.config.vocab_size)
    config = {"engine": "cpu", "num_draft_tokens": 2}
    inputs = prompts([5])
    out = model.generate(**inputs, **OPTIONS, assistant_models=[level], speculation_config=config)
    assert torch.equal(out, model.generate(**inputs, **OPTIONS, assistant_models=[]))
    said = "DiffLlamaForCausalLM runs module by module: the compiled decoder does not know this class"
    assert caplog.text.count(said) == 1


def test_without_kernels_the_engine_of_the_cpu_is_an_error_by_name_only(model, monkeypatch):
    monkeypatch.setattr(choose, "has_compiled_decoder", lambda: False)
    assert engine_of(model).name == "modules"
    assert why_by_module(model, name=None, prepare=True) == "no compiled kernels"
    with pytest.raises(KernelError, match="engine 'cpu' needs the compiled kernels"):
        engine_of(model, name="cpu")


def test_under_autocast_a_named_decoder_is_refused(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in ("cpu", "cuda"):
            assert decoder_of(model, name) is None
            assert why_by_module(model, name=name, prepare=True) == "autocast"
            with pytest.raises(ValueError, match=f"engine '{name}' cannot run this LlamaForCausalLM: autocast"):
                required_decoder(model, name)


def test_why_a_model_runs_by_module(model, tiny_model):
    assert why_by_module(model, name=None, prepare=False) == "prepare=False"
    assert why_by_module(model, name="modules", prepare=True) == "engine='modules'"
    model.train()
    assert "training mode" in why_by_module(model, name=None, prepare=True)


def test_linears_that_were_served_come_back_as_they_were(tiny_model):
    model = tiny_model("diffllama", torch.bfloat16)
    before = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    names, parameters = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    linear, calls = model.model.layers[0].self_attn.q_proj, []
    linear.register_forward_hook(lambda *_: calls.append(1))
    hf_mlspec.prepare(model)
    assert all(type(model.get_submodule(name)) is KernelLinear for name in before)
    assert names == list(model.state_dict())
    assert parameters == [id(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.int64))
    assert calls == [1]
    model.model.layers[0].self_attn.q_proj.weight = weight = nn.Parameter(linear.weight.detach().clone())
    model.train()
    hf_mlspec.restore(model)
    assert {name: module for name, module in model.named_modules() if type(module) is nn.Linear} == before
    assert linear.weight is weight
    assert linear.training


def test_a_served_head_stays_tied(tiny_model):
    model = tiny_model("diffllama", torch.bfloat16)
    model.lm_head.weight = model.model.embed_tokens.weight
    hf_mlspec.prepare(model)
    assert type(model.lm_head) is KernelLinear
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_linear_alone_is_no_model_to_prepare():
    with pytest.raises(ValueError, match="a single Linear is a layer"):
        hf_mlspec.prepare(nn.Linear(32, 32).eval(), engine="modules")


def test_modules_and_parameters_are_those_that_torch_counts(model):
    shared = nn.Linear(4, 4)
    shared.register_module("none", None)
    for one in (model, nn.ModuleList([nn.Sequential(shared, nn.ReLU()), shared, model]), nn.Identity()):
        assert modules_of(one) == list(one.modules())
        assert list(map(id, Walk(one).parameters)) == list(map(id, one.parameters()))


def test_a_model_that_decoded_and_left_for_the_meta_device_is_refused_as_any_other():
    target = tiny(seed=2, dtype=torch.bfloat16)
    options = {"max_new_tokens": 4, "do_sample": False, "assistant_models": ["mxfp4"]}
    target.generate(**prompts([5]), **options)
    target.model.layers[1].to("meta")
    with pytest.raises(ValueError, match=r"the target .*meta device.*load it onto"):
        target.generate(**prompts([5]), **options)


@pytest.mark.parametrize("before", ["prepare", "decode"])
def test_a_model_that_becomes_an_encoder_is_refused_although_a_decoder_is_kept(before):
    target = tiny(seed=2, dtype=torch.bfloat16)
    options = {"max_new_tokens": 4, "do_sample": False}
    if before == "decode":
        target.generate(**prompts([5]), **options, assistant_models=[])
    for layer in target.model.layers:
        layer.self_attn.is_causal = False
    stock = target.generate(**prompts([5]), **options)
    if before == "prepare":
        hf_mlspec.prepare(target)
    assert torch.equal(target.generate(**prompts([5]), **options), stock)
    with pytest.raises(TypeError, match=r"the target .* is an encoder"):
        target.generate(**prompts([5]), **options, assistant_models=["prompt_lookup"])


def test_a_call_walks_once_over_each_model_until_it_builds_something():
    model, other = tiny(seed=1), tiny(seed=2)
    assert walk_of(model) is not walk_of(model)
    with walking_once():
        first = walk_of(model)
        assert walk_of(model) is first
        assert walk_of(other).model is other
        weight = model.model.layers[0].mlp.up_proj
        with walking_anew():
            assert walk_of(model) is not first
            model.model.layers[0].mlp.up_proj = torch.nn.Linear(weight.in_features, weight.out_features, bias=False)
        assert walk_of(model) is not first
        assert weight not in walk_of(model).modules
    assert walk_of(model) is not walk_of(model)


def test_walks_of_a_call_are_not_those_of_another_thread():
    model, seen = tiny(seed=1), []
    with walking_once():
        here = walk_of(model)
        other = threading.Thread(target=lambda: seen.append(walk_of(model) is here))
        other.start()
        other.join()
    assert seen == [False]


def test_what_building_a_decoder_moves_is_seen_in_the_same_call():
    model, built = tiny(seed=1), []

    def build(found):
        found.lm_head.weight = nn.Parameter(found.lm_head.weight.detach().clone())
        built.append(found)
        return "a decoder"

    with walking_once():
        before = standing(model)
        assert up_to_date(model, build) == "a decoder"
        assert standing(model) != before
        assert up_to_date(model, build) == "a decoder"
    assert built == [model]
