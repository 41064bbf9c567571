"""Does a router that chooses for every step give a token the planes that follow from its own row alone?"""

from __future__ import annotations

import copy
import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from routed import differing, pair, queries
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.engines.engine import Guess
from hf_mlspec.engines.modules.attention import ragged_attention_on
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.compiled_engine import RoutedCudaEngine
from hf_mlspec.routing.cpu_engine import RoutedCpuEngine
from hf_mlspec.routing.device_choice import ChosenOnDevice, weights_on_device
from hf_mlspec.routing.engine import RoutedEngine, routed_engine
from hf_mlspec.routing.mixing import Mixture, Prefixes
from hf_mlspec.routing.passes import Routed, Steps
from hf_mlspec.routing.router import KIND, Router

ENGINES = {"modules": RoutedEngine, "cpu": RoutedCpuEngine, "cuda": RoutedCudaEngine}
CPU = torch.device("cpu")
ROW = queries(1, 9)[0].tolist()


@pytest.fixture(scope="module")
def model():
    return pair(seed=2)[1].eval()


@pytest.fixture(scope="module")
def router(model):
    made = differing(model).choosing("step")
    made.step_share = 0.6
    return made


def engine_of(model, router, name):
    made = routed_engine(model, router, name=name, prepare=True, capacity=64, num_positions=None)
    assert type(made) is ENGINES[name]
    return made


def after(model, router, name, parts, beside=()):
    """Logits of the last tokens of ROW, fed in parts: tokens at first, then how many guessed ones a call checks."""
    engine, first = engine_of(model, router, name), parts[0]
    engine.start(1 + len(beside), CPU)
    found, row = [], ROW[:first]
    others = [list(own) for own in beside]
    with torch.inference_mode(), ragged_attention_on([model]) if name == "modules" else nullcontext():
        found.append(engine.feed([row, *others])[0, -1:])
        for count in parts[1:]:
            row, guessed = ROW[: len(row) + 1], ROW[len(row) + 1 : len(row) + count]
            tokens = torch.tensor([guessed] * (1 + len(others)), dtype=torch.int64)
            guess = Guess(tokens, [len(guessed)] + [0] * len(others)) if guessed else None
            found.append(engine.feed([row, *others], guess)[0, : len(guessed) + 1])
            row = row + guessed
    return torch.cat(found)


