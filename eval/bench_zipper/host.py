"""Does the CPU's part hide behind the GPU's? Each step of way (a) alone, and the whole call."""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from eval.gpu_timing import time_rotating
from hf_mlspec import ops
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.nn.switch import PrecisionSwitch
from hf_mlspec.nn.zipper import ZipperLinear
from hf_mlspec.nn.zipper_host import high_sums, worker_of

SHAPES = {"q|k|v": (6144, 4096), "o": (4096, 4096), "gate|up": (28672, 4096), "down": (4096, 14336)}
REPEATS = 15


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each linear and batch, and for each batch their sums: a layer, in the form of ZipperQuant's Table 8.
    Microseconds, medians."""
    shapes = {"small": (256, 256)} if options.quick else SHAPES
    layers: dict[int, Counter[str]] = {rows: Counter() for rows in options.batch}
    for name, (out, size) in shapes.items():
        torch.manual_seed(0)
        weight = ZipperWeight.from_dense(torch.randn(out, size, device="cuda"), mode=options.mode, high_part="host")
        linear = ZipperLinear(weight, None, PrecisionSwitch("zipper")).cuda()
        for rows in options.batch:
            x = torch.randn(rows, size, device="cuda").bfloat16()
            linear(x)
            steps = _steps(linear, x)
            alone = sum(steps.values())
            gpu = {"low_us": _low(linear, x), "device_us": _device(weight, x), "call_us": _wall(partial(linear, x))}
            times = {**steps, "host_us": alone, **gpu}
            layers[rows].update(times)
            yield _line(name, rows, times)
    for rows, times in layers.items():
        yield _line("layer", rows, times)


def _line(name: str, rows: int, times: Mapping[str, float]) -> dict:
    threads, hides = torch.get_num_threads(), times["host_us"] <= times["low_us"]
    return {"linear": name, "rows": rows, "threads": threads, **times, "hides": hides}


def _steps(linear: ZipperLinear, x: torch.Tensor) -> dict[str, float]:
    """What the worker's turn is made of, one after the other."""
    rows, worker = linear.high_on_host(), worker_of(x.device)
    needed = x if rows.columns is None else x.index_select(1, rows.columns)
    seen = torch.empty(needed.shape, dtype=x.dtype, pin_memory=True).copy_(needed)
    sums = torch.empty(len(x), linear.out_features, pin_memory=True)
    back = torch.empty(len(x), linear.out_features, device=x.device)

    def wake() -> None:
        worker._pool.submit(int).result()

    return {
        "copy_out_us": _wall(lambda: seen.copy_(needed, non_blocking=True)),
        "wake_us": _wall(wake),
        "cpu_us": _wall(lambda: high_sums(seen, [rows], sums)),
        "copy_back_us": _wall(lambda: back.copy_(sums, non_blocking=True)),
    }


def _wall(work: Callable[[], object]) -> float:
    """Microseconds until the device has done it."""
    found = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:]) * 1e6


def _low(linear: ZipperLinear, x: torch.Tensor) -> float:
    planes, scale, _ = linear.parts("weight")
    how = linear.how
    held = [(planes.clone(), scale) for _ in range(4)]
    calls = [lambda t=tiles: ops.zipper_low_sums(x, *t, linear.out_features, how=how) for tiles in held]
    return time_rotating(calls, x.device, 24).microseconds


def _device(weight: ZipperWeight, x: torch.Tensor) -> float:
    """Both parts on the GPU."""
    held = [ops.prepack_zipper(*weight.parts) for _ in range(3)]
    out, how = weight.out_features, weight.how
    calls = [lambda t=tiles: ops.zipper_linear(x, t, out, how=how) for tiles in held]
    return time_rotating(calls, x.device, 24).microseconds
