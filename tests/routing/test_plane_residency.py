"""Do the planes stay that are read, and no others, layer by layer?"""

from __future__ import annotations

import copy
import random

import pytest
import torch

from hf_mlspec.formats import PlanesWeight
from hf_mlspec.nn.plane_source import InGraph
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.routing.plane_loader import PlaneLoader
from hf_mlspec.routing.plane_rooms import sizes_on
from hf_mlspec.routing.plane_store import HostStore

CPU = torch.device("cpu")
TOP, LAYERS = 4, 4


@pytest.fixture(scope="module")
def made() -> dict[str, PlanesLinear]:
    torch.manual_seed(3)
    weights = [PlanesWeight.from_dense(torch.randn(64, 128), 8, 32) for _ in range(LAYERS)]
    return {f"layer{place}": PlanesLinear(weight) for place, weight in enumerate(weights)}


@pytest.fixture
def loader(made) -> PlaneLoader:
    """Room for the low planes of two of four layers, beside what is fetched."""
    linears = copy.deepcopy(made)
    sizes = [sizes_on(CPU, linear) for linear in linears.values()]
    low = sizes[0].plane * (8 - TOP)
    budget = sum(TOP * own.plane + own.beside for own in sizes) + 4 * low  # two to fetch
    store = HostStore([(8 - TOP, own.plane) for own in sizes], pin=False)
    found = PlaneLoader(linears, CPU, budget, store, top=TOP)
    assert [own.kept for own in found.layers] == [4, 4, 0, 0]
    return found


def passes(loader: PlaneLoader, made, widths: list[int], count: int) -> None:
    x = torch.arange(float(loader.layers[0].linear.in_features)).sin()[None, None]
    for _ in range(count):
        for layer, own, width in zip(loader.layers, made.values(), widths, strict=True):
            assert layer.linear.at_rows(x, [width]).equal(own.at_rows(x, [width]))
            assert loader.used <= loader.budget
    kept = sum(own.kept * loader.sizes[own.place].plane for own in loader.layers)
    assert loader.used == loader.always + kept


def test_planes_that_nobody_reads_make_room_for_those_that_are_read(loader, made):
    passes(loader, made, [6, 6, 6, 6], 12)
    assert [own.kept for own in loader.layers] == [2, 2, 2, 2]
    before = loader.counts.fetched_bytes
    passes(loader, made, [6, 6, 6, 6], 2)
    assert loader.counts.fetched_bytes == before
    assert loader._missing == 0


def test_a_wider_product_fetches_only_what_is_missing(loader, made):
    passes(loader, made, [6, 6, 6, 6], 12)
    before = loader.counts.fetched_bytes
    passes(loader, made, [8, 4, 4, 4], 1)
    assert loader.counts.fetched_bytes - before == 2 * loader.sizes[0].plane


def test_layers_of_which_top_planes_alone_are_read_make_room(loader, made):
    passes(loader, made, [4, 4, 8, 8], 12)
    assert [own.kept for own in loader.layers] == [0, 0, 4, 4]


def test_a_draft_of_fewer_planes_takes_none_from_its_check(loader, made):
    for _ in range(10):
        passes(loader, made, [6, 6, 6, 6], 1)
        passes(loader, made, [8, 8, 8, 8], 1)
    assert [own.kept for own in loader.layers] == [4, 4, 0, 0]


def test_what_was_fetched_for_a_layer_that_is_passed_over_frees_its_slot(loader, made):
    passes(loader, made, [8, 8, 8, 8], 1)  # and the next pass is fetched ahead
    assert set(loader._waiting) == {2}
    passes(loader, made, [8, 8, 4, 8], 1)
    assert 2 not in loader._waiting
    late = loader.counts.late
    passes(loader, made, [8, 8, 4, 8], 3)
    assert loader.counts.late == late


def test_what_is_expected_first_does_not_turn_the_search_for_more_to_an_earlier_pass(loader, made):
    passes(loader, made, [8, 8, 8, 8], 1)
    loader.reset()
    loader._next = 2  # of an earlier pass
    loader.expect(loader.layers[3].linear, 8)
    assert set(loader._waiting) == {3}
    assert loader._next == loader._before == -1
    loader.layers[0].linear.at_rows(torch.ones(1, 1, loader.layers[0].linear.in_features), [8])
    assert set(loader._waiting) == {2, 3}  # the one that comes next, too


def test_while_a_graph_holds_addresses_the_same_planes_stay(loader, made):
    graph = InGraph()
    loader.residency.graphs.add(graph)
    passes(loader, made, [4, 4, 8, 8], 12)
    assert [own.kept for own in loader.layers] == [4, 4, 0, 0]
    del graph
    passes(loader, made, [4, 4, 8, 8], 12)
    assert [own.kept for own in loader.layers] == [0, 0, 4, 4]


@pytest.mark.parametrize("seed", [24, 26, 35, 46])
def test_planes_behind_which_others_are_awaited_stay(seed):
    """Of pages of their own, so that what goes is gone."""
    torch.manual_seed(3)
    weights = [PlanesWeight.from_dense(torch.randn(256, 256), 8, 32) for _ in range(5)]
    made = {f"layer{place}": PlanesLinear(weight) for place, weight in enumerate(weights)}
    linears, drawn = copy.deepcopy(made), random.Random(seed)
    sizes = [sizes_on(CPU, linear) for linear in linears.values()]
    budget = sum(2 * own.plane + own.beside for own in sizes) + int((3 + 2 * drawn.random()) * 6 * sizes[0].plane)
    loader = PlaneLoader(linears, CPU, budget, HostStore([(6, own.plane) for own in sizes], pin=False), top=2)
    widths = [8] * len(linears)
    for _ in range(40):
        if drawn.random() < 0.3:
            widths = [drawn.choice([2, 3, 4, 6, 8]) for _ in linears]
        passes(loader, made, widths, 1)
        assert all(loader.layers[place].kept == fetch.first for place, fetch in loader._waiting.items())