@pytest.mark.parametrize("name", ENGINES)
def test_a_check_of_many_tokens_reads_what_steps_of_one_read(model, router, name):
    one = after(model, router, name, [4, 1, 1, 1, 1, 1])
    many = after(model, router, name, [4, 5])
    some = after(model, router, name, [4, 2, 3])
    if name == "modules":  # whose products depend on the shape
        torch.testing.assert_close(many, one, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(some, one, atol=1e-5, rtol=1e-5)
    else:
        assert many.equal(one)
        assert some.equal(one)
    prompt = after(model, router.choosing("prompt"), name, [4, 5])
    assert prompt[:1].equal(one[:1])
    assert not torch.allclose(prompt[1:], one[1:], atol=1e-4)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_neighbours_and_rejected_guesses_change_no_bit(model, router, name):
    alone = after(model, router, name, [4, 1, 1, 1])
    beside = after(model, router, name, [4, 1, 1, 1], beside=[ROW[3:8], ROW[1:3]])
    assert beside.equal(alone)
    engine = engine_of(model, router, name)
    engine.start(2, CPU)
    with torch.inference_mode():
        engine.feed([ROW[:3], ROW[:4]])
        engine.feed([ROW[:4], ROW[:5]], Guess(torch.tensor([[7, 8], [9, 10]]), [2, 2]))  # none is accepted
        engine.select([1])
        assert engine.feed([ROW[:5]])[0, -1:].equal(alone[1:2])
        engine.admit(1)
        both = engine.feed([ROW[:6], ROW[:4]])
        assert both[0, -1:].equal(alone[2:3])
        assert both[1, -1:].equal(alone[:1])
        engine.forget(0)
        assert engine.feed([ROW[:4], ROW[:5]])[:, -1].equal(alone[:2])


def test_a_pass_over_a_whole_text_chooses_as_steps_do(model, router):
    blocks, rows = blocks_of(model), torch.tensor([ROW, ROW[::-1]])
    seen = []
    for end in (5, 9):
        steps = Steps([(4, end), (4, 4)], [None, None])
        with torch.no_grad(), Routed(router, blocks, [4, 4], steps=steps).over(model) as routed:
            model(input_ids=rows[:, :end], use_cache=False)
        seen.append([own[0][:5] for own in routed.of_tokens.values()])
        assert all(own[1] == [widths[1]] * end for own, widths in zip(routed.of_tokens.values(), routed.widths,
                                                                       strict=True))  # fmt: skip
    assert seen[0] == seen[1]
    assert any(len(set(own)) > 1 for own in routed.of_tokens[0])


@pytest.mark.parametrize("levels", [["planes2"], ["prompt_lookup"]])
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_chain_writes_what_the_routed_target_writes(target, router, levels, name):
    routed = hf_mlspec.route(target, router, every="step")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.tensor([ROW, ROW[::-1]])
    config = {"num_draft_tokens": 3, "engine": name}
    found = routed.generate(ids, assistant_models=levels, speculation_config=config, **options)
    assert found.equal(routed.generate(ids, assistant_models=[], speculation_config={"engine": name}, **options))
    whole = sum(part.nbytes for own in routed.modules() if isinstance(own, PlanesLinear)
                for part in own.parts("weight")[:2])  # fmt: skip
    hf_mlspec.stream_planes(routed, whole * 9 // 10)
    try:
        assert found.equal(routed.generate(ids, assistant_models=levels, speculation_config=config, **options))
    finally:
        hf_mlspec.stream_planes(routed, None)
    assert not found.equal(hf_mlspec.route(routed, None).generate(ids, assistant_models=[], **options))


def test_more_tokens_than_a_pass_takes_choose_as_alone(model, router):
    alone = after(model, router, "cpu", [4, 5])
    engine, count = engine_of(model, router, "cpu"), 110  # passes take 512 tokens
    engine.start(count, CPU)
    with torch.inference_mode():
        engine.feed([ROW[:4]] * count)
        found = engine.feed([ROW[:5]] * count, Guess(torch.tensor([ROW[5:9]] * count), [4] * count))
    assert all(own.equal(alone[1:]) for own in found)


def test_a_router_is_trained_for_steps_and_meets_its_bits(tmp_path):
    dense, planes = pair(seed=4)
    recipe = hf_mlspec.RouterRecipe(4.5, steps=4, batch=4, query_tokens=6, every="step")
    found = hf_mlspec.train_router(planes, dense, queries(8, 14), recipe)
    assert found.router.every == "step"
    assert found.bits == pytest.approx(4.5, abs=0.3)
    assert all(torch.isfinite(own).all() for own in found.router.state_dict().values())
    with pytest.raises(ValueError, match="every is 'row'"):
        hf_mlspec.train_router(planes, dense, queries(8, 14), dataclasses.replace(recipe, every="row"))


def test_a_mixture_of_each_token_is_that_of_its_own_width(model, router):
    blocks, rows, sure = blocks_of(model), torch.tensor([ROW, ROW[::-1]]), copy.copy(router)
    sure.temperature = 1e-4  # a mixture is then the width of the highest score
    mixture = Mixture(sure, blocks, Prefixes(blocks, router.widths))
    with torch.no_grad(), mixture.over(model, [4, 4]):
        soft = model(input_ids=rows, use_cache=False).logits
    steps = Steps([(4, 9), (4, 9)], [None, None])
    with torch.no_grad(), Routed(router, blocks, [4, 4], steps=steps).over(model) as routed:
        hard = model(input_ids=rows, use_cache=False).logits
    torch.testing.assert_close(soft, hard, atol=0.3, rtol=0)  # products of planes round their inputs
    widths = torch.tensor([router.widths[int(own.argmax())] for own in mixture.probabilities[0].flatten(0, 1)])
    assert widths.tolist() == [own for row in routed.of_tokens[0] for own in row]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("dense")
    pair(seed=2)[0].save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder):
    """The same weights, as from_pretrained gives them."""
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=planes).eval()


