"""On a GPU: are streamed planes those of the resident model, on streams of their own, and is the budget kept?"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_mlspec
from hf_mlspec.engines.choose import built_decoder, engine_of
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.precision import Bits
from hf_mlspec.routing.plane_room_cuda import CudaRoom
from hf_mlspec.routing.plane_store import FileStore, HostStore, PlaneError

pytestmark = pytest.mark.usefixtures("kernels_are_required")
DEVICE = "cuda"
OPTIONS = {"do_sample": False, "max_new_tokens": 32, "eos_token_id": None, "pad_token_id": 0}


def demo(device: str | None = DEVICE, **streaming):
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32, **streaming)
    folder = hf_mlspec.demo_pair()[0]
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=planes, device_map=device
    ).eval()


def source_of(model):
    return next(own for own in model.modules() if isinstance(own, PlanesLinear)).source


def budget_of(model, share: float) -> int:
    parts = [own.parts("weight") for own in model.modules() if isinstance(own, PlanesLinear)]
    return int(sum(part.nbytes for own in parts for part in own[:2]) * share)


@pytest.fixture(scope="module")
def resident():
    model = demo()
    model(torch.arange(5, 9, device=DEVICE)[None])  # in tiles
    return model


@pytest.mark.parametrize("share", [0.8, 0.9, 1.3])
def test_logits_are_those_of_the_resident_model_at_every_width(resident, share):
    model = demo(plane_budget=budget_of(resident, share))
    ids = torch.arange(5, 45, device=DEVICE)[None]
    switch, own = hf_mlspec.precision_switch(model), hf_mlspec.precision_switch(resident)
    for width in (8, 4, 8, 6, 2, 8, 5, 7):
        with switch.at(f"planes{width}") if width < 8 else switch.at(16):
            found = model(ids).logits
        with own.at(f"planes{width}") if width < 8 else own.at(16):
            assert found.equal(resident(ids).logits), width
    source = source_of(model)
    assert isinstance(source.store, HostStore)
    assert source.used <= source.budget
    assert (source.counts.fetched_bytes > 0) == (share < 1)
    if share == 0.8:
        wanted = resident.state_dict()
        assert all(tensor.equal(wanted[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("folder", [False, True])
def test_a_chain_writes_the_ids_of_the_resident_model(resident, tmp_path, folder):
    where = tmp_path if folder else None
    model = demo(plane_budget=budget_of(resident, 0.85), plane_folder=where)
    assert isinstance(source_of(model).store, FileStore if folder else HostStore)
    ids = torch.arange(5, 45, device=DEVICE)[None]
    config = hf_mlspec.SpeculationConfig(num_draft_tokens=4, engine="modules")
    wanted = resident.generate(ids, assistant_models=["planes4"], speculation_config=config, **OPTIONS)
    out = model.generate(
        ids, assistant_models=["planes4"], speculation_config=config, return_dict_in_generate=True, **OPTIONS
    )
    assert out.sequences.equal(wanted)
    planes = out.speculation.planes
    assert planes.fetched_bytes > 0
    assert planes.ahead > planes.late


@pytest.mark.parametrize("share", [0.8, 1.3])
@pytest.mark.parametrize("levels", [[], ["planes4"], ["planes6", "planes2"]])
def test_the_compiled_decoder_writes_the_ids_of_the_resident_one(resident, levels, share):
    model, ids = demo(plane_budget=budget_of(resident, share)), torch.arange(5, 45, device=DEVICE)[None]
    config = hf_mlspec.SpeculationConfig(num_draft_tokens=4, engine="cuda", confidence_threshold=0)
    how = {"assistant_models": levels, "speculation_config": config, "return_dict_in_generate": True, **OPTIONS}
    wanted = resident.generate(ids, **how)
    for _ in range(2):  # the second time graphs of the draft are there
        out = model.generate(ids, **how)
        assert out.sequences.equal(wanted.sequences)
    if levels == ["planes4"]:
        assert (out.speculation.planes.fetched_bytes > 0) == (share < 1)
    hf_mlspec.stream_planes(model, None)
    assert model.generate(ids, **how).sequences.equal(wanted.sequences)


def test_a_streamed_model_drafts_compiled_without_being_asked(resident):
    model, ids = demo(plane_budget=budget_of(resident, 0.8)), torch.arange(5, 45, device=DEVICE)[None]
    out = model.generate(ids, assistant_models=["planes4"], **OPTIONS)
    assert out.equal(resident.generate(ids, assistant_models=["planes4"], **OPTIONS))
    assert type(engine_of(model)).__name__ == "CudaEngine"
    decoder = built_decoder(model, "cuda")
    assert all(decoder.captures(Bits(width, 16)) for width in (4, 5, 0))
    assert hf_mlspec.last_stats(model).capture_seconds > 0
    assert all(len(layer.qkv.tops) == len(layer.gate_up.tops) == 1 for layer in decoder._layers)


@pytest.mark.parametrize("levels", [[], ["planes4"], ["planes6", "planes3"]])
def test_whole_rounds_are_graphs_that_copy_what_is_not_resident(resident, levels, monkeypatch):
    """Replayed over and over, beside products of the modules that use the same slots."""
    model, ids = demo(plane_budget=budget_of(resident, 0.8)), torch.arange(5, 45, device=DEVICE)[None]
    source = source_of(model)
    how = {"assistant_models": levels, "return_dict_in_generate": True, **OPTIONS}
    how["speculation_config"] = hf_mlspec.SpeculationConfig(num_draft_tokens=4, engine="cuda", confidence_threshold=0)
    wanted, logits = resident.generate(ids, **how).sequences, resident(ids).logits
    for _ in range(3):
        out = model.generate(ids, **how)
        assert out.sequences.equal(wanted)
        assert out.speculation.planes.fetched_bytes > 0
        assert out.speculation.planes.ahead > out.speculation.planes.late
        assert model(ids).logits.equal(logits)
    assert hf_mlspec.last_stats(model).capture_seconds == 0  # the graphs of the first call
    assert len(source.residency.graphs) > 0
    kept = [own.kept for own in source.layers]
    for _ in range(4):  # only one layer is read: it does not stay, as graphs hold addresses
        last = next(own for own in reversed(source.layers) if not own.resident)
        last.linear.at_rows(torch.zeros(1, 1, last.linear.in_features, device=DEVICE, dtype=torch.bfloat16), [8])
    assert [own.kept for own in source.layers] == kept
    assert model.generate(ids, **how).sequences.equal(wanted)
    hf_mlspec.stream_planes(model, None)
    assert model.generate(ids, **how).sequences.equal(wanted)


def test_rows_join_rounds_whose_graphs_copy(resident):
    model = demo(plane_budget=budget_of(resident, 0.8))
    prompts = [list(range(5 + n, 25 + 3 * n)) for n in range(5)]
    how = {"max_batch": 2, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    found = [
        {tuple(one.request.input_ids): one.new_tokens for one in hf_mlspec.generate_stream(own, prompts, **how)}
        for own in (model, resident)
    ]
    assert found[0] == found[1]


def test_two_threads_replay_and_fetch_in_turns(resident):
    model, ids = demo(plane_budget=budget_of(resident, 0.8)), torch.arange(5, 45, device=DEVICE)[None]
    how = {"assistant_models": ["planes4"], **OPTIONS}
    wanted, logits, found = resident.generate(ids, **how), resident(ids).logits, {}

    def rounds() -> None:
        found["rounds"] = [model.generate(ids, **how).equal(wanted) for _ in range(4)]

    def modules() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            found["modules"] = [model(ids).logits.equal(logits) for _ in range(12)]
        stream.synchronize()

    threads = [threading.Thread(target=run) for run in (rounds, modules)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found["rounds"])
    assert all(found["modules"])


def test_no_memory_for_what_is_to_stay_is_an_error_and_nothing_leaks(resident, monkeypatch):
    model, ids = demo(plane_budget=budget_of(resident, 0.85)), torch.arange(5, 45, device=DEVICE)[None]
    source, wanted = source_of(model), resident(ids).logits
    plain, failed = source.room.keep, []

    def fails(fetch):
        failed.append(fetch.place)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(source.room, "keep", fails)
    last = next(own for own in reversed(source.layers) if not own.resident)
    x = torch.randn(1, 1, last.linear.in_features, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(12):
        try:
            last.linear.at_rows(x, [8])
        except torch.OutOfMemoryError:
            break
    assert failed == [last.place]
    assert not last.resident
    low = [source._low(own.place) for own in source.layers if own.resident]
    assert source.used == source.always + sum(low) <= source.budget
    assert source._missing == sum(own.lacks > 0 for own in source.layers)
    assert sorted([*source._free, *(own.slot for own in source._waiting.values())]) == list(range(source.slots))
    monkeypatch.setattr(source.room, "keep", plain)
    assert model(ids).logits.equal(wanted)


def test_a_gpu_that_is_full_leaves_the_model_on_the_host(resident, monkeypatch):
    model, ids = demo(None), torch.arange(5, 45)[None]
    wanted, plain = model(ids).logits, CudaRoom.put

    def fails(room, place, *args):
        if place == 20:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(room, place, *args)

    monkeypatch.setattr(CudaRoom, "put", fails)
    with pytest.raises(OSError, match="no place for the planes of model"):
        hf_mlspec.stream_planes(model, budget_of(resident, 0.8), device="cuda")
    assert {own.device.type for own in model.parameters()} == {"cpu"}
    assert model(ids).logits.equal(wanted)


def test_a_model_on_the_host_goes_to_the_gpu_layer_by_layer(resident):
    torch.cuda.synchronize()
    model = demo(None)
    torch.cuda.reset_peak_memory_stats()
    before, budget = torch.cuda.memory_allocated(), budget_of(resident, 0.8)
    hf_mlspec.stream_planes(model, budget, device="cuda")
    assert model.device.type == "cuda"
    ids = torch.arange(5, 45, device=DEVICE)[None]
    assert model(ids).logits.equal(resident(ids).logits)
    dense = sum(p.nbytes for name, p in model.named_parameters() if "weight_planes" not in name)
    assert torch.cuda.memory_allocated() - before <= budget + dense * 1.1 + (2 << 20)


def test_two_streams_and_threads_take_turns(resident):
    model, ids = demo(plane_budget=budget_of(resident, 0.8)), torch.arange(5, 45, device=DEVICE)[None]
    wanted, found = resident(ids).logits, {}

    def run(name: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(4):
                found[name] = model(ids).logits
        stream.synchronize()

    threads = [threading.Thread(target=run, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[name].equal(wanted) for name in range(2))


def test_a_failed_copy_is_an_error_and_the_next_call_is_right(resident, monkeypatch):
    model, ids = demo(plane_budget=budget_of(resident, 0.8)), torch.arange(5, 45, device=DEVICE)[None]
    store, wanted = source_of(model).store, resident(ids).logits
    good, last = store.planes, len(source_of(model).layers) - 1

    def fails(place: int, first: int, count: int) -> torch.Tensor:
        if place == last:
            raise PlaneError("the host lost the last layer")
        return good(place, first, count)

    monkeypatch.setattr(store, "planes", fails)
    with pytest.raises(PlaneError, match="lost the last layer"):
        model(ids)
    monkeypatch.setattr(store, "planes", good)
    hf_mlspec.clear(model)
    assert source_of(model).counts.fetched_bytes == 0
    assert model(ids).logits.equal(wanted)


def test_pageable_memory_where_pinning_is_refused(monkeypatch):
    def refuses(*shape, pin_memory: bool = False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*shape, **options)

    plain = torch.empty
    monkeypatch.setattr(torch, "empty", refuses)
    store = HostStore([(2, 16)], pin=True)
    store.put(0, torch.ones(2, 16, dtype=torch.uint8))
    assert not store.pinned
    assert "out of memory" in store.refusal
    assert store.planes(0, 0, 2).eq(1).all()


def test_what_spreads_a_model_is_refused_by_name():
    with pytest.raises(ValueError, match=r"device_map says balanced, .*name it, .*or say 'auto'"):
        demo("balanced", plane_budget="1GB")


_LOST = """
import torch
import hf_mlspec
from test_streamed_planes import DEVICE, OPTIONS, budget_of, demo, source_of
from hf_mlspec.routing.plane_store import PlaneError

