"""How does compiled code on the CPU get what other processes computed? It asks in the middle of a call.

No error can be raised there: it is kept, the call ends, and who called raises it (streamed.py).
"""

from __future__ import annotations

from ...ops.callbacks import GatherRanks, SumRanks, floats_at, set_ranks
from ..ranks import Ranks
from .streamed import keep_failure


class SharedSums:
    """Adds up what the processes that share a model computed; lives as long as its decoder."""

    def __init__(self, handle, ranks: Ranks):
        """handle: a decoder without its head."""

        def sum(address: int, count: int) -> bool:
            try:
                own = floats_at(address, count)
                own.copy_(ranks.summed(own))
            except BaseException as error:
                keep_failure(error)
                return False
            return True

        def gather(part: int, rows: int, width: int, all: int) -> bool:
            try:
                floats_at(all, rows, ranks.count * width).copy_(ranks.side_by_side(floats_at(part, rows, width)))
            except BaseException as error:
                keep_failure(error)
                return False
            return True

        self.sum, self.gather = SumRanks(sum), GatherRanks(gather)
        set_ranks(handle, ranks.count, self.sum, self.gather)
