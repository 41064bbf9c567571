"""Where streaming fails at any step: is the model as it was, is all counted, and is the next product right?"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.formats import PlanesWeight
from hf_mlspec.nn.plane_source import PlaneCounts
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.nn.state import state_of
from hf_mlspec.routing.plane_loader import PlaneLoader
from hf_mlspec.routing.plane_rooms import CpuRoom, sizes_on
from hf_mlspec.routing.plane_store import FileStore, HostStore, PlaneError

CPU = torch.device("cpu")
TOP, LAYERS, SLOTS = 4, 4, 2
# (layer, planes): whole passes, drafts, and a layer that is read often enough to take the place of others.
PRODUCTS = [(place, width) for width in (8, 4, 6, 8) for place in range(LAYERS)] + [(3, 8)] * 5 + [(1, 8), (0, 2)]
CALLS = ("start", "wait", "tiles", "done", "keep", "drop")


class Fault(Exception):
    """Of the test's own making."""


@cache
def made() -> dict[str, PlanesLinear]:
    torch.manual_seed(3)
    weights = [PlanesWeight.from_dense(torch.randn(64, 128), 8, 32) for _ in range(LAYERS)]
    return {f"layer{place}": PlanesLinear(weight) for place, weight in enumerate(weights)}


def layers() -> dict[str, PlanesLinear]:
    return copy.deepcopy(made())


def streamed(linears) -> PlaneLoader:
    sizes = [sizes_on(CPU, linear) for linear in linears.values()]
    low = sizes[0].plane * (8 - TOP)
    budget = sum(TOP * own.plane + own.beside for own in sizes) + (SLOTS + 1) * low
    store = HostStore([(8 - TOP, own.plane) for own in sizes], pin=False)
    return PlaneLoader(linears, CPU, budget, store, top=TOP)


@pytest.fixture(scope="module")
def wanted() -> list[torch.Tensor]:
    own = list(layers().values())
    return [product(own, *which) for which in PRODUCTS]


def product(own: list[PlanesLinear], place: int, width: int) -> torch.Tensor:
    x = torch.arange(128.0).sin()[None, None] + place
    return own[place].at_rows(x, [width])


def require_counted(loader: PlaneLoader) -> None:
    resident = {own.place for own in loader.layers if own.resident}
    slots = loader._free + [fetch.slot for fetch in loader._waiting.values()]
    assert sorted(slots) == list(range(loader.slots))
    assert loader._missing == sum(own.lacks > 0 for own in loader.layers)
    kept = sum(own.kept * loader.sizes[own.place].plane for own in loader.layers)
    assert loader.used == loader.always + kept <= loader.budget
    assert loader.room._resident == resident
    assert not resident & loader._waiting.keys()


def counted_calls(room: CpuRoom, fails_at: int, monkeypatch) -> list[str]:
    """Let call number ``fails_at`` of a room raise; the names of those that were made."""
    made: list[str] = []

    def call(name: str, plain: Callable, *args):
        made.append(name)
        if len(made) - 1 == fails_at:
            raise Fault(name)
        return plain(*args)

    for name in CALLS:
        monkeypatch.setattr(room, name, partial(call, name, getattr(room, name)))
    return made


def number_of_calls(monkeypatch) -> list[str]:
    linears = layers()
    loader = streamed(linears)
    made = counted_calls(loader.room, -1, monkeypatch)
    for which in PRODUCTS:
        product(list(linears.values()), *which)
    return list(made)


def test_a_room_that_fails_at_any_call_leaks_nothing_and_no_product_is_wrong(wanted, monkeypatch):
    names = number_of_calls(monkeypatch)
    assert {*CALLS} == {*names}
    for fails_at in range(len(names)):
        linears = layers()
        loader, own = streamed(linears), list(linears.values())
        counted_calls(loader.room, fails_at, monkeypatch)
        failed = 0
        for which, expected in zip(PRODUCTS, wanted, strict=True):
            try:
                assert product(own, *which).equal(expected), (fails_at, which)
            except Fault:
                failed += 1
            require_counted(loader)
        assert failed == 1, names[fails_at]
        loader.reset()
        assert sorted(loader._free) == list(range(loader.slots))
        assert vars(loader.counts) == vars(PlaneCounts())
        assert product(own, 2, 8).equal(product(list(layers().values()), 2, 8))
        loader.give_back()
        assert all(linear.source is None for linear in own)
        assert product(own, 3, 8).equal(product(list(layers().values()), 3, 8))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no memory")])