@pytest.mark.parametrize("engine", ["cpu", "cuda", "modules"])
def test_a_draft_that_chooses_every_step_changes_no_token(target, router, engine):
    hf_mlspec.route(target, None)
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.tensor([ROW])
    config = {"router": copy.copy(router).choosing("prompt"), "router_every": "step", "num_draft_tokens": 2}
    config["engine"] = engine
    found = target.generate(ids, assistant_models=["routed"], speculation_config=config, **options)
    assert found.equal(target.generate(ids, assistant_models=[], speculation_config={"engine": engine}, **options))


def damaged(path, other, **told):
    """A copy of a router's file whose header says other things, or nothing (None)."""
    with safe_open(path, "pt") as file:
        head = json.loads(file.metadata()[KIND]) | told
    head = {name: value for name, value in head.items() if value is not None}
    save_file(load_file(path), other, {KIND: json.dumps(head)})


def test_how_often_is_saved_with_the_router_and_refused_where_unknown(model, router, folder, tmp_path):
    router.save(tmp_path / "own.safetensors")
    again = Router.load(tmp_path / "own.safetensors", blocks_of(model))
    assert (again.every, again.step_share) == ("step", 0.6)
    how = {"format": "planes", "group_size": 32}
    planes = hf_mlspec.MLSpecConfig(router=tmp_path / "own.safetensors", router_every="prompt", **how)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=planes)
    assert other.hf_quantizer.router.every == "prompt"
    hf_mlspec.route(other, router).save_pretrained(tmp_path / "saved")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert saved.hf_quantizer.router.every == "step"
    for told, message in (({"version": 3}, "reads 1 and 2: upgrade"), ({"every": "row"}, "choice every 'row'")):
        damaged(tmp_path / "own.safetensors", tmp_path / "other.safetensors", **told)
        with pytest.raises(ValueError, match=message):
            Router.load(tmp_path / "other.safetensors", blocks_of(model))
    damaged(tmp_path / "own.safetensors", tmp_path / "old.safetensors", version=1, every=None, step_share=None)
    assert Router.load(tmp_path / "old.safetensors", blocks_of(model)).every == "prompt"
    with pytest.raises(ValueError, match=r"every is 'token'.*'prompt' or every 'step'"):
        hf_mlspec.route(other, router, every="token")
    with pytest.raises(ValueError, match="router_every is 'word'"):
        hf_mlspec.SpeculationConfig(router=router, router_every="word")
    for made in (hf_mlspec.SpeculationConfig, lambda **own: hf_mlspec.MLSpecConfig(**how, **own)):
        with pytest.raises(ValueError, match="there is no router"):
            made(router_every="step")


def test_a_step_of_nan_fails_no_prompt_behind_it(model, router):
    blocks, weights = blocks_of(model), weights_on_device(router, CPU)
    x = torch.randn(3, blocks[0].features)
    weights[0].failed.fill_(1)  # as such a step leaves it
    choosing = ChosenOnDevice(weights, blocks)
    choosing.at(0, x, torch.zeros(1, dtype=torch.int32))
    assert set(choosing.told()) <= set(router.widths)
    choosing = ChosenOnDevice(weights, blocks)
    choosing.at(0, x * torch.nan, torch.zeros(1, dtype=torch.int32))
    with pytest.raises(FloatingPointError):
        choosing.told()


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_step_of_nan_never_becomes_a_token_of_numbers(router, name):
    model = pair(seed=2)[1].eval()
    model.get_input_embeddings().weight.data[7] = float("nan")
    engine = engine_of(model, router, name)
    engine.start(1, CPU)
    with torch.inference_mode():
        engine.feed([ROW[:3]])
        if name == "cpu":
            with pytest.raises(FloatingPointError, match=r"layers\.0\.self_attn"):
                engine.feed([[*ROW[:3], 7]])
        else:  # the host knows no width: it sees the logits
            assert engine.feed([[*ROW[:3], 7]])[0, -1].isnan().any()
