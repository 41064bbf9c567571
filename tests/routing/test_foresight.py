"""Are choices of blocks to come guessed from earlier inputs, and does a guess change nothing but when planes come?"""

from __future__ import annotations

import json

import pytest
import torch
from routed import differing, pair, queries
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.foresight import LEAD, Foresight
from hf_mlspec.routing.passes import Routed, recorded
from hf_mlspec.routing.router import KIND, Router
from hf_mlspec.routing.training import RouterRecipe, train_router

COMPILED = pytest.param("cpu", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="not built"))


def test_a_choice_that_is_linear_in_what_came_before_is_learned():
    torch.manual_seed(0)
    features, way = torch.randn(300, 24) * 3 + 5, torch.randn(24, 4)
    chosen = ((features - 5) @ way).argmax(-1)
    one = Foresight(24, 4)
    one.fit(features[:200], chosen[:200])
    right = (one(features[200:]).argmax(-1) == chosen[200:]).float().mean()
    most = chosen.bincount().max() / len(chosen)
    assert right > 0.6 > most + 0.2


def test_what_is_always_chosen_is_foreseen_whatever_stands_before():
    one = Foresight(8, 3)
    one.fit(torch.randn(5, 8), torch.full((5,), 2))
    assert one(torch.randn(50, 8) * 100).argmax(-1).eq(2).all()


def test_training_fits_guesses_that_a_file_keeps(tmp_path):
    dense, model = pair()
    rows = queries(24, 16)
    found = train_router(model, dense, rows, RouterRecipe(4.5, steps=4, batch=4, query_tokens=8))
    blocks = blocks_of(model)
    assert len(found.router.ahead) == len(blocks) - LEAD
    found.router.save(tmp_path / "router.safetensors")
    loaded = Router.load(tmp_path / "router.safetensors", blocks)
    with Routed(loaded, blocks, [8] * 24).over(model) as routed, torch.no_grad():
        model(input_ids=rows, use_cache=False)
    right = [
        loaded.foresee(place, routed.features[place][r : r + 1]) == routed.widths[place + LEAD][r]
        for place in range(len(loaded.ahead))
        for r in range(24)
    ]
    assert sum(right) > 0.9 * len(right)
    assert loaded.foresee(len(blocks) - LEAD, routed.features[0]) is None
    assert loaded.foresee(0, routed.features[0]) == max(routed.widths[LEAD])
    assert loaded.usual == [max(own) for own in routed.widths]  # 24 queries, of 32


def test_a_file_without_guesses_is_a_router_still(tmp_path):
    _, model = pair()
    path, router = tmp_path / "router.safetensors", differing(model)
    router.save(path)
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()[KIND])
    del told["ahead"], told["usual"]
    save_file(load_file(path), path, {KIND: json.dumps(told)})
    assert Router.load(path, blocks_of(model)).foresee(0, torch.zeros(1, 32)) is None


def test_damaged_guesses_are_refused(tmp_path):
    _, model = pair()
    path, router = tmp_path / "router.safetensors", differing(model)
    router.look_ahead()
    router.save(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        told = file.metadata()
    tensors["ahead.0.bias"] = torch.full_like(tensors["ahead.0.bias"], float("nan"))
    save_file(tensors, path, told)
    with pytest.raises(ValueError, match=r"ahead\.0\.bias holds NaN or Inf: the router is damaged"):
        Router.load(path, blocks_of(model))
    del tensors["ahead.0.bias"]
    save_file(tensors, path, told)
    with pytest.raises(ValueError, match=r"ahead\.0\.bias is missing"):
        Router.load(path, blocks_of(model))


@pytest.mark.parametrize("usual", [4, [4], [4] * 3 + [5], [4] * 3 + [4.0], [4] * 3 + [True], [[4]] * 4])
def test_usual_widths_that_are_none_of_its_own_are_refused(tmp_path, usual):
    _, model = pair()
    path, router = tmp_path / "router.safetensors", differing(model)
    router.usual = [4] * len(router.of)
    router.save(path)
    assert Router.load(path, blocks_of(model)).usual == [4] * 4
    router.usual = usual
    router.save(path)
    with pytest.raises(ValueError, match=r"planes are usual, of 4 blocks .*the router is damaged; train it again"):
        Router.load(path, blocks_of(model))


def demo(**streaming):
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32, **streaming)
    folder = hf_mlspec.demo_pair()[0]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=planes).eval()


@pytest.fixture(scope="module")
def resident():
    return demo()


def guessing(model, right: bool) -> Router:
    """A router of many choices with guesses of them: fitted, or the narrowest width whatever comes."""
    router, blocks, rows = differing(model), blocks_of(model), queries(64, 20)
    router.look_ahead()
    with torch.no_grad(), Routed(router, blocks, [20] * 64).over(model) as routed:
        model(input_ids=rows, use_cache=False)
    for place, own in enumerate(router.ahead):
        chosen = torch.tensor([router.widths.index(width) for width in routed.widths[place + LEAD]])
        own.fit(routed.features[place], chosen if right else torch.zeros_like(chosen))
    return router


@pytest.mark.parametrize("engine", ["modules", "cuda", COMPILED])
def test_guesses_right_or_wrong_change_no_token_and_when_planes_come(resident, engine):
    held = sum(part.nbytes for own in resident.modules() if isinstance(own, PlanesLinear)
               for part in own.parts("weight")[:2])  # fmt: skip
    how = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0,
           "speculation_config": {"engine": engine}, "assistant_models": []}  # fmt: skip
    late = {}
    for right in (True, False):
        router = guessing(resident, right)
        model = hf_mlspec.route(demo(plane_budget=held * 85 // 100), router)
        source = next(own for own in model.modules() if isinstance(own, PlanesLinear)).source
        for row in queries(6, 20):
            hf_mlspec.route(resident, router)
            wanted = resident.generate(row[None], **how)
            hf_mlspec.route(resident, None)
            assert model.generate(row[None], **how).equal(wanted)
        late[right] = source.counts.late
        assert source.counts.ahead > 0
    assert late[True] < late[False]


def test_a_layer_that_is_expected_to_read_more_is_fetched_again(resident):
    held = sum(part.nbytes for own in resident.modules() if isinstance(own, PlanesLinear)
               for part in own.parts("weight")[:2])  # fmt: skip
    model = demo(plane_budget=held * 85 // 100)
    source = next(own for own in model.modules() if isinstance(own, PlanesLinear)).source
    layer = next(own for own in source.layers if not own.resident and own.kept == 0)
    source.reset()
    source.expect(layer.linear, source.top + 1)
    assert source._waiting[layer.place].count == 1
    source.expect(layer.linear, source.top + 3)
    assert source._waiting[layer.place].count == 3
    source.expect(layer.linear, source.top)
    assert layer.place not in source._waiting
    assert len(source._free) == source.slots
    x = torch.randn(1, 2, layer.linear.in_features)
    assert layer.linear.at_rows(x, [source.top + 2]).isfinite().all()
    with torch.no_grad(), recorded(model, blocks_of(model), [4]):
        model(input_ids=queries(1, 4), use_cache=False)