@pytest.mark.parametrize("name", ["keep", "start"])
def test_no_memory_for_what_can_be_left_out_costs_no_product(wanted, monkeypatch, caplog, name, error):
    linears = layers()
    loader, own, tried = streamed(linears), list(linears.values()), []
    plain = getattr(loader.room, name)

    def full(fetch):
        if name == "start" and not inside:  # what a product asks for itself is there
            return plain(fetch)
        tried.append(fetch)
        raise error

    inside: list[bool] = []
    ahead = loader._fetch_ahead
    monkeypatch.setattr(loader, "_fetch_ahead", lambda *args: (inside.append(True), ahead(*args), inside.clear()))
    monkeypatch.setattr(loader.room, name, full)
    for _ in range(3):
        for which, expected in zip(PRODUCTS, wanted, strict=True):
            assert product(own, *which).equal(expected)
            require_counted(loader)
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert "no memory" in said[0]
    assert tried
    if name == "keep":
        assert len(tried) == 1  # and no other layer lost its place for it
        assert loader.counts.evicted <= 8 - TOP
        monkeypatch.setattr(loader.room, name, plain)
        for _ in range(80):
            product(own, 3, 8)
        assert loader.layers[3].resident
    require_counted(loader)
    loader.give_back()
    assert all(linear.source is None for linear in own)


def test_layers_that_were_given_back_are_not_fetched_ahead(wanted, monkeypatch):
    linears = layers()
    loader, own, calls, started = streamed(linears), list(linears.values()), [], []
    plain, start = loader.room.whole, loader.room.start

    def fails(place, **options):
        calls.append(place)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return plain(place, **options)

    monkeypatch.setattr(loader.room, "whole", fails)
    with pytest.raises(torch.OutOfMemoryError):
        loader.give_back()
    monkeypatch.setattr(loader.room, "whole", plain)
    monkeypatch.setattr(loader.room, "start", lambda fetch: (started.append(fetch.place), start(fetch)))
    assert [linear.source is None for linear in own] == [True, False, False, False]
    for _ in range(3):
        for which, expected in zip(PRODUCTS, wanted, strict=True):
            assert product(own, *which).equal(expected)
    assert started
    assert 0 not in started
    loader.give_back()
    assert all(linear.source is None for linear in own)
    assert product(own, *PRODUCTS[0]).equal(wanted[0])


def test_the_budget_is_not_exceeded_while_one_layer_takes_the_place_of_another(monkeypatch):
    linears = layers()
    loader, own, order = streamed(linears), list(linears.values()), []
    for name in ("keep", "drop"):
        plain = getattr(loader.room, name)
        monkeypatch.setattr(loader.room, name, lambda *args, n=name, plain=plain: (order.append(n), plain(*args)))
    for _ in range(8):
        product(own, 3, 8)
    assert loader.layers[3].resident
    taken = order.index("keep")
    assert "drop" in order[:taken]


def test_a_layer_of_another_model_is_told():
    loader = streamed(layers())
    with pytest.raises(PlaneError, match="are not streamed here"), loader.reading(next(iter(layers().values())), 8):
        pass


@pytest.fixture(scope="module")
def model():
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32)
    folder = hf_mlspec.demo_pair()[1]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=planes).eval()


IDS = torch.arange(5, 12)[None]


def planes_of(model: nn.Module) -> dict[str, PlanesLinear]:
    return {name: own for name, own in model.named_modules() if isinstance(own, PlanesLinear)}


def budget_of(model: nn.Module) -> int:
    return sum(part.nbytes for own in planes_of(model).values() for part in own.parts("weight")[:2]) * 95 // 100


@pytest.mark.parametrize(
    ("what", "place"),
    [("file", "first"), ("file", "middle"), ("file", "seal"), ("memory", "last"), ("room", "first"), ("room", "last")],
)
def test_what_fails_while_it_begins_leaves_the_model_as_it_was(model, tmp_path, monkeypatch, what, place):
    logits, budget, count = model(IDS).logits, budget_of(model), len(planes_of(model))
    fails_at, calls = {"first": 0, "middle": count // 2, "last": count - 1, "seal": None}[place], []
    kind, name = (CpuRoom, "put") if what == "room" else (FileStore, "put" if fails_at is not None else "seal")
    plain = getattr(kind, name)

    def fails(self, *args):
        calls.append(name)
        if len(calls) - 1 == (fails_at or 0):
            raise OSError(28, "No space left on device") if what == "file" else torch.OutOfMemoryError("out of memory")
        return plain(self, *args)

    monkeypatch.setattr(kind, name, fails)
    with pytest.raises((OSError, torch.OutOfMemoryError)) as caught:
        hf_mlspec.stream_planes(model, budget, folder=tmp_path)
    if name == "put":
        assert [*planes_of(model)][fails_at] in str(caught.value)
    assert all(own.source is None for own in planes_of(model).values())
    assert not list(tmp_path.iterdir())
    assert model(IDS).logits.equal(logits)
    monkeypatch.undo()
    hf_mlspec.stream_planes(model, budget, folder=tmp_path)
    assert model(IDS).logits.equal(logits)
    hf_mlspec.stream_planes(model, None)
    assert model(IDS).logits.equal(logits)


def test_a_layer_without_memory_is_named_before_anything_changes(model):
    name, own = list(planes_of(model).items())[-1]
    kept = own.weight_planes.data
    own.weight_planes = nn.Parameter(kept.to("meta"), requires_grad=False)
    try:
        with pytest.raises(ValueError, match=f"{name} has no memory"):
            hf_mlspec.stream_planes(model, budget_of(model))
        assert all(linear.source is None for linear in planes_of(model).values())
    finally:
        own.weight_planes = nn.Parameter(kept, requires_grad=False)


def test_an_end_that_fails_half_way_ends_at_the_second_call(model, tmp_path, monkeypatch):
    logits, plain, calls = model(IDS).logits, os.preadv, []
    hf_mlspec.stream_planes(model, budget_of(model), folder=tmp_path)

    def fails(*args):
        calls.append(args)
        if len(calls) > 1:
            raise OSError(5, "Input/output error")
        return plain(*args)

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(PlaneError, match="Input/output error"):
        hf_mlspec.stream_planes(model, None)
    monkeypatch.undo()
    sources = [own.source for own in planes_of(model).values()]
    assert sources[0] is None
    assert sources[-1] is not None
    with pytest.raises(ValueError, match="streamed already"):
        hf_mlspec.stream_planes(model, budget_of(model))
    assert model(IDS).logits.equal(logits)
    hf_mlspec.stream_planes(model, None)
    assert all(own.source is None for own in planes_of(model).values())
    assert not list(tmp_path.iterdir())
    assert model(IDS).logits.equal(logits)


def test_a_model_that_cannot_move_goes_home_without_memory_of_the_device(model, tmp_path, monkeypatch):
    logits, moved, plain, hosts = model(IDS).logits, [], model.to, []
    whole = CpuRoom.whole

    def to(device):
        moved.append(str(device))
        if len(moved) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return plain(device)

    def counted(self, place, *, on_host=False):
        hosts.append(on_host)
        return whole(self, place, on_host=on_host)

    monkeypatch.setattr(model, "to", to)
    monkeypatch.setattr(CpuRoom, "whole", counted)
    with pytest.raises(torch.OutOfMemoryError):
        hf_mlspec.stream_planes(model, budget_of(model), folder=tmp_path, device="cpu:0")  # unlike "cpu", where it is
    assert moved == ["cpu:0", "cpu"]
    assert hosts == [True] * len(planes_of(model))
    assert all(own.source is None for own in planes_of(model).values())
    assert not list(tmp_path.iterdir())
    assert model(IDS).logits.equal(logits)


def test_a_way_home_that_fails_at_its_end_still_moves_the_model(model, tmp_path, monkeypatch):
    logits, moved, plain, close = model(IDS).logits, [], model.to, FileStore.close

    def to(device):
        moved.append(str(device))
        if len(moved) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return plain(device)

    def fails(self, lost=False):
        close(self, lost)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(model, "to", to)
    monkeypatch.setattr(FileStore, "close", fails)
    with pytest.raises(OSError, match="Input/output error"):
        hf_mlspec.stream_planes(model, budget_of(model), folder=tmp_path, device="cpu:0")
    assert moved == ["cpu:0", "cpu"]
    assert all(own.source is None for own in planes_of(model).values())
    assert model(IDS).logits.equal(logits)


def test_an_end_lets_go_of_outdated_decoders_first_and_where_it_fails(model, tmp_path, monkeypatch):
    hf_mlspec.stream_planes(model, budget_of(model), folder=tmp_path)
    decoders, held = lambda: state_of(model).decoders, []

    def fails(self):
        held.append(dict(decoders()))
        decoders()[object] = (), object()
        raise torch.OutOfMemoryError("out of memory")

    decoders()[object] = (), object()
    monkeypatch.setattr(PlaneLoader, "give_back", fails)
    with pytest.raises(torch.OutOfMemoryError):
        hf_mlspec.stream_planes(model, None)
    monkeypatch.undo()
    assert held == [{}]
    assert object not in decoders()
    hf_mlspec.stream_planes(model, None)
    assert all(own.source is None for own in planes_of(model).values())


def test_a_file_that_is_removed_while_it_is_written_is_an_error(model, tmp_path, monkeypatch):
    logits, plain = model(IDS).logits, FileStore.put

    def removes(self, place, planes):
        plain(self, place, planes)
        if place == 3:
            self._writing.unlink()

    monkeypatch.setattr(FileStore, "put", removes)
    with pytest.raises(FileNotFoundError):
        hf_mlspec.stream_planes(model, budget_of(model), folder=tmp_path)
    assert all(own.source is None for own in planes_of(model).values())
    assert model(IDS).logits.equal(logits)
