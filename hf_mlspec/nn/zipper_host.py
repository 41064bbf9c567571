"""How does the CPU add the sparse high part of a weight while a GPU multiplies with the low one?

    caller's stream   x ──┬── low part ──────────────────────────────┬── low + high
    side stream           └── x to pinned memory     high back ──────┘
    worker                             └── sums of outliers ──┘

The caller goes on to the low part, then waits for the worker, not for the device: an error of the worker is an error
of the call. A row's bits depend on that row alone: the CPU's kernel gives it the same sums among any others.

Source: ZipperQuant (low bits on the GPU, sparse high bits on the CPU, at the same time).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..formats.zipper import BLOCK, HEADER
from ..ops.zipper import dense_high, put_together, words_begin


class HostRows(NamedTuple):
    """The high part of a weight in the host's memory: ``split`` in tiles of a CPU (ops/zipper.py), of the inputs that
    it needs. columns: int64 ``[n]`` on the GPU, these inputs, a multiple of 32; None: all."""

    split: Tensor
    columns: Tensor | None
    out_features: int
    in_features: int

    @property
    def width(self) -> int:
        """How many inputs are read."""
        return self.in_features if self.columns is None else len(self.columns)

    @property
    def is_empty(self) -> bool:
        """Whether no weight has a high part."""
        return len(self.split) == words_begin(self.out_features, self.width)

    def in_tiles(self, device: torch.device) -> Tensor:
        """``split`` as ``prepack_zipper`` makes it there."""
        own = dense_high(self.split, self.out_features, self.width)
        high = own
        if self.columns is not None:
            high = own.new_zeros(self.out_features, self.in_features)
            high[:, self.columns.cpu()] = own
        header, step = self.split[:HEADER], _steps(self.split, self.out_features)
        return put_together(*(part.to(device) for part in (header, step, high)))


def _steps(split: Tensor, out_features: int) -> Tensor:
    return split[HEADER + 1 : HEADER + 1 + out_features].view(torch.float32)


def to_host(split: Tensor, out_features: int, in_features: int) -> HostRows:
    """``split`` of ``prepack_zipper`` on a GPU -> its rows in the host's memory."""
    high = dense_high(split, out_features, in_features)
    header, step, is_needed = split[:HEADER], _steps(split, out_features), high.any(0)
    count = -(-int(is_needed.sum()) // BLOCK) * BLOCK
    if count in (0, in_features):
        return HostRows(put_together(header, step, high, for_cpu=True).cpu(), None, out_features, in_features)
    columns = (~is_needed).to(torch.int8).argsort(stable=True)[:count].sort().values  # those needed, and some more
    own = put_together(header, step, high[:, columns], for_cpu=True)
    return HostRows(own.cpu(), columns, out_features, in_features)


class _Room:
    """Pinned memory of one call at a time: what the worker reads, what it writes, and the end of the copy of that."""

    def __init__(self) -> None:
        self.seen = self.sums = torch.empty(0, dtype=torch.uint8)
        self.done: torch.cuda.Event | None = None


class HostWorker:
    """A thread that adds the high parts of the layers on one GPU, and the stream of its copies."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.is_pinned = True
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hf_mlspec-zipper")
        self._rooms: deque[_Room] = deque()  # which no call uses

    def begin(self, x: Tensor, weights: Sequence[HostRows]) -> Future:
        """Let the worker multiply bfloat16 x ``[n, in]`` with the high parts of weights that lie one behind the other.
        Only enqueues. RuntimeError while a graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("zipper: a high part on the host cannot be captured in a graph: use high_part='device'")
        columns = weights[0].columns if len(weights) == 1 else None
        ready, copied = torch.cuda.Event(), torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        room = self._rooms.pop() if self._rooms else _Room()
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            needed = x if columns is None else x.index_select(1, columns.to(x.device))
            x.record_stream(self.stream)
            room.seen, seen = self._memory(room.seen, needed.shape, needed.dtype)
            seen.copy_(needed, non_blocking=True)
            copied.record(self.stream)
        return self._pool.submit(self._work, room, seen, copied, weights, torch.get_num_threads())

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
        self, room: _Room, seen: Tensor, copied: torch.cuda.Event, weights: Sequence[HostRows], threads: int
    ) -> tuple[Tensor, torch.cuda.Event]:
        if torch.get_num_threads() != threads:  # each thread of a process has its own number
            torch.set_num_threads(threads)
        if room.done is not None:
            room.done.synchronize()  # the copy of the call before, from the same memory
        outputs = sum(weight.out_features for weight in weights)
        room.sums, sums = self._memory(room.sums, (len(seen), outputs), torch.float32)
        copied.synchronize()
        high_sums(seen, weights, sums)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            high, done = sums.to(self.device, non_blocking=True), torch.cuda.Event()
            done.record(self.stream)
        room.done = done
        self._rooms.append(room)  # that of a call that failed goes with its error
        return high, done

    def _memory(self, held: Tensor, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What is held, or more where that is too little; and so much of it as has this shape."""
        nbytes = math.prod(shape) * dtype.itemsize
        if len(held) < nbytes:
            held = self._allocated(nbytes)
        return held, held[:nbytes].view(dtype).view(*shape)

    def _allocated(self, nbytes: int) -> Tensor:
        """Pinned where the system gives some: else each copy is made by the CPU, which is slow and right."""
        if self.is_pinned:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.is_pinned = False
                slow = "copies go through pages of the system, slowly"
                warnings.warn(f"zipper: no pinned memory on the host ({error}); {slow}", RuntimeWarning, stacklevel=2)
        return torch.empty(nbytes, dtype=torch.uint8)


def high_sums(x: Tensor, weights: Sequence[HostRows], sums: Tensor) -> None:
    """Write bfloat16 x ``[n, in]`` on the CPU (of one weight: its columns) times high parts to float32
    ``sums [n, outputs of all]``.

    Only our kernel reads and writes them: torch's own ops would wake a second pool of threads beside ours.
    """
    for weight, own in zip(weights, sums.split([weight.out_features for weight in weights], -1), strict=True):
        if weight.is_empty:
            own.zero_()
            continue
        alone = len(weights) == 1 or weight.columns is None
        ops.zipper_high_sums(x if alone else x.index_select(1, weight.columns.cpu()), weight.split, own)


@functools.cache
def worker_of(device: torch.device) -> HostWorker:
    """The one worker of a GPU."""
    return HostWorker(device)


def zipper_host_linear(x: Tensor, low: Tensor, pending: Future | None, bias: Tensor | None) -> Tensor:
    """float32 ``low [n, out]`` plus what the worker adds plus bias -> ``[n, out]`` in x.dtype. pending: of ``begin``;
    None: there is no high part, and nobody waits."""
    if pending is None:
        return (low if bias is None else low + bias.float()).to(x.dtype)
    high = worker_of(x.device).finish(pending)
    if bias is not None:
        low = low + high
        high = bias.float()
    if torch.is_grad_enabled():  # out= is refused where an operand has a gradient
        return (low + high).to(x.dtype)
    return torch.add(low, high, out=torch.empty_like(low, dtype=x.dtype))  # float32 sums, rounded once


def begun(x: Tensor, weights: Sequence[HostRows]) -> Future | None:
    """``HostWorker.begin`` of x ``[n, in]`` in any float dtype; None where there is nothing to add."""
    if x.numel() == 0 or all(weight.is_empty for weight in weights):
        return None
    return worker_of(x.device).begin(x.to(torch.bfloat16), weights)