model = demo()
budget = budget_of(model, 0.8)
hf_mlspec.stream_planes(model, budget)
ids, source = torch.arange(5, 45, device=DEVICE)[None], source_of(model)
wanted = model.generate(ids, assistant_models=["planes4"], **OPTIONS)

def begin_to_fetch():
    source.reset()
    source.expect(next(own.linear for own in source.layers if own.kept < own.low), 8)
    return source.layers[next(iter(source._waiting))].linear

linear = begin_to_fetch()
x = torch.zeros(1, 1, linear.in_features, device=DEVICE, dtype=torch.bfloat16)
torch._assert_async(torch.zeros((), device=DEVICE))  # between the fetch and its use
try:
    linear.at_rows(x, [8])
    torch.cuda.synchronize()
except RuntimeError as error:  # torch's or ours: the host may be ahead of the device
    print(type(error).__name__)
else:
    print("WRONG: the device is there")
for _ in range(2):
    try:
        begin_to_fetch()
    except PlaneError as error:
        print("told:", error)
for call in (lambda: model.generate(ids, assistant_models=["planes4"], **OPTIONS), lambda: model(ids)):
    try:
        call()
    except RuntimeError as error:
        print(type(error).__name__)
    else:
        print("WRONG: a call had an answer")
hf_mlspec.clear(model)
assert not any(vars(source.counts).values()), source.counts
assert sorted(source._free) == list(range(source.slots))
source.close()
print("closed", flush=True)
"""


def test_a_device_that_is_lost_between_a_fetch_and_its_use_is_an_error_and_nothing_leaks():
    here = Path(__file__).parent
    paths = str(here.parents[1]), os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-c", _LOST], cwd=here, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["closed"], done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    told = [line for line in lines if line.startswith("told: cuda:0, which holds planes of this model, was lost (")]
    assert len(told) == 2, done.stdout
