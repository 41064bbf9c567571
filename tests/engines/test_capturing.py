"""Does nothing of ours wait for a whole GPU, or free its cached memory, while another thread captures a graph?

The device is played here: it refuses what CUDA and torch refuse while a stream captures, and a capture beside which
somebody waited for the device is spoiled.
"""

from __future__ import annotations

import ast
import gc
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import hf_mlspec
from hf_mlspec.engines.built import up_to_date
from hf_mlspec.engines.capturing import capturing, free_cached, wait_for
from hf_mlspec.engines.cuda.steps import recorded
from hf_mlspec.routing.plane_counting import PlaneCounting
from hf_mlspec.routing.plane_loader import PlaneLoader

CPU = torch.device("cpu")
PATIENCE = 20.0  # seconds after which a thread that has not ended hangs


class Device:
    """calls: what it was asked, in turn. captures: whether a stream of it does."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.captures = self.spoiled = False

    def synchronize(self, device=None) -> None:
        self.calls.append("synchronize")
        if self.captures:
            self.spoiled = True
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")
        if self.captures:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def graph(self) -> Graph:
        return Graph(self)


class Graph:
    def __init__(self, device: Device):
        self.device = device

    def capture_begin(self, *pool, capture_error_mode: str) -> None:
        assert not self.device.captures, "two captures at a time hold back the collection of garbage in turns"
        self.device.calls.append(f"begin {capture_error_mode}")
        self.device.captures, self.device.spoiled = True, False

    def capture_end(self) -> None:
        self.device.calls.append("end")
        self.device.captures = False
        if self.device.spoiled:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


@pytest.fixture
def device(monkeypatch) -> Device:
    played = Device()
    monkeypatch.setattr(torch.cuda, "synchronize", played.synchronize)
    monkeypatch.setattr(torch.cuda, "empty_cache", played.empty_cache)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", played.graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda given: nullcontext())
    return played


def began(work, *given) -> tuple[threading.Thread, list]:
    """A thread that does this work, and the error it ended in."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work(*given)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def ended(*threads: tuple[threading.Thread, list]) -> list[BaseException]:
    """The errors of threads, all of which end."""
    for thread, _ in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread, _ in threads), "a thread hangs"
    return [error for _, errors in threads for error in errors]


class Capture:
    """A capture in a thread of its own. inside: it has begun; `end` lets it go on and waits for it."""

    def __init__(self, error: BaseException | None = None):
        self.inside, self._goes_on, self._error = threading.Event(), threading.Event(), error
        self.thread = began(recorded, self._run, CPU)
        assert self.inside.wait(PATIENCE)

    def _run(self) -> None:
        self.inside.set()
        assert self._goes_on.wait(PATIENCE)
        if self._error is not None:
            raise self._error

    def end(self) -> list[BaseException]:
        self._goes_on.set()
        return ended(self.thread)


def test_one_thread_asks_a_device_for_what_it_always_asked(device):
    recorded(lambda: device.calls.append("run"), CPU)
    assert device.calls == ["synchronize", "empty_cache", "begin thread_local", "run", "end"]
    device.calls.clear()
    wait_for(CPU)
    free_cached()
    assert device.calls == ["synchronize", "empty_cache"]


def test_who_waits_for_the_device_by_himself_spoils_a_capture(device):
    """As it was seen on a GPU: an error in either thread."""
    capture = Capture()
    with pytest.raises(torch.AcceleratorError, match="not permitted"):
        torch.cuda.synchronize()
    (error,) = capture.end()
    assert "previous error during capture" in str(error)


@pytest.mark.parametrize("work", [lambda: wait_for(CPU), free_cached, lambda: recorded(lambda: None, CPU)],
                         ids=["wait", "free", "capture"])  # fmt: skip
def test_what_a_capture_forbids_comes_behind_it(device, work):
    capture, before = Capture(), len(device.calls)
    other = began(work)
    other[0].join(0.1)
    assert other[0].is_alive()
    assert len(device.calls) == before  # it has asked for nothing as yet
    assert capture.end() == []
    assert ended(other) == []


