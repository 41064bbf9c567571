"""How is a round replayed? As a CUDA graph that ends with a copy to the host; on the CPU by running it."""

from __future__ import annotations

import time

import torch

from ...engines.cuda.steps import recorded
from .program import RoundProgram
from .state import RoundState


class RoundGraphs:
    """One graph for each number of rows that rounds were asked for, over the first rows of one state.

    seconds: the device's time for all rounds (on the CPU the wall time). capture_seconds: wall time of capturing. One
    round is under way at a time: `launch`, then `wait`.
    """

    def __init__(self, program: RoundProgram, state: RoundState):
        self.program, self.state = program, state
        self.on_gpu = state.tokens.is_cuda
        self.seconds = self.capture_seconds = 0.0
        self.batch = 0  # rows of the round under way, 0: none is
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._report = torch.empty(state.report.shape, dtype=torch.int32, pin_memory=self.on_gpu)
        if self.on_gpu:
            self._pool = torch.cuda.graph_pool_handle()
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def capture(self, batch: int) -> None:
        """Have a graph for `batch` rows; none of them moves. torch.OutOfMemoryError where it does not fit."""
        if not self.on_gpu or batch in self._graphs:
            return
        begin, state = time.perf_counter(), self.state.of_rows(batch)
        self._rehearse(state)
        self._graphs[batch] = recorded(lambda: self._enqueue(state, batch), state.tokens.device, self._pool)
        self.capture_seconds += time.perf_counter() - begin

    def launch(self, batch: int) -> None:
        """Start a round of the first `batch` rows, behind what the caller's stream has to do."""
        self.capture(batch)
        self.batch = batch
        if not self.on_gpu:
            begin = time.perf_counter()
            self._enqueue(self.state.of_rows(batch), batch)
            self.seconds += time.perf_counter() - begin
            return
        with torch.cuda.device(self.state.tokens.device):
            self._begin.record()
            self._graphs[batch].replay()
            self._end.record()

    def wait(self) -> list[list[int]]:
        """The report of the round under way, one line per row. The one wait of a round."""
        if self.on_gpu:
            self._end.synchronize()
            self.seconds += self._begin.elapsed_time(self._end) / 1000
        batch, self.batch = self.batch, 0
        return self._report[:batch].tolist()

    def _enqueue(self, state: RoundState, batch: int) -> None:
        self.program.enqueue(state)
        self._report[:batch].copy_(state.report, non_blocking=True)

    def _rehearse(self, state: RoundState) -> None:
        """Run a round of inactive rows: kernels are loaded, and what libraries set up at first use is there."""
        active = state.active.clone()
        state.active.zero_()
        self.program.enqueue(state)
        state.active.copy_(active)
