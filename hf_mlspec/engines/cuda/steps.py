"""How does a step whose shape comes again run without Python between its kernels? As a graph, from the third time on.

Where whole rounds cannot be captured, single forward passes can: their operands are copied to fixed addresses.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...nn.plane_source import InGraph, PlaneSource
from ...nn.state import say_once
from ...ops.delta import AT_START
from ...precision import Bits
from ..capturing import capturing
from ..memory import out_of_memory
from .decoder import CudaDecoder
from .row_bits import BlockBits
from .states import DeltaStates

_AFTER = 2  # steps of a shape that run before it is captured: prompts come once, rounds again and again
_BACKOFF = 4  # as many times more before each further time: to capture a shape takes as long as several steps of it
_MOST_TOKENS = 128  # larger steps keep the device busy while Python launches the next kernel
_KEPT = 8  # graphs, those used last


class Recording:
    """A CUDA graph, and what it copies of streamed planes, from each of their sources."""

    def __init__(self, graph: torch.cuda.CUDAGraph, fetches: Sequence[tuple[PlaneSource, InGraph]] = ()):
        self._graph, self._fetches = graph, fetches

    def replay(self) -> None:
        """Enqueue it on the current stream."""
        with ExitStack() as stack:
            for source, own in self._fetches:
                stack.enter_context(source.replaying(own))
            self._graph.replay()


@dataclass
class _Step:
    """A captured step, what it reads and what it writes."""

    graph: Recording
    operands: tuple[Tensor, ...]
    logits: Tensor


class CudaSteps:
    """Forward passes of a decoder, of one engine and its cache."""

    def __init__(self, model: nn.Module, decoder: CudaDecoder):
        self.model, self.decoder = model, decoder
        self._seen: Counter[tuple] = Counter()  # steps of a shape since it last had a graph
        self._captured: Counter[tuple] = Counter()
        self._steps: OrderedDict[tuple, _Step] = OrderedDict()
        self._addresses: tuple | None = None
        self._captures = decoder.device.type == "cuda"

    def forward(
        self, ids: Tensor, starts: Tensor, counts: Tensor, kv: Tensor, *, pick: Tensor | None,
        bits: Bits | BlockBits, draft_window: int = 0, states: DeltaStates | None = None, settles: int = AT_START,
    ) -> Tensor:  # fmt: skip
        """As `CudaDecoder.forward`; the logits hold until the next step."""
        operands = (ids, starts, counts, *(() if pick is None else (pick,)))
        how = {"bits": bits, "draft_window": draft_window, "states": states, "settles": settles}
        said = bits if isinstance(bits, Bits) else bits.key
        shape = (*ids.shape, None if pick is None else len(pick), said, draft_window, settles)
        step = self._step(shape, operands, kv, how)
        if step is None:
            return self.decoder.forward(ids, starts, counts, kv, pick=pick, **how)
        for fixed, given in zip(step.operands, operands, strict=True):
            fixed.copy_(given)
        step.graph.replay()
        return step.logits

    def _step(self, shape: tuple, operands: tuple[Tensor, ...], kv: Tensor, how: dict) -> _Step | None:
        """The graph of a shape that came often enough, over this cache."""
        if not self._captures or operands[0].numel() > _MOST_TOKENS or not self.decoder.captures(how["bits"]):
            return None
        addresses = kv.data_ptr(), kv.stride(), self.decoder.positions
        addresses += () if how["states"] is None else how["states"].addresses
        if addresses != self._addresses:  # the cache, or the rotary tables, have moved
            for lost in list(self._steps):
                self._let_go(lost)
            self._addresses = addresses
        self._seen[shape] += 1
        if shape not in self._steps and self._seen[shape] > _AFTER * _BACKOFF ** self._captured[shape]:
            self._capture(shape, operands, kv, how)
        if shape in self._steps:
            self._steps.move_to_end(shape)
        return self._steps.get(shape)

    def _capture(self, shape: tuple, operands: tuple[Tensor, ...], kv: Tensor, how: dict) -> None:
        if len(self._steps) == _KEPT:
            self._let_go(next(iter(self._steps)))
        self._captured[shape] += 1
        fixed = tuple(operand.clone() for operand in operands)
        pick = fixed[3] if len(fixed) > 3 else None
        results: list[Tensor] = []

        def run() -> None:
            results.append(self.decoder.forward(*fixed[:3], kv, pick=pick, **how))

        try:
            graph = recorded(run, self.decoder.device, sources=self.decoder.plane_sources)
            self._steps[shape] = _Step(graph, fixed, results[0])
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self._captures = False
            say_once(self.model, f"steps of {shape[0]} rows are launched kernel by kernel: not enough memory to "
                                 "capture them")

    def _let_go(self, shape: tuple) -> None:
        del self._steps[shape]
        self._seen[shape] = 0


def recorded(
    run: Callable[[], None], device: torch.device, pool=None, stream=None, sources: Iterable[PlaneSource] = ()
) -> Recording:
    """What `run` enqueues, as a graph, captured on `stream`, or one of its own; the device has run the like before.

    sources: of streamed planes that it may read, of which those count whose copies a graph can hold. Graphs of one
    pool that are captured on one stream share memory: no two of them may run at a time.
    """
    graph, fetches = torch.cuda.CUDAGraph(), []
    stream = stream or torch.cuda.Stream(device)
    with capturing, _no_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is free becomes the graph's
        _room_for_seeds(device)
        graph.capture_begin(*(() if pool is None else (pool,)), capture_error_mode="thread_local")
        try:
            with ExitStack() as stack:
                for source in sources:
                    if source.copies_in_graphs:
                        fetches.append((source, stack.enter_context(source.captured())))
                run()
        finally:
            graph.capture_end()
    return Recording(graph, [(source, own) for source, own in fetches if own.reads_low])


def _room_for_seeds(device: torch.device) -> None:
    """Memory for the seed and offset that torch allocates as it begins a capture, left to it in its cache.

    Without memory for them torch (2.11) raises an error, and the process ends as soon as the graph is freed.
    """
    torch.empty(2, 512, dtype=torch.uint8, device=device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is left alone meanwhile: a graph in it frees device memory, which ends a process that captures."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