def test_a_decoder_is_built_behind_a_capture_and_waits_for_the_device_meanwhile(device, tiny_model):
    """Who builds holds the lock, and gets it again where he waits for the device."""

    class Kind:
        def __init__(self, model):
            wait_for(CPU)
            free_cached()

    capture = Capture()
    built = began(up_to_date, tiny_model("llama"), Kind)
    built[0].join(0.1)
    assert built[0].is_alive()
    assert capture.end() == []
    assert ended(built) == []


@pytest.mark.parametrize("spoiled", [False, True], ids=["its work", "its end"])
def test_a_capture_that_fails_lets_others_go_on(device, spoiled):
    capture = Capture(None if spoiled else ValueError("a kernel"))
    device.spoiled = spoiled
    other = began(recorded, lambda: None, CPU)
    (error,) = capture.end()
    assert isinstance(error, torch.AcceleratorError if spoiled else ValueError)
    assert ended(other) == []
    assert gc.isenabled()


def test_garbage_is_collected_again_behind_captures_of_many_threads(device):
    def run() -> None:
        assert not gc.isenabled()

    def captures() -> None:
        for _ in range(50):
            recorded(run, CPU)
            wait_for(CPU)
            free_cached()

    assert ended(*[began(captures) for _ in range(6)]) == []
    assert gc.isenabled()
    assert device.calls.count("begin thread_local") == 300


@pytest.mark.parametrize("how", ["close", "give_back"])
def test_streamed_planes_end_behind_a_capture_that_reads_them(how):
    """Captures take the loader's lock inside of theirs; who ends a loader takes both, too, and in the same order."""
    loader = PlaneLoader.__new__(PlaneLoader)
    loader._lock, loader._open, loader._waiting, loader._place_of = threading.RLock(), False, {}, {}
    loader._counting = PlaneCounting()
    inside, goes_on = threading.Event(), threading.Event()

    def capture() -> None:
        with capturing:
            inside.set()
            goes_on.wait(PATIENCE)
            with loader._lock:
                pass

    captures = began(capture)
    assert inside.wait(PATIENCE)
    ends = began(getattr(loader, how))
    ends[0].join(0.1)
    assert ends[0].is_alive()
    goes_on.set()
    assert ended(captures, ends) == []


def test_calls_streams_and_a_call_that_is_waited_for_go_on_beside_captures(device, tiny_model, ids):
    """Rounds as on GPUs, played on the CPU: eight calls in threads, a stream whose caller waits for a call in another
    thread between two requests, and captures all along."""
    how = {"assistant_models": ["prompt_lookup"], "speculation_config": {"engine": "cuda"}, "max_new_tokens": 6}
    model, over = tiny_model("llama", torch.bfloat16), threading.Event()
    model.generation_config.pad_token_id = 0
    right = model.generate(ids, do_sample=False, **how)

    def call() -> None:
        for _ in range(2):
            assert torch.equal(model.generate(ids, do_sample=False, **how), right)

    def requests():
        for row in ids.tolist():
            assert ended(began(call)) == []
            yield hf_mlspec.Request(row, max_new_tokens=6)

    def stream() -> None:
        own = {name: how[name] for name in ("assistant_models", "speculation_config")}
        done = list(hf_mlspec.generate_stream(model, requests(), max_batch=2, **own))
        assert all(one.error is None for one in done)
        assert len(done) == len(ids)

    def captures() -> None:
        while not over.wait(0.001):
            recorded(lambda: over.wait(0.002), CPU)
            wait_for(CPU)

    beside = began(captures)
    errors = ended(*[began(call) for _ in range(8)], began(stream))
    over.set()
    assert ended(beside) == errors == []


WAITS = {"synchronize", "empty_cache", "capture_begin", "graph", "make_graphed_callables"}
# The lock is there; it is held (who captures; the loader of a room); a device with an error that it does not recover
# from is asked whether it is lost.
MAY = {"engines/capturing.py": ["synchronize", "empty_cache"],
       "engines/cuda/steps.py": ["synchronize", "empty_cache", "capture_begin"],
       "routing/plane_room_cuda.py": ["synchronize"], "routing/lost_device.py": ["synchronize"]}  # fmt: skip


def test_no_other_place_waits_for_a_whole_device_or_captures():
    package, found = Path(hf_mlspec.__file__).parent, {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in WAITS and (owner == "torch.cuda" or node.func.attr == "capture_begin"):
                found.setdefault(path.relative_to(package).as_posix(), []).append(node.func.attr)
    assert found == MAY
