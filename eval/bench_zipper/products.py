"""How many microseconds does a GPU take for each part of a product with a weight in two parts?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from eval.gpu_timing import read_bandwidth, time_rotating
from hf_mlspec import ops
from hf_mlspec.formats import ZipperWeight
from hf_mlspec.formats.zipper import MODES

COPIES, CALLS = 4, 24  # of a weight: more than the L2 cache holds; of one graph
WARM = 0.3  # seconds of products in front of those of a mode, so that clocks are what they are under load
ROWS = (1, 8, 16, 32)


def lines(options: argparse.Namespace) -> Iterator[dict]:
    """One for each mode and number of rows; then the same codes in 6 bit-planes, one product without a split, and
    bfloat16. read_tb_s: of a sum over 4 GiB, in front of all and behind."""
    size, device = (512 if options.quick else 8192), torch.device("cuda")
    yield from _read(device)
    for mode in MODES:
        torch.manual_seed(0)
        weight = ZipperWeight.from_dense(torch.randn(size, size, device=device), mode=mode)
        held = [ops.prepack_zipper(*weight.parts) for _ in range(COPIES)]
        how = weight.how
        low_bytes, high_bytes = held[0].planes.nbytes, held[0].split.nbytes
        _warm(partial(ops.zipper_linear, torch.ones(16, size, device=device), held[0], size, how=how))
        for rows in ROWS:
            x, low = torch.randn(rows, size, device=device).bfloat16(), torch.randn(rows, size, device=device)
            calls = {
                "low_us": [partial(ops.zipper_low_linear, x, *tiles[:2], size, how=how) for tiles in held],
                "sums_us": [partial(ops.zipper_low_sums, x, *tiles[:2], size, how=how) for tiles in held],
                "high_us": [partial(ops.zipper_high_linear, x, low, tiles.split) for tiles in held],
                "both_us": [partial(ops.zipper_linear, x, tiles, size, how=how) for tiles in held],
            }
            for bits in (8, 4) if how.low_is_int4 else ():
                own = {"how": how, "activation_bits": bits}
                multiply = ops.zipper_low_linear
                calls[f"low_a{bits}_us"] = [partial(multiply, x, *tiles[:2], size, **own) for tiles in held]
                calls[f"both_a{bits}_us"] = [partial(ops.zipper_linear, x, tiles, size, **own) for tiles in held]
            times = {name: time_rotating(each, device, CALLS).microseconds for name, each in calls.items()}
            mib = {"low_mib": low_bytes / 2**20, "high_mib": high_bytes / 2**20}
            yield {"mode": mode, "size": size, "rows": rows, **times, **mib}
        del held
    yield from _unsplit(size, device)
    yield from _dense(size, device)
    yield from _read(device)


def _read(device: torch.device) -> Iterator[dict]:
    yield {"read_tb_s": read_bandwidth(device) / 1e12}


def _warm(work: Callable[[], object]) -> None:
    end = time.perf_counter() + WARM
    while time.perf_counter() < end:
        work()
        torch.cuda.synchronize()


def _unsplit(size: int, device: torch.device) -> Iterator[dict]:
    torch.manual_seed(0)
    weight = ZipperWeight.from_dense(torch.randn(size, size, device=device), mode="exact")
    planes, group = len(weight.weight_planes), 128
    scale = weight.weight_scale.expand(-1, size // group).contiguous()
    held = [ops.prepack_planes(weight.weight_planes, scale) for _ in range(COPIES)]
    how = {"group_size": group, "zero_doubled": 2**planes, "num_planes": planes}
    for rows in ROWS:
        x = torch.randn(rows, size, device=device).bfloat16()
        calls = [partial(ops.bitplane_linear, x, *tiles, size, **how) for tiles in held]
        mib = sum(tensor.nbytes for tensor in held[0]) / 2**20
        yield {"mode": f"{planes} bit-planes", "size": size, "rows": rows,
               "both_us": time_rotating(calls, device, CALLS).microseconds, "mib": mib}  # fmt: skip


def _dense(size: int, device: torch.device) -> Iterator[dict]:
    weights = [torch.randn(size, size, device=device).bfloat16() for _ in range(COPIES)]
    for rows in ROWS:
        x = torch.randn(rows, size, device=device).bfloat16()
        calls = [partial(ops.bf16_linear, x, weight) for weight in weights]
        yield {"mode": "bfloat16", "size": size, "rows": rows,
               "both_us": time_rotating(calls, device, CALLS).microseconds}  # fmt: skip
