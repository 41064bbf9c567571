"""How long does something take on this device, and how fast does its memory read at that moment?

On a GPU calls are captured in a CUDA graph and replayed, so that no launch from Python is part of the time; on a CPU
they are made one after the other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

REPEATS = 20
WARM_REPEATS = 3
PROBE_BYTES = 1 << 32  # far beyond any cache; a quarter of it on a CPU would do, and --quick takes less


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median and smallest of `repeats` measurements."""

    median: float
    least: float
    repeats: int

    @property
    def microseconds(self) -> float:
        return self.median * 1e6


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def capture(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """What repeats `work` exactly: the replay of a CUDA graph of it, or `work` itself on a CPU.

    `work` runs twice before it is captured, so that libraries pick their kernels and allocate outside of the graph.
    """
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_each(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> Timing:
    """Seconds of one `work()`, which only has to be enqueued: measured by events on a GPU."""
    for _ in range(WARM_REPEATS):
        work()
    synchronize(device)
    seconds = [_event_seconds(work, device) for _ in range(repeats)]
    return Timing(statistics.median(seconds), min(seconds), repeats)


def _event_seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def time_rotating(
    calls: Sequence[Callable[[], object]], device: torch.device, count: int, repeats: int = REPEATS
) -> Timing:
    """Seconds of one call, of `count` in one graph that go round through `calls` (one for each copy of a weight)."""

    def work() -> None:
        for at in range(count):
            calls[at % len(calls)]()

    found = time_each(capture(work, device), device, repeats)
    return Timing(found.median / count, found.least / count, found.repeats)


def read_bandwidth(device: torch.device, nbytes: int = PROBE_BYTES) -> float:
    """Bytes a second of a float32 sum over `nbytes`."""
    memory = torch.ones(nbytes // 4, device=device)
    found = time_rotating([memory.sum], device, 2)
    return memory.nbytes / found.median


def wall_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call from Python, everything it enqueued included."""
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin
