"""How is a round replayed? As a CUDA graph that ends with a copy to the host; on the CPU by running it."""

from __future__ import annotations

import time
from collections import OrderedDict

import torch
from torch import Tensor

from ...engines.cuda.steps import Recording, recorded
from .program import RoundProgram
from .state import RoundState

_KEPT = 16  # graphs, those used last; all share one pool, as large as the largest needs
_CAPTURE_OF_A_LAYER = 3e-4  # seconds, until a capture has shown it: ten kernels are run once and recorded


class RoundGraphs:
    """One graph for each program and number of rows that rounds were asked for, over the first rows of one state.

    seconds: the device's time for all rounds (on the CPU the wall time); round_seconds: for the last one; idle: how
    long the device waited for it. capture_seconds: wall time of capturing, of so many captured_layers. One round is
    under way at a time: `launch`, then `wait`.
    """

    def __init__(self, state: RoundState):
        self.state = state
        self.on_gpu = state.tokens.is_cuda
        self.seconds = self.round_seconds = self.idle = self.capture_seconds = 0.0
        self.captured_layers = 0
        self.batch = 0  # rows of the round under way, 0: none is
        self._graphs: OrderedDict[tuple[RoundProgram, int], Recording] = OrderedDict()
        self._reports: dict[RoundProgram, tuple[Tensor, Tensor]] = {}  # on the device, on the host
        self._program: RoundProgram | None = None
        if self.on_gpu:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(state.tokens.device)
            self._begin, self._end, self._before = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            self._ran = False

    @property
    def counts(self) -> tuple:
        """What goes on in other graphs of the same chain."""
        return self.seconds, self.round_seconds, self.idle, self.capture_seconds, self.captured_layers

    @counts.setter
    def counts(self, given: tuple) -> None:
        self.seconds, self.round_seconds, self.idle, self.capture_seconds, self.captured_layers = given

    def least_rows(self, program: RoundProgram, rows: int) -> int:
        """The smallest number of rows, this many or more, of which rounds are captured; 0: there is none."""
        return min((batch for one, batch in self._graphs if one is program and batch >= rows), default=0)

    def has(self, program: RoundProgram, batch: int) -> bool:
        """Whether a round of this many rows can be launched at once."""
        return not self.on_gpu or (program, batch) in self._graphs

    def seconds_to_capture(self, program: RoundProgram) -> float:
        """What a graph of this program is expected to take."""
        return self.seconds_of_layers(program.layers)

    def seconds_of_layers(self, layers: int) -> float:
        """What a graph of so many layers is expected to take."""
        known = self.capture_seconds / self.captured_layers if self.captured_layers else _CAPTURE_OF_A_LAYER
        return known * layers

    def capture(self, program: RoundProgram, batch: int) -> None:
        """Have a graph for `batch` rows; none of them moves. torch.OutOfMemoryError where it does not fit."""
        if self.has(program, batch):
            if self.on_gpu:
                self._graphs.move_to_end((program, batch))
            return
        begin, state = time.perf_counter(), self.state.of_rows(batch)
        while len(self._graphs) >= _KEPT:  # those of the target alone are what is left where memory is short,
            # but rounds that read what rows lack: without them it is read before
            spared = next(iter(self._graphs))
            del self._graphs[next((key for key in self._graphs if key[0].active or key[0].lead > 1), spared)]
        self._rehearse(program, state)
        device = state.tokens.device
        self._graphs[program, batch] = recorded(
            lambda: self._enqueue(program, state, batch), device, self._pool, self._stream, program.plane_sources
        )
        self.capture_seconds += time.perf_counter() - begin
        self.captured_layers += program.layers

    def launch(self, program: RoundProgram, batch: int) -> None:
        """Start a round of the first `batch` rows, behind what the caller's stream has to do."""
        self.capture(program, batch)
        self.batch, self._program = batch, program
        if not self.on_gpu:
            begin = time.perf_counter()
            self._enqueue(program, self.state.of_rows(batch), batch)
            self.round_seconds = time.perf_counter() - begin
            return
        with torch.cuda.device(self.state.tokens.device):
            self._before, self._end = self._end, self._before
            self._begin.record()
            self._graphs[program, batch].replay()
            self._end.record()

    def wait(self) -> list[list[int]]:
        """The report of the round under way, one line per row. The one wait of a round."""
        if self.on_gpu:
            self._end.synchronize()
            self.round_seconds = self._begin.elapsed_time(self._end) / 1000
            self.idle = self._before.elapsed_time(self._begin) / 1000 if self._ran else 0.0
            self._ran = True
        self.seconds += self.round_seconds
        batch, self.batch = self.batch, 0
        _, host = self._report(self._program)
        return host[:batch].tolist()

    def _report(self, program: RoundProgram) -> tuple[Tensor, Tensor]:
        """What rounds of a program report, on the device and on the host: int32 ``[batch, fields]``."""
        if program not in self._reports:
            shape = len(self.state.streams), program.fields
            self._reports[program] = (
                torch.zeros(shape, dtype=torch.int32, device=self.state.tokens.device),
                torch.empty(shape, dtype=torch.int32, pin_memory=self.on_gpu),
            )
        return self._reports[program]

    def _enqueue(self, program: RoundProgram, state: RoundState, batch: int) -> None:
        report, host = self._report(program)
        program.enqueue(state, report[:batch])
        host[:batch].copy_(report[:batch], non_blocking=True)

    def _rehearse(self, program: RoundProgram, state: RoundState) -> None:
        """Run a round of inactive rows: kernels are loaded, and what libraries set up at first use is there."""
        active = state.active.clone()
        state.active.zero_()
        report, _ = self._report(program)
        program.enqueue(state, report[: len(state.streams)])
        state.active.copy_(active)
