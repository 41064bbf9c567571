"""On a GPU: does the compiled decoder read the planes that a router picks, resident and streamed, captured or not?"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.engines.choose import built_decoder
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.blocks import blocks_of
from hf_mlspec.routing.compiled_engine import RoutedCudaEngine
from hf_mlspec.routing.host_choice import ChosenOnHost
from hf_mlspec.routing.router import Router

pytestmark = pytest.mark.usefixtures("kernels_are_required")
DEVICE = "cuda"
OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
ROWS = [list(range(5, 45)), list(range(100, 109)), list(range(60, 90))]


def demo(**streaming):
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32, **streaming)
    return AutoModelForCausalLM.from_pretrained(
        hf_mlspec.demo_pair()[0], dtype=torch.bfloat16, quantization_config=planes, device_map=DEVICE
    ).eval()


def drawn_router(inner_std=None):
    """Its choices differ between prompts."""
    torch.manual_seed(5)
    made = Router(blocks_of(demo()))
    for own in made.of:
        torch.nn.init.normal_(own.outer.weight)
        if inner_std is not None:
            torch.nn.init.normal_(own.inner.weight, std=inner_std)
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def router():
    return drawn_router()


@pytest.fixture(scope="module")
def routed(router):
    return hf_mlspec.route(demo(), router)


def generated(model, rows=ROWS, **options):
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=DEVICE)
    return model.generate(ids, attention_mask=mask, **options, **OPTIONS)[:, width:].tolist()


@pytest.mark.parametrize("levels", [[], ["planes2"], ["prompt_lookup"]])
def test_a_row_writes_the_same_in_any_company(routed, levels):
    config = {"num_draft_tokens": 3, "engine": "cuda"}
    together = generated(routed, assistant_models=levels, speculation_config=config)
    assert together == generated(routed, assistant_models=[], speculation_config={"engine": "cuda"})
    for row, wanted in zip(ROWS, together, strict=True):
        assert generated(routed, [row], assistant_models=levels, speculation_config=config) == [wanted]


def test_steps_of_a_row_become_graphs_and_choose_once(routed, router):
    engine = RoutedCudaEngine(routed, built_decoder(routed, "cuda"), router)
    engine.start(2, torch.device(DEVICE))
    rows, chosen = [list(ROWS[0]), list(ROWS[1])], []
    with torch.inference_mode():
        for _ in range(6):
            logits = engine.feed(rows)
            chosen.append([list(own) for own in engine.chosen])
            for row, own in zip(rows, logits, strict=True):
                row.append(int(own[0].argmax()))
    assert all(own == chosen[0] for own in chosen)
    assert chosen[0][0] != chosen[0][1]
    assert len(engine._steps._steps) == 1
    assert [row[-6:] for row in rows] == [own[:6] for own in generated(routed, ROWS[:2], assistant_models=[])]


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_streamed_planes_are_those_of_the_resident_model(routed, router, share):
    parts = [own.parts("weight") for own in routed.modules() if isinstance(own, PlanesLinear)]
    whole = sum(part.nbytes for own in parts for part in own[:2])
    model = hf_mlspec.route(demo(plane_budget=int(whole * share)), router)
    source = next(own for own in model.modules() if isinstance(own, PlanesLinear)).source
    for _ in range(2):
        for row in ROWS:
            assert generated(model, [row], assistant_models=[]) == generated(routed, [row], assistant_models=[])
    assert generated(model, assistant_models=[]) == generated(routed, assistant_models=[])
    assert source.used <= source.budget


def near_ties(router, model):
    """Whose two best widths score alike but for some 1e-7."""
    made = copy.deepcopy(router)
    for own in made.of:
        own.outer.weight[1:] = own.outer.weight[:1] * (1 + 1e-7 * torch.arange(1, len(own.outer.weight))[:, None].to(
            own.outer.weight.device))  # fmt: skip
        own.outer.bias.zero_()
    return made.require(blocks_of(model))


def test_a_near_tie_is_chosen_alike_resident_waited_for_and_likely(router, monkeypatch):
    model, waited, at = demo(), [], ChosenOnHost.at
    drawn = torch.Generator().manual_seed(2)
    rows = [torch.randint(5, 200, (length,), generator=drawn).tolist() for length in (3, 40, 65, 130) * 4]
    made = near_ties(router, model)
    hf_mlspec.route(model, made)
    wanted = [generated(model, [row], assistant_models=[]) for row in rows]
    hf_mlspec.stream_planes(model, int(sum(own.nbytes for own in model.parameters()) * 0.9), top_planes=2)
    source = next(own for own in model.modules() if isinstance(own, PlanesLinear)).source
    monkeypatch.setattr(ChosenOnHost, "at", lambda *given: waited.append(given[1]) or at(*given))
    for each in (True, False):  # a prompt waits, or finds what is likely
        waited.clear()
        for row, own in zip(rows, wanted, strict=True):
            if each:
                source.likely.clear()
            assert generated(model, [row], assistant_models=[]) == own
        assert (len(waited) >= len(rows) * len(blocks_of(model))) == each  # a second try may fall short, too
    assert made.of in source.likely


def test_a_routed_draft_changes_no_token(router):
    model = demo()
    wanted = generated(model, assistant_models=[])
    for config in ({"num_draft_tokens": 3}, {}):
        config["router"] = router
        assert generated(model, assistant_models=["routed"], speculation_config=config) == wanted
    stats = hf_mlspec.last_stats(model)
    assert stats.levels[0].name == "routed"
