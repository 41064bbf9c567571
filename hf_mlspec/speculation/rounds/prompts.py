"""How does a stream read short prompts of rows that join by one replay, where that saves time?

To launch the kernels of a pass of a small model takes longer than to run them, and rows join a stream again and again.
A graph holds addresses, and rows join in any place: so it reads into rows of its own, from which keys and values are
copied to theirs. A token's bits do not depend on where it lies or what is read beside it (invariant 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ...engines.cuda.engine import int32, padded
from ...engines.cuda.steps import Recording, recorded
from ...engines.memory import out_of_memory
from ...engines.rows import new_kv, up_to_growth
from ..draft import Rows
from .graphs import RoundGraphs
from .program import RoundLevel
from .reading import read

_ROWS = (1, 2, 4, 8)  # that a graph reads
_WIDTHS = (32, 64, 128)  # tokens of each, padding among them
_MOST = 256  # tokens of a graph: more keep the device busy while kernels are launched


@dataclass
class _Graph:
    """Reads what is in `operands`, int32: ids, then how many of each row are tokens. recording: None on the CPU, where
    its kernels are run one by one."""

    operands: Tensor
    recording: Recording | None


class PromptGraphs:
    """The graphs of one level. Each is captured once reading kernel by kernel has cost as much more as that takes."""

    def __init__(self, level: RoundLevel):
        self.decoder, self.bits, self.cache_format = level.decoder, level.bits, level.cache_format
        alone = level.decoder.ranks is None  # else one process, by its clock, would capture before the others
        stateless = level.states is None and not level.decoder.num_recurrent
        self.works = alone and stateless and level.decoder.captures(level.bits)
        self._graphs: dict[tuple[int, int, int], _Graph] = {}
        self._fingerprint = level.decoder.fingerprint
        self._kv: Tensor | None = None
        self._lost = 0.0  # seconds that graphs would have saved
        self._on_gpu = level.decoder.device.type == "cuda"
        if self._on_gpu:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(level.decoder.device)

    def read(
        self, level: RoundLevel, places: list[int], rows: Rows, cached: list[int], draft_window: int, of_layer: float,
        rounds: RoundGraphs,
    ) -> int:  # fmt: skip
        """As `read`. of_layer: about the seconds that the device takes for a layer. rounds: know what graphs take."""
        shape = self.shape(rows, draft_window)
        if shape is None:
            return read(level, places, rows, cached, draft_window)
        if self.replayed(shape, level.kv, places, rows):
            return 1
        begin, layers = perf_counter(), level.decoder.num_layers
        steps = read(level, places, rows, cached, draft_window)
        launching = perf_counter() - begin
        seconds = self.took(shape, launching, of_layer * layers, rounds.seconds_of_layers(layers))
        if seconds:
            rounds.capture_seconds += seconds
            rounds.captured_layers += layers
        return steps

    def shape(self, rows: Rows, draft_window: int) -> tuple[int, int, int] | None:
        """The graph that reads such rows, whole: what a cache has of them is written again, with the same bits. None
        where there is none of so many tokens."""
        if not self.works or not rows or not all(rows) or len(rows) > _ROWS[-1]:
            return None
        count = next(count for count in _ROWS if len(rows) <= count)
        width = next((width for width in _WIDTHS if max(map(len, rows)) <= width), _MOST + 1)
        return (count, width, draft_window) if count * width <= _MOST else None

    def took(self, shape: tuple[int, int, int], launching: float, running: float, price: float) -> float:
        """Rows of this shape were read kernel by kernel, which took so many seconds to launch and about so many to
        run. -> seconds spent on a graph, which takes about `price`."""
        self._lost += launching - running
        if self._lost < price:
            return 0.0
        begin, self._lost = perf_counter(), 0.0
        try:
            self._capture(shape)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.works, self._kv = False, None
            self._graphs.clear()
        return perf_counter() - begin

    def replayed(self, shape: tuple[int, int, int], kv: Tensor, places: list[int], rows: Rows) -> bool:
        """Read rows into these places of a cache, if there is a graph for it. Only enqueues."""
        if self._fingerprint != self.decoder.fingerprint:  # weights or rotary tables have moved
            self._graphs.clear()
            self._fingerprint = self.decoder.fingerprint
        if (graph := self._graphs.get(shape)) is None:
            return False
        count, width, window = shape
        lines = [*rows, *([[]] * (count - len(rows)))]
        given = [token for line in padded(lines, width) for token in line] + list(map(len, lines))
        graph.operands.copy_(int32(given, self.decoder), non_blocking=True)
        if graph.recording is None:
            self._enqueue(graph.operands, count, width, window)
        else:
            graph.recording.replay()
        for r, (place, row) in enumerate(zip(places, rows, strict=True)):
            kv[:, :, place, :, : len(row)] = self._kv[:, :, r, :, : len(row)]
        return True

    def _capture(self, shape: tuple[int, int, int]) -> None:
        count, width, window = shape
        if self._kv is None:
            self._kv = new_kv(self.decoder, _ROWS[-1], up_to_growth(_WIDTHS[-1]), self.cache_format)
        operands = torch.zeros(count * width + count, dtype=torch.int32, device=self.decoder.device)
        recording = None
        if self._on_gpu:
            self._enqueue(operands, count, width, window)  # what kernels and libraries set up at first use is there
            recording = recorded(lambda: self._enqueue(operands, count, width, window), self.decoder.device,
                                 self._pool, self._stream, self.decoder.plane_sources)
        self._graphs[shape] = _Graph(operands, recording)

    def _enqueue(self, operands: Tensor, count: int, width: int, window: int) -> None:
        ids, counts = operands[:-count].view(count, width), operands[-count:]
        # One position is asked for: nobody reads its logits, but a step has an output.
        pick = torch.zeros(1, dtype=torch.int64, device=self.decoder.device)
        self.decoder.forward(ids, torch.zeros_like(counts), counts, self._kv[:, :, :count], pick=pick, bits=self.bits,
                             draft_window=window)
