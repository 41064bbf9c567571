"""Are prompts over streamed planes read with what is likely, and again where a block chose more than was there?"""

from __future__ import annotations

import pytest
import torch
from routed import differing, pair, queries

import hf_mlspec
from hf_mlspec import ops
from hf_mlspec.engines.choose import built_decoder
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.compiled_engine import RoutedCudaEngine
from hf_mlspec.routing.host_choice import ChosenOnHost, KernelScorers, Scorers
from hf_mlspec.routing.likely import RECENT, TRIES, LikelyWidths, likely_of

CPU = torch.device("cpu")


def test_what_is_likely_is_the_widest_of_recent_prompts():
    likely = LikelyWidths()
    assert likely.of_all() is None
    likely.saw([8, 2])
    likely.saw([4, 3])
    assert likely.of_all() == [8, 3]
    for _ in range(RECENT - 1):
        likely.saw([4, 2])
    assert likely.of_all() == [4, 3]
    likely.saw([4, 2])
    assert likely.of_all() == [4, 2]


@pytest.fixture
def engine():
    """Over a streamed model; waits: of every prompt whose blocks the host waited for, the row."""
    model = pair(seed=2)[1].eval()
    router = differing(model)
    held = sum(part.nbytes for own in model.modules() if isinstance(own, PlanesLinear)
               for part in own.parts("weight")[:2])  # fmt: skip
    hf_mlspec.stream_planes(model, held * 95 // 100, top_planes=2)
    made = RoutedCudaEngine(model, built_decoder(model, "cuda"), router)
    yield made
    hf_mlspec.stream_planes(model, None)


@pytest.fixture
def waited(monkeypatch):
    """Blocks for which the host waited."""
    plain, found = ChosenOnHost.at, []

    def told(own, block, x, starts):
        found.append(block)
        return plain(own, block, x, starts)

    monkeypatch.setattr(ChosenOnHost, "at", told)
    return found


def read(engine, row):
    """Logits, what was chosen, and passes."""
    engine.start(1, CPU)
    before = engine.forwards
    with torch.inference_mode():
        logits = engine.feed([row])[0, -1].clone()
    return logits, engine.chosen[0], engine.forwards - before


def test_a_prompt_is_waited_for_once_and_a_wider_choice_is_read_again(engine, waited):
    rows, blocks = queries(12, 20).tolist(), len(engine.blocks)
    engine._likely = None
    wanted = []
    for row in rows:  # the host waits
        engine._likely = LikelyWidths()
        wanted.append(read(engine, row))
    assert len(waited) == blocks * len(rows)
    assert all(passes == 1 for _, _, passes in wanted)
    assert len({tuple(chosen) for _, chosen, _ in wanted}) > 1
    waited.clear()
    engine._likely, again = LikelyWidths(), []
    for number, row in enumerate(rows):
        logits, chosen, passes = read(engine, row)
        assert chosen == wanted[number][1]
        assert logits.equal(wanted[number][0])
        again.append(passes)
    assert again[0] == 1  # nothing was likely as yet
    assert max(again) > 1
    assert again.count(1) > 1
    for number, row in enumerate(rows):  # all of it is likely now
        waited.clear()
        logits, chosen, passes = read(engine, row)
        assert passes == 1
        assert logits.equal(wanted[number][0])
        assert not waited


def test_behind_some_tries_the_host_waits(engine, waited):
    rows = queries(2, 20).tolist()
    widths = read(engine, rows[0])[1]
    assert any(width > engine._top for width in widths)

    class Narrow(LikelyWidths):
        def of_all(self):
            return [2] * len(engine.blocks)

    engine._likely = Narrow()
    waited.clear()
    _, chosen, passes = read(engine, rows[0])
    assert (chosen, passes) == (widths, TRIES + 1)
    assert len(waited) == len(engine.blocks)


def steps_of(engine, row):
    """Four greedy tokens behind a row, and the engine begins anew."""
    engine.start(1, CPU)
    own = list(row)
    with torch.inference_mode():
        for _ in range(4):
            own.append(int(engine.feed([own])[0, -1].argmax()))
    return own[len(row) :]


def test_steps_and_their_prompts_are_those_of_the_resident_model(engine):
    row = queries(1, 20)[0].tolist()
    found = [steps_of(engine, row) for _ in range(2)]  # waited for, then likely
    model = pair(seed=2)[1].eval()
    resident = RoutedCudaEngine(model, built_decoder(model, "cuda"), engine.router)
    tokens = steps_of(resident, row)
    assert found == [tokens, tokens]


def test_a_near_tie_is_chosen_by_the_same_product_whether_the_host_waits_or_not(engine, waited, monkeypatch):
    """By the operator that resident planes are chosen with, never by other products."""
    row, calls, chosen = queries(1, 20)[0].tolist(), [], ops.choose_of_prompt

    def other(x, mean, weights):
        calls.append(weights)
        return torch.where(chosen(x, mean, weights) == 8, 6, 3).int()  # what no other product would say

    monkeypatch.setattr(ops, "choose_of_prompt", other)
    monkeypatch.setattr(Scorers, "choose", lambda *given: pytest.fail("chosen by other products"))
    found = [read(engine, row)[:2] for _ in range(2)]  # waited for, then likely
    assert len(waited) == len(engine.blocks)
    assert len(calls) == 2 * len(engine.blocks)
    assert set(found[0][1]) <= {3, 6}
    assert found[0][1] == found[1][1]
    assert found[0][0].equal(found[1][0])


def test_other_kernels_choose_by_products_for_every_gpu(engine, waited, monkeypatch):
    monkeypatch.setattr("hf_mlspec.routing.compiled_engine.chooses_on_device", lambda *given: False)
    plain = RoutedCudaEngine(engine.model, engine.decoder, engine.router)
    assert isinstance(engine._scorers, KernelScorers)
    assert isinstance(plain._scorers, Scorers)
    for row in queries(3, 20).tolist():
        waited.clear()
        assert read(plain, row)[1] == read(engine, row)[1]
        assert len(waited) >= len(engine.blocks)


def test_a_block_of_nan_is_named_and_the_next_prompt_is_right(engine):
    row = queries(1, 20)[0].tolist()
    wanted = read(engine, row)
    engine._likely = LikelyWidths()
    table = engine.model.get_input_embeddings().weight
    before = table.data[row[3]].clone()
    table.data[row[3]] = float("nan")
    with pytest.raises(FloatingPointError, match=r"layers\.0\.self_attn"):
        read(engine, row)
    table.data[row[3]] = before
    logits, widths, _ = read(engine, row)
    assert (widths, logits.equal(wanted[0])) == (wanted[1], True)


def test_the_first_prompt_finds_what_is_usual_for_training_queries(engine, waited):
    rows = queries(RECENT + 1, 20).tolist()
    widths = read(engine, rows[0])[1]
    waited.clear()
    engine.router.usual = [max(own, 3) for own in widths]
    next(iter(engine.blocks[0].linears.values())).source.likely.clear()
    again = RoutedCudaEngine(engine.model, engine.decoder, engine.router)
    logits, chosen, passes = read(again, rows[0])
    assert (chosen, passes, waited) == (widths, 1, [])
    assert logits.equal(read(engine, rows[0])[0])
    for _ in range(RECENT):
        again._likely.saw([2] * len(widths))
    assert again._likely.of_all() == [2] * len(widths)  # what is usual counts as one prompt


def test_what_is_likely_lives_with_the_planes_that_are_streamed(engine):
    row = queries(1, 20)[0].tolist()
    widths = read(engine, row)[1]
    again = RoutedCudaEngine(engine.model, engine.decoder, engine.router.choosing("step"))  # the same MLPs
    assert again._likely is engine._likely
    assert again._likely.of_all() == widths
    other = differing(engine.model, seed=9)
    assert likely_of(other, engine.blocks).of_all() is None
    source = next(iter(engine.blocks[0].linears.values())).source
    assert len(source.likely) == 2
    del other
    assert len(source.likely) == 1
    hf_mlspec.stream_planes(engine.model, None)
    assert likely_of(engine.router, engine.blocks).of_all() is None
