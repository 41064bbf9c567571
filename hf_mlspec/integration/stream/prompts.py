"""What is read of a prompt before its row joins, piece by piece beside the rows that run, and what is kept of others?

A prompt with more to read than a chunk is read into memory of its own, a chunk between two rounds, first by the target
and then by the levels that are at work and have caches of their own. When all of it is read, the row joins. Where a
token's bits depend on the tokens before it only (invariant 3), neither that nor kept prefixes change one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...engines.engine import Engine
from ...engines.lanes import KeptState, Lane
from ...engines.memory import copy_quietly, out_of_memory
from ...engines.prefixes import BLOCK, KeptPrefixes
from ...engines.rows import up_to_growth
from ...nn.agreement import raise_if_shared
from ...nn.shards import is_shared
from ...nn.state import say_once
from ...speculation.deferred import inside
from ...speculation.rounds.beginning import Beginning, Beginnings
from ..levels.wiring import Chain
from .pace import Pace
from .request import Admitted

PREFILL_CHUNK = 512  # tokens


def chunk_of(given: object) -> int:
    """`prefill_chunk` of a stream, 0 for None; ValueError for what is no number of tokens."""
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
        raise ValueError(f"prefill_chunk is {given!r}, it must be a positive integer, the tokens of a prompt read "
                         "between two rounds, or None: prompts are read at once")
    return given or 0


@dataclass
class Opening:
    """How a row begins. blocks: kept keys and values of its first tokens; state: behind them, where the target's
    layers keep one. engines: those that read it beside the rows that run, the target's first; none where it joins at
    once. nbytes: of the memory that they read it into."""

    blocks: list[Tensor] = field(default_factory=list)
    state: KeptState | None = None
    engines: list[Engine] = field(default_factory=list)
    nbytes: int = 0


@dataclass
class _Lane:
    """A row as one engine reads it: the first `done` tokens are in `lane`."""

    engine: Engine
    lane: Lane
    done: int


@dataclass
class _Reading:
    """A request whose prompt is being read. row: all of it but the last token, which a round scores."""

    one: Admitted
    row: list[int]
    lanes: list[_Lane]

    @property
    def is_read(self) -> bool:
        """Whether all of it is in all lanes."""
        return all(lane.done == len(self.row) for lane in self.lanes)


class LongPrompts:
    """The requests of a stream that have a slot and are no rows yet.

    chunk: the most tokens read between two rounds; 0: rows join at once, however long. budget: bytes of keys and
    values that are kept of prompts; 0: none. begun: what rows that join next have read, by their numbers; whoever
    placed them clears it. on_failure: told of the error of a level, which is to be in the chain no more.
    """

    def __init__(self, chain: Chain, device: torch.device, chunk: int, budget: int):
        self.chain, self.target = chain, chain.target.runner
        exact, self._keeps_states = self.target.can.bit_exact, self.target.can.stateful
        timed = not is_shared(self.target.model)  # the clocks of processes that share it differ, and so would chunks
        self.chunk = chunk if exact and timed else 0
        kept = exact and (self.chunk or not self._keeps_states)  # of states those at borders of chunks
        self.prefixes = KeptPrefixes(budget) if budget and kept else None
        self.pace = Pace(max(chunk, 1), device)
        self.begun: Beginnings = {}
        self.on_failure: Callable[[Exception], None] | None = None
        self.reading: dict[int, _Reading] = {}
        self._unkept: dict[int, int] = {}  # tokens of prompts of rows that just joined, by number
        if budget and not kept:
            model = self.target.model
            why = "module by module a token's bits depend on its batch"
            if exact:
                no_chunks = "prefill_chunk is None" if timed else "processes share it, which read no chunks"
                why = f"its states are kept at borders of chunks, and {no_chunks}"
            say_once(model, f"{type(model).__name__} keeps no prefixes: {why}")

    def opening(self, one: Admitted, drafting: Sequence[int]) -> Opening:
        """How the row is to begin; nothing is allocated yet. drafting: levels that are at work."""
        row, state = one.row[:-1], None
        blocks = self.prefixes.find(row) if self.prefixes is not None and not self._keeps_states else []
        if self.prefixes is not None and self._keeps_states:
            blocks, state = self.prefixes.find_with_state(row)
        kept = one.stats.prefix_tokens = len(blocks) * BLOCK
        levels = [self.chain.runners[index] for index in drafting if self._reads(index, one)]
        longest = max(len(row) - kept, len(row) if levels else 0)
        if not self.chunk or longest <= self._most_at_once:
            return Opening(blocks, state)
        engines = [self.target, *levels]
        slots = up_to_growth(len(row))
        nbytes = sum(slots * engine.bytes_per_token + engine.bytes_per_row for engine in engines)
        return Opening(blocks, state, engines, nbytes)

    @property
    def _most_at_once(self) -> int:
        """Tokens that a row may lack and still join at once; where states are kept, less than a block."""
        return min(self.chunk, BLOCK - 1) if self._keeps_states and self.prefixes is not None else self.chunk

    def take(self, number: int, one: Admitted, opening: Opening) -> bool:
        """Whether the row joins now; else it is being read. Raises what allocating memory for that raises."""
        row, blocks = one.row[:-1], opening.blocks
        if not opening.engines:
            if blocks:
                self.begun[number] = Beginning()
                self.begun[number].add(self.target, blocks, len(blocks) * BLOCK, opening.state)
            if self.prefixes is not None and not self._keeps_states:
                self._unkept[number] = len(row)
            return True
        with torch.inference_mode():
            lanes = [_Lane(engine, engine.lane(len(row)), 0) for engine in opening.engines]
            for place, block in enumerate(blocks):
                lanes[0].lane.kv[:, :, 0, :, place * BLOCK : (place + 1) * BLOCK] = block
            if opening.state is not None:
                lanes[0].lane.states.put(0, opening.state, len(blocks) * BLOCK)
        lanes[0].done = len(blocks) * BLOCK
        self.reading[number] = _Reading(one, row, lanes)
        return False

    def advance(self, beside: bool) -> list[tuple[int, Admitted]]:
        """Read a chunk of the prompt that came first; requests that are read, that failed or were cancelled.

        beside: rows run, and wait for it: they do not wait for a chunk and a row that joins at once.
        """
        over = [number for number, one in self.reading.items() if one.one.request.cancelled]
        for number in over:
            self.reading[number].one.finish_reason = "cancelled"
        number = next((number for number in self.reading if number not in over), None)
        if number is not None:
            found = self.reading[number]
            self._leave_lanes()
            joins = found.is_read or not beside
            if not found.is_read:
                self._read_some(found, self.pace.chunk() if beside else self.chunk)
            if found.one.error is not None:
                over.append(number)
            elif found.is_read and joins:
                over.append(number)
                begun = self.begun[number] = Beginning()
                for lane in found.lanes:
                    state = lane.lane.behind(lane.done)
                    begun.add(lane.engine, [lane.lane.kv[:, :, 0]], lane.done, state)
        return [(number, self.reading.pop(number).one) for number in over]

    def keep(self, numbers: list[int], rows: list[list[int]], places: list[int]) -> None:
        """Keep what rows that just joined have read of their prompts, in these lines of the target's cache."""
        if not self._unkept or self.target.cache is None:  # captured rounds ended, and their caches with them
            self._unkept.clear()
            return
        waiting, self._unkept = self._unkept, {}
        for number, row, place in zip(numbers, rows, places, strict=True):
            count = waiting.get(number, 0)
            if count + 1 == len(row):  # it had no round so far, and its prompt may be read by that
                self._unkept[number] = count
            elif count >= BLOCK:
                self._keep(row[:count], self.target.cache.kv, place)

    @property
    def bytes_kept(self) -> int:
        """Of keys and values of prompts."""
        return self.prefixes.nbytes if self.prefixes is not None else 0

    def forget(self) -> None:
        """Let go of everything."""
        self.reading.clear()
        self.begun.clear()
        self.on_failure = None  # it knows the stream: a cycle would keep the caches until the next gc
        if self.prefixes is not None:
            self.prefixes.clear()

    def _read_some(self, found: _Reading, tokens: int) -> None:
        """Read so many tokens. A level that fails reads nothing any more, of no row; where the target fails, as for
        want of memory, this request does, and the others go on."""
        lane = next(lane for lane in found.lanes if lane.done < len(found.row))
        try:
            self._read(found, lane, tokens)
        except Exception as error:  # whatever a model raises
            raise_if_shared(self.target.model, error)
            if lane.engine is self.target:
                found.one.fail(error)
                return
            self.on_failure(error)
            self._leave_lanes()

    def _leave_lanes(self) -> None:
        """Lanes of levels that are in the chain no more go."""
        engines = [self.target, *self.chain.runners]
        for found in self.reading.values():
            found.lanes = [lane for lane in found.lanes if lane.engine in engines]

    def _read(self, found: _Reading, lane: _Lane, tokens: int) -> None:
        end, keeps = min(lane.done + tokens, len(found.row)), lane.engine is self.target and self.prefixes is not None
        if keeps and self._keeps_states:
            end = min([end, *(border for border in self._borders(len(found.row)) if border > lane.done)])
        with torch.inference_mode(), self.pace.reading(end - lane.done):
            lane.engine.read(lane.lane, found.row[:end], lane.done)
        lane.done = end
        if keeps and not self._keeps_states:
            self._keep(found.row[:end], lane.lane.kv, 0)
        elif keeps and end in self._borders(len(found.row)):
            self._keep(found.row[:end], lane.lane.kv, 0, lambda: lane.lane.behind(end))

    def _borders(self, length: int) -> list[int]:
        """Behind how many tokens of a prompt its state is kept: whole chunks of blocks, and the last block."""
        every = -(-self.chunk // BLOCK) * BLOCK
        return [*range(every, length, every), length // BLOCK * BLOCK]

    def _keep(
        self, row: list[int], kv: Tensor, place: int, state: Callable[[], KeptState] | None = None
    ) -> None:
        def copied(start: int, end: int) -> Tensor:
            own = kv[:, :, place, :, start:end]
            copy_quietly(made := torch.empty(own.shape, dtype=own.dtype, device=own.device), own)
            return made

        try:
            with torch.inference_mode():
                self.prefixes.keep(row, copied, state)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            self.prefixes.clear()
            self.prefixes.budget = 0
            say_once(self.target.model, f"no prefixes are kept any more: no memory for them ({error})")

    def _reads(self, index: int, one: Admitted) -> bool:
        """Whether a level keeps keys and values of its own, of the target's tokens, for a row as long."""
        engine = self.chain.runners[index]
        if engine is None or engine.follow is not None or not engine.can.bit_exact or engine.can.stateful:
            return False
        most = getattr(inside(self.chain.levels[index]), "max_positions", None)
        return all(self.chain.joined[: index + 1]) and (most is None or len(one.row) + one.left <= most)
