"""How does the CPU add the sparse high part of a weight while a GPU multiplies with the low one?

    caller's stream   x ──┬── low part ──────────────────────────────┬── low + high
    side stream           └── x to pinned memory     high back ──────┘
    worker                             └── tables and terms ──┘

The caller goes on to the low part, then waits for the worker, not for the device: an error of the worker is an error
of the call. A row's bits depend on that row alone: the CPU's kernel gives it the same sums among any others.

Source: ZipperQuant (low bits on the GPU, sparse high bits on the CPU, at the same time).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..formats.zipper import GROUP, HEADER

_COLUMN = 12  # where a term's number of its group begins (formats/zipper/sparse.py)


class HostRows(NamedTuple):
    """The sparse rows of a weight in the host's memory: ``split`` in tiles (ops/zipper.py), whose terms number only
    the groups of inputs that they add. columns: int64 ``[n]`` on the GPU, the inputs of these groups; None: all."""

    split: Tensor
    columns: Tensor | None
    out_features: int

    @property
    def is_empty(self) -> bool:
        """Whether no weight has a high part."""
        return len(self.split) == HEADER + 2 * self.out_features + 1

    def in_tiles(self) -> Tensor:
        """``split`` as ``prepack_zipper`` made it, on the CPU."""
        if self.columns is None:
            return self.split
        groups = (self.columns[::GROUP] // GROUP).cpu()
        return self._renumbered(groups.to(torch.int32))

    def _renumbered(self, numbers: Tensor) -> Tensor:
        first = HEADER + 2 * self.out_features + 1
        head, terms = self.split[:first], self.split[first:]
        return torch.cat([head, terms & (1 << _COLUMN) - 1 | numbers[(terms >> _COLUMN).long()] << _COLUMN])


def to_host(split: Tensor, out_features: int, in_features: int) -> HostRows:
    """``split`` of ``prepack_zipper`` on a GPU -> its rows in the host's memory."""
    rows = HostRows(split.cpu(), None, out_features)
    groups = (rows.split[HEADER + 2 * out_features + 1 :] >> _COLUMN).unique()
    if len(groups) * GROUP == in_features or rows.is_empty:
        return rows
    numbers = torch.zeros(in_features // GROUP, dtype=torch.int32)
    numbers[groups.long()] = torch.arange(len(groups), dtype=torch.int32)
    columns = (groups.long()[:, None] * GROUP + torch.arange(GROUP)).flatten()
    return HostRows(rows._renumbered(numbers), columns.to(split.device), out_features)


class HostWorker:
    """A thread that adds the high parts of the layers on one GPU, and the stream of its copies."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.is_pinned = True
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf_mlspec-zipper")

    def begin(self, x: Tensor, weights: Sequence[HostRows]) -> Future:
        """Let the worker multiply bfloat16 x ``[n, in]`` with the high parts of weights that lie one behind the other.
        Only enqueues. RuntimeError while a graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("zipper: a high part on the host cannot be captured in a graph: use high_part='device'")
        columns = weights[0].columns if len(weights) == 1 else None
        ready, copied = torch.cuda.Event(), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            needed = x if columns is None else x.index_select(1, columns.to(x.device))
            x.record_stream(self.stream)
            seen = self._memory(needed.shape, needed.dtype)
            seen.copy_(needed, non_blocking=True)
            copied.record(self.stream)
        return self._pool.submit(self._work, seen, copied, weights, torch.get_num_threads())

    def finish(self, pending: Future) -> Tensor:
        """What the worker added: float32 ``[n, outputs of all]`` on the GPU, in the order of the current stream.
        Whatever the worker met is raised here."""
        high, done = pending.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        high.record_stream(current)
        return high

    @torch.no_grad()
    def _work(
        self, seen: Tensor, copied: torch.cuda.Event, weights: Sequence[HostRows], threads: int
    ) -> tuple[Tensor, torch.cuda.Event]:
        if torch.get_num_threads() != threads:  # each thread of a process has its own number
            torch.set_num_threads(threads)
        copied.synchronize()
        sums = high_sums(seen, weights)
        own = self._memory(sums.shape, sums.dtype).copy_(sums)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            high, done = own.to(self.device, non_blocking=True), torch.cuda.Event()
            done.record(self.stream)
        return high, done

    def _memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned where the system gives some: else each copy is made by the CPU, which is slow and right."""
        if self.is_pinned:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                self.is_pinned = False
                slow = "copies go through pages of the system, slowly"
                warnings.warn(f"zipper: no pinned memory on the host ({error}); {slow}", RuntimeWarning, stacklevel=2)
        return torch.empty(shape, dtype=dtype)


def high_sums(x: Tensor, weights: Sequence[HostRows]) -> Tensor:
    """bfloat16 x ``[n, in]`` on the CPU (of one weight: its columns) times high parts -> float32 ``[n, outputs]``."""
    parts = []
    for weight in weights:
        alone = len(weights) == 1 or weight.columns is None
        own = x if alone else x.index_select(1, weight.columns.cpu())
        none = torch.zeros(len(x), weight.out_features)
        parts.append(none if weight.is_empty else ops.zipper_high_linear(own.float(), none, weight.split))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@functools.cache
def worker_of(device: torch.device) -> HostWorker:
    """The one worker of a GPU."""
    return HostWorker(device)


def zipper_host_linear(x: Tensor, low: Tensor, pending: Future | None, bias: Tensor | None) -> Tensor:
    """float32 ``low [n, out]`` plus what the worker adds plus bias -> ``[n, out]`` in x.dtype. pending: of ``begin``;
    None: there is no high part, and nobody waits."""
    sums = low if pending is None else low + worker_of(x.device).finish(pending)
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def begun(x: Tensor, weights: Sequence[HostRows]) -> Future | None:
    """``HostWorker.begin`` of x ``[n, in]`` in any float dtype; None where there is nothing to add."""
    if x.numel() == 0 or all(weight.is_empty for weight in weights):
        return None
    return worker_of(x.device).begin(x.to(torch.bfloat16), weights)
