"""When does each step of way (a) begin and end? One call of a linear, as the host's clock saw it."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from unittest import mock

import torch
from torch import Tensor

from hf_mlspec.formats import ZipperWeight
from hf_mlspec.nn import zipper_host
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.nn.zipper_host import HostRows, HostWorker

from .host import SHAPES

CALLS = 25


class WatchedWorker(HostWorker):
    """Writes down when each of its steps ended; ``times`` in seconds of `time.perf_counter`."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.times: dict[str, float] = {}

    def begin(self, x: Tensor, weights: Sequence[HostRows]) -> Future:
        """As `HostWorker.begin`."""
        pending = super().begin(x, weights)
        self.times["begun"] = time.perf_counter()
        return pending

    def _work(self, room, seen: Tensor, copied: torch.cuda.Event, weights: Sequence[HostRows], threads: int):
        self.times["woken"] = time.perf_counter()
        copied.synchronize()
        self.times["copied_out"] = time.perf_counter()
        with mock.patch.object(zipper_host, "high_sums", self._timed_sums):
            found = super()._work(room, seen, copied, weights, threads)
        self.times["sent_back"] = time.perf_counter()
        found[1].synchronize()
        self.times["received"] = time.perf_counter()
        return found

    def _timed_sums(self, x: Tensor, weights: Sequence[HostRows], sums: Tensor) -> None:
        _high_sums(x, weights, sums)
        self.times["multiplied"] = time.perf_counter()


_high_sums = zipper_host.high_sums


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each linear and batch: microseconds from the call's begin to the end of each step, medians.

    begun: copies and the worker's turn are enqueued; woken: the worker has it; copied_out: x is in the host's memory;
    multiplied; sent_back: the copy back is enqueued; received: it is done; returned: the caller has its result;
    all_done: the GPU has added it."""
    shapes = {"small": (256, 256)} if options.quick else {name: SHAPES[name] for name in ("o", "gate|up")}
    worker = WatchedWorker(torch.device("cuda", torch.cuda.current_device()))
    with mock.patch.object(zipper_host, "worker_of", return_value=worker):
        for name, (out, size) in shapes.items():
            torch.manual_seed(0)
            dense = torch.randn(out, size, device="cuda")
            weight = ZipperWeight.from_dense(dense, mode=options.mode, high_part="host")
            linear = ZipperLinear(weight, None, PrecisionSwitch("zipper")).cuda()
            for rows in options.batch:
                x = torch.randn(rows, size, device="cuda").bfloat16()
                found = [_one_call(linear, worker, x) for _ in range(CALLS + 3)][3:]
                middle = {key: statistics.median(each[key] for each in found) for key in found[0]}
                yield {"linear": name, "rows": rows, "threads": torch.get_num_threads(), **middle}


def _one_call(linear: ZipperLinear, worker: WatchedWorker, x: Tensor) -> dict[str, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    linear(x)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    times = {**worker.times, "returned": returned, "all_done": time.perf_counter()}
    return {f"{step}_us": (at - begin) * 1e6 for step, at in times.items()}
