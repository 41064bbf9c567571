"""Do streamed planes compute what resident ones do, within their budget, and is what cannot be read an error?"""

from __future__ import annotations

import copy
import ctypes
import mmap
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
from hf_mlspec.engines.rows import new_kv
from hf_mlspec.nn.planes import PlanesLinear
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.precision import Bits
from hf_mlspec.routing import plane_store
from hf_mlspec.routing.plane_store import PlaneError

IDS = torch.arange(5, 21)[None]
OPTIONS = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
# What a GPU computes runs in plain torch here.
ENGINES = ["cuda", pytest.param("cpu", marks=pytest.mark.skipif(not has_compiled_decoder(), reason="not built"))]
BY_MODULE = hf_mlspec.SpeculationConfig(num_draft_tokens=3, engine="modules")


def demo(**streaming):
    planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32, **streaming)
    folder = hf_mlspec.demo_pair()[0]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=planes).eval()


def linears(model) -> list[PlanesLinear]:
    return [own for own in model.modules() if isinstance(own, PlanesLinear)]


def source_of(model):
    return linears(model)[0].source


@pytest.fixture(scope="module")
def resident():
    model = demo()
    model(IDS)
    return model


def bytes_of(model) -> int:
    return sum(part.nbytes for own in linears(model) for part in own.parts("weight")[:2])


@pytest.fixture
def streamed(resident):
    return demo(plane_budget=bytes_of(resident) * 85 // 100)


@pytest.mark.parametrize("share", [75, 85, 130])
def test_logits_are_those_of_the_resident_model_at_every_width(resident, share):
    model = demo(plane_budget=bytes_of(resident) * share // 100)
    for width in (8, 4, 8, 6, 2, 5, 8, 7):
        bits = f"planes{width}" if width < 8 else 16
        with hf_mlspec.precision_switch(model).at(bits), hf_mlspec.precision_switch(resident).at(bits):
            assert model(IDS).logits.equal(resident(IDS).logits), width
    counts = source_of(model).counts
    assert (counts.fetched_bytes > 0) == (share < 100)
    assert counts.hits > 0 or share < 85


def test_rows_of_different_widths_fetch_once(resident, streamed):
    x, widths = torch.randn(3, 2, linears(resident)[-1].in_features), [8, 3, 6]
    before = source_of(streamed).counts.late
    found = linears(streamed)[-1].at_rows(x, widths)
    assert found.equal(linears(resident)[-1].at_rows(x, widths))
    assert source_of(streamed).counts.late - before == 4


def test_a_chain_writes_the_ids_of_the_resident_model_and_fetches_ahead(resident, streamed):
    how = {"speculation_config": BY_MODULE, "return_dict_in_generate": True, **OPTIONS}
    wanted = resident.generate(IDS, assistant_models=["planes4"], **how)
    found = streamed.generate(IDS, assistant_models=["planes4"], **how)
    assert found.sequences.equal(wanted.sequences)
    assert wanted.speculation.planes is None
    planes = found.speculation.planes
    rounds = found.speculation.target_passes
    missing = [own for own in source_of(streamed).layers if not own.resident]
    assert planes.ahead + planes.late == 4 * len(missing) * rounds  # drafts read top planes only
    assert planes.late == 0
    assert found.speculation.to_dict()["planes"]["fetched_bytes"] == planes.fetched_bytes > 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("levels", [[], ["planes4"], ["planes6", "planes3"]])
def test_a_compiled_decoder_over_streamed_planes_writes_the_ids_of_that_over_resident_ones(
    resident, streamed, levels, engine
):
    compiled = hf_mlspec.SpeculationConfig(num_draft_tokens=3, engine=engine, confidence_threshold=0)
    how = {"assistant_models": levels, "speculation_config": compiled, "return_dict_in_generate": True, **OPTIONS}
    wanted, found = resident.generate(IDS, **how), streamed.generate(IDS, **how)
    assert found.sequences.equal(wanted.sequences)
    planes, missing = found.speculation.planes, [own for own in source_of(streamed).layers if not own.resident]
    assert planes.fetched_bytes > 0
    if levels == ["planes4"]:  # which reads no low plane: all are for the target, and its prompt
        passes = found.speculation.target_passes
        assert planes.ahead + planes.late in [4 * len(missing) * count for count in (passes, passes + 1)]
    assert streamed.generate(IDS, **how).sequences.equal(wanted.sequences)


@pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
def test_a_compiled_decoder_and_modules_read_the_planes_of_a_model_in_two_threads(streamed):
    row, passes = IDS[0].tolist(), 25
    engine = engine_of(streamed, name="cpu")
    engine.start(1, torch.device("cpu"))

    def by_decoder():
        torch.set_num_threads(2)  # of this thread: a team takes turns with other teams
        for _ in range(passes):
            engine.lengths = [0]
            engine.score([row], [[]])

    def by_modules():
        torch.set_num_threads(2)
        with torch.no_grad():
            for _ in range(passes):
                streamed(IDS)

    both = [threading.Thread(target=work, daemon=True) for work in (by_decoder, by_modules)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(120)
        assert not thread.is_alive(), "each waits for the other"


def test_a_compiled_decoder_scores_as_over_resident_planes_at_every_width(resident, streamed):

    def scored(model, width: int, tokens: int) -> torch.Tensor:
        decoder, counts = built_decoder(model, "cuda"), torch.full((1,), tokens, dtype=torch.int32)
        ids, starts = IDS[:, :tokens].int().contiguous(), torch.zeros(1, dtype=torch.int32)
        return decoder.forward(ids, starts, counts, new_kv(decoder, 1, 256), bits=Bits(width, 16))

    for width in (8, 4, 6, 1, 8, 3, 5):
        for tokens in (1, 4, 16):
            assert scored(streamed, width, tokens).equal(scored(resident, width, tokens)), (width, tokens)


def test_a_graph_can_hold_what_reads_top_planes_alone(resident, streamed):

    decoder, whole = built_decoder(streamed, "cuda"), built_decoder(resident, "cuda")
    assert [decoder.captures(Bits(width, 16)) for width in (2, 4, 5, 8, 0)] == [True, True, False, False, False]
    assert all(whole.captures(Bits(width, 16)) for width in (2, 4, 5, 8, 0))
    tops = [top[0].data_ptr() for layer in decoder._layers for top in layer.qkv.tops]
    for _ in range(3):
        streamed(IDS)
    assert tops == [top[0].data_ptr() for layer in decoder._layers for top in layer.qkv.tops]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("levels", [["planes4"], ["planes6", "planes3"]])
def test_a_fetch_that_fails_under_a_compiled_decoder_is_an_error_and_the_next_call_is_right(
    resident, streamed, monkeypatch, levels, engine
):
    config = hf_mlspec.SpeculationConfig(num_draft_tokens=3, engine=engine)
    how, plain, calls = {"assistant_models": levels, "speculation_config": config, **OPTIONS}, os.preadv, []

    def fails(*args):
        calls.append(args)
        if len(calls) > 90:
            raise OSError(5, "Input/output error")
        return plain(*args)

    monkeypatch.setattr(plane_store.os, "preadv", fails)
    with pytest.raises(PlaneError, match="Input/output error"):
        streamed.generate(IDS, **how)
    monkeypatch.setattr(plane_store.os, "preadv", plain)
    hf_mlspec.clear(streamed)
    assert sorted(source_of(streamed)._free) == list(range(source_of(streamed).slots))
    assert streamed.generate(IDS, **how).equal(resident.generate(IDS, **how))


def test_a_routed_draft_streams_what_its_widths_need(resident, streamed):
    from hf_mlspec.routing.blocks import blocks_of
    from hf_mlspec.routing.router import Router

    router = Router(blocks_of(streamed))
    config = hf_mlspec.SpeculationConfig(num_draft_tokens=3, router=router)
    out = streamed.generate(IDS, assistant_models=["routed"], speculation_config=config, **OPTIONS)
    assert out.equal(resident.generate(IDS, assistant_models=[], speculation_config=BY_MODULE, **OPTIONS))


def pages_held(tensor: torch.Tensor) -> int:
    """Bytes of whole pages within a tensor that memory stands behind."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE
    held = (ctypes.c_ubyte * max(count, 1))()
    if count > 0:
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first), ctypes.c_size_t(count * mmap.PAGESIZE), held) == 0
    return sum(own & 1 for own in held) * mmap.PAGESIZE


def test_memory_stands_behind_the_budget_only(resident, streamed):
    source = source_of(streamed)
    for _ in range(3):
        streamed(IDS)
    source.reset()
    low = [held[source.top :] for held in source.room._held]
    behind = [pages_held(own.flatten()) for own in low]
    for layer, held in zip(source.layers, behind, strict=True):
        assert (held > 0) == layer.resident, layer.place
    assert source.used <= source.budget
    assert sum(behind) <= source.budget - source.always
    assert sum(behind) < sum(own.nbytes for own in low)


def test_a_budget_below_the_top_planes_names_both_numbers(resident):
    with pytest.raises(ValueError, match=r"plane_budget is 100,000 bytes, and the first 4 planes .* take 4,\d+,\d+"):
        demo(plane_budget=100_000)
    model = demo()
    with pytest.raises(ValueError, match="give at least that, or fewer top_planes"):
        hf_mlspec.stream_planes(model, "100KB")
    assert source_of(model) is None
    assert model(IDS).logits.equal(resident(IDS).logits)


def test_layers_that_are_read_more_take_the_place_of_others(resident):
    model = demo(plane_budget=bytes_of(resident) * 80 // 100)
    source = source_of(model)
    wanted = next(own for own in reversed(source.layers) if not own.resident)
    x = torch.randn(1, 1, wanted.linear.in_features)
    for _ in range(12):
        wanted.linear.at_rows(x, [8])
        other = source.layers[0].linear
        other.at_rows(torch.randn(1, 1, other.in_features), [4])
    assert wanted.resident
    assert source.counts.evicted > 0
    assert source.used <= source.budget
    assert model(IDS).logits.equal(resident(IDS).logits)


def test_what_is_streamed_in_inference_mode_computes_outside_of_it(resident):
    model = demo()
    with torch.inference_mode():
        hf_mlspec.stream_planes(model, bytes_of(resident) * 85 // 100)
        model(IDS)
    assert model(IDS).logits.equal(resident(IDS).logits)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_file_is_an_error_that_names_it_and_no_token(streamed, damage):
    path = source_of(streamed).store.path
    hf_mlspec.clear(streamed)
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "changed":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
    with pytest.raises(PlaneError, match=str(path)):
        streamed.generate(IDS, assistant_models=["planes4"], speculation_config=BY_MODULE, **OPTIONS)


def test_a_fetch_that_fails_half_way_counts_nothing_and_the_next_call_is_right(resident, streamed, monkeypatch):
    plain, calls = os.preadv, []

    def fails(*args):
        calls.append(args)
        if len(calls) > 5:
            raise OSError(5, "Input/output error")
        return plain(*args)

    hf_mlspec.clear(streamed)
    monkeypatch.setattr(plane_store.os, "preadv", fails)
    with pytest.raises(PlaneError, match="Input/output error"):
        streamed(IDS)
    monkeypatch.setattr(plane_store.os, "preadv", plain)
    hf_mlspec.clear(streamed)
    source = source_of(streamed)
    assert vars(source.counts) == vars(type(source.counts)())
    assert sorted(source._free) == list(range(source.slots))
    assert streamed(IDS).logits.equal(resident(IDS).logits)


def test_short_reads_go_on(resident, streamed, monkeypatch):
    plain = os.preadv
    monkeypatch.setattr(plane_store.os, "preadv", lambda fd, views, at: plain(fd, [views[0][:1000]], at))
    assert streamed(IDS).logits.equal(resident(IDS).logits)


def test_two_generates_at_once_take_turns(resident, streamed):
    prompts = [IDS, IDS.flip(1)]
    how = {"assistant_models": ["planes4"], "speculation_config": BY_MODULE, **OPTIONS}
    wanted = [resident.generate(ids, **how) for ids in prompts]
    found = [None, None]

    def run(place: int) -> None:
        found[place] = streamed.generate(prompts[place], **how)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(own.equal(want) for own, want in zip(found, wanted, strict=True))


def test_it_ends_with_all_planes_in_memory_and_no_file(resident, streamed):
    path = source_of(streamed).store.path
    assert path.is_file()
    hf_mlspec.stream_planes(streamed, None)
    assert not path.parent.exists()
    assert source_of(streamed) is None
    assert streamed(IDS).logits.equal(resident(IDS).logits)
    assert streamed.generate(IDS, assistant_models=[], **OPTIONS).shape == (1, 32)  # compiled again


def test_the_file_goes_with_the_model(resident, tmp_path):
    model = demo(plane_budget=bytes_of(resident) * 85 // 100, plane_folder=tmp_path / "here")
    assert list((tmp_path / "here").glob("*/planes.safetensors"))
    source = source_of(model)
    source.close()
    source.close()
    assert not list((tmp_path / "here").iterdir())
    with pytest.raises(PlaneError, match="load the model again"):
        model(IDS)


def test_what_is_saved_is_whole_and_knows_no_budget(resident, streamed, tmp_path):
    streamed.save_pretrained(tmp_path)
    assert "plane_budget" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert again(IDS).logits.equal(resident(IDS).logits)
    hf_mlspec.stream_planes(again, bytes_of(resident) * 85 // 100)
    assert again(IDS).logits.equal(resident(IDS).logits)
    with pytest.raises(ValueError, match="MLSpecConfigWithPlaneBudget"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=hf_mlspec.MLSpecConfig(format="planes", plane_budget="6GiB")
        )


def test_what_a_streamed_model_cannot_do_is_refused(resident, streamed):
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        streamed.load_state_dict(resident.state_dict())
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(streamed)
    with pytest.raises(ValueError, match="streamed already"):
        hf_mlspec.stream_planes(streamed, "6GiB")
    with pytest.raises(RuntimeError, match="cannot be moved"):
        streamed.to("meta")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "int4", "plane_budget": "6GiB"}, "only bit-planes are streamed"),
        ({"format": "planes", "plane_budget": "six"}, "give bytes, or a word"),
        ({"format": "planes", "plane_budget": 0}, "give bytes, or a word"),
        ({"format": "planes", "plane_budget": "6GiB", "top_planes": 8}, "1 to 7 planes"),
        ({"format": "planes", "top_planes": 3}, "go with a plane_budget"),
    ],
)
def test_settings_are_checked_before_anything_is_read(settings, message):
    with pytest.raises(ValueError, match=message):
        hf_mlspec.MLSpecConfig(**settings)


@pytest.mark.parametrize("device_map", ["balanced", {"model": "cpu", "lm_head": "disk"}, {"": "disk"}])
def test_maps_that_spread_a_model_are_refused_by_name(device_map):
    with pytest.raises(ValueError, match=r"device_map says (balanced|.*disk), .*; plane_folder stands for offload_f"):
        AutoModelForCausalLM.from_pretrained(
            hf_mlspec.demo_pair()[0], device_map=device_map,
            quantization_config=hf_mlspec.MLSpecConfig(format="planes", group_size=32, plane_budget="6GiB"),
        )  # fmt: skip


def test_models_without_planes_and_with_too_few_are_refused():
    dense = AutoModelForCausalLM.from_pretrained(hf_mlspec.demo_pair()[0])
    with pytest.raises(ValueError, match="holds no bit-planes"):
        hf_mlspec.stream_planes(dense, "6GiB")
    with pytest.raises(ValueError, match="top_planes is 4 and the model has 3"):
        hf_mlspec.stream_planes(demo(num_planes=3), "6GiB")


def test_a_full_disk_is_known_before_anything_is_written(monkeypatch, tmp_path):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(plane_store.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="has room for 1,000 bytes"):
        hf_mlspec.stream_planes(demo(), "6GiB", folder=tmp_path)
    assert not list(Path(tmp_path).iterdir())


def test_a_host_without_room_for_a_thread_is_an_error_and_changes_nothing(resident, monkeypatch, tmp_path):
    model = copy.deepcopy(resident)

    def full(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(OSError, match="no thread can be started to read planes ahead"):
            hf_mlspec.stream_planes(model, "6GiB", folder=tmp_path)
    assert source_of(model) is None
    assert not list(Path(tmp_path).iterdir())
    assert model(IDS).logits.equal(resident(IDS).logits)


_SHORT_OF_MEMORY = """
import resource, sys
import torch
from transformers import AutoModelForCausalLM
import hf_mlspec

torch.set_num_threads(1)
planes = hf_mlspec.MLSpecConfig(format="planes", group_size=32)
model = AutoModelForCausalLM.from_pretrained(hf_mlspec.demo_pair()[0], dtype=torch.float32, quantization_config=planes)
ids = torch.arange(5, 21)[None]
options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0, "assistant_models": []}
wanted = model.generate(ids, **options)
hf_mlspec.clear(model)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 1_000_000, -1))
try:
    hf_mlspec.stream_planes(model, 6_000_000, top_planes=3, folder=sys.argv[1])
except OSError as error:
    print("refused:", error)
print(model.generate(ids, **options).equal(wanted))
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
hf_mlspec.stream_planes(model, 6_000_000, top_planes=3, folder=sys.argv[1])
print(model.generate(ids, **options).equal(wanted))
hf_mlspec.clear(model)
counts = next(own.source for own in model.modules() if getattr(own, "source", None) is not None).counts
print(counts.fetched_bytes, counts.hits, counts.ahead, counts.late)
hf_mlspec.stream_planes(model, None)
print(model.generate(ids, **options).equal(wanted))
"""


@pytest.mark.slow
def test_a_process_without_memory_keeps_its_model(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _SHORT_OF_MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    refused, *said = done.stdout.splitlines()
    assert refused.startswith("refused: ")
    assert said == ["True", "True", "0 0 0 0", "True"]
    assert not list(tmp_path.iterdir())
