"""Is what a row lacks when it joins read before its first round, or by it? One pass fewer to its first token.

A round of one step may be fed more than the last token of each row: what the target's cache lacks of rows that join,
and of the others tokens that it has, which are written again with the same bits (invariant 3). So one pass reads the
end of a prompt and scores it. With few rows and tokens it takes hardly longer than a step.
"""

from __future__ import annotations

from collections.abc import Callable

from ...precision import Bits
from .graphs import RoundGraphs
from .program import RoundLevel, RoundProgram

_WIDTHS = (32, 64, 128, 256)  # tokens of each row that a round is fed
_MOST = 256  # of all rows: more take longer than a step
Capture = Callable[[RoundProgram, int], bool]


class FirstRounds:
    """The rounds of a chain that read, one program for each width. sampling: as of `RoundProgram`."""

    def __init__(self, level: RoundLevel, sampling: tuple):
        decoder = level.decoder
        alone = decoder.ranks is None  # else one process, by its clock, would capture before the others
        stateless = level.states is None and not decoder.num_recurrent
        self.works = alone and stateless and isinstance(level.bits, Bits) and decoder.captures(level.bits)
        self._made = {width: RoundProgram([level], *sampling, active=(), steps=1, lead=width) for width in _WIDTHS}
        self._lost = 0.0  # seconds that these rounds would have saved

    def program(self, coming: RoundProgram, lacking: int, rows: int) -> RoundProgram | None:
        """What may run in place of the coming round, where a row lacks so many tokens; None: nothing. rows: that it is
        launched for."""
        if not self.works or coming.active or coming.steps > 1:
            return None
        return next((one for width, one in self._made.items() if lacking <= width and rows * width <= _MOST), None)

    def missed(self, program: RoundProgram, rows: int, seconds: float, graphs: RoundGraphs, capture: Capture) -> None:
        """Tokens were read before a round, which cost so many seconds: once that has cost as much as capturing this
        program for so many rows, it is captured."""
        self._lost += seconds
        price = graphs.seconds_to_capture(program)
        if self._lost >= price:
            self._lost, self.works = 0.0, capture(program, rows)
