"""Do the rows of a stream run in captured rounds, or step by step on the host?

Captured rounds know one rule for all rows, the greedy one, tell tokens alone, and need memory of their own. Where a
request asks for more, such as log probabilities, or memory is short, all rows go on step by step; a stream without
rows under way may come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers.generation import LogitsProcessorList

from ...engines.modules.attention import ragged_attention_on
from ...nn.state import say_once
from ...speculation.loop import Emit, Loop, Stop
from ...speculation.rounds.caches import disown
from ...speculation.rounds.captured import CapturedRounds
from ...speculation.rounds.planning import Planning
from ...speculation.rounds.rounds import NoRoom
from ...speculation.stats import SpeculationStats
from ..capture import captured
from ..compare import accumulate
from ..levels.wiring import Chain
from .request import Admitted


class StreamRounds:
    """The loop over a chain in which the rows of a stream are, one after another where the kind of rounds changes.

    max_batch: rows that captured rounds have room for. loop: the present one. is_captured: whether its rounds are.
    """

    def __init__(self, chain: Chain, device: torch.device, max_batch: int, stop: Stop, emit: Emit):
        self.chain, self.device, self.max_batch = chain, device, max_batch
        self.how = {"stop": stop, "emit": emit}
        self.is_captured = False
        self._before = SpeculationStats()  # of the loops before the present one
        self._held = ExitStack()  # the captured chain
        # Rows of this many tokens cannot be in captured rounds.
        self._too_long: float = float("inf") if chain.target.runner.can.capturable else 0
        self.loop = self._on_host([])

    @property
    def stats(self) -> SpeculationStats:
        """The counts so far."""
        if not self._before.seconds:
            return self.chain.finish(self.loop.stats)
        accumulate(total := SpeculationStats(), self._before)
        accumulate(total, self.chain.finish(self.loop.stats))
        return total

    def take(self, joining: Sequence[Admitted], going: int) -> bool:
        """Whether these rows can join those that go on, of which there are so many; else `begin` anew with all."""
        if not joining:
            return True
        if not self.is_captured:
            return bool(going) or not self._can_capture(joining)
        refusal = self.loop.rounds.refusal
        return self._can_capture(joining) and not any(refusal(_end(one)) for one in joining)

    def begin(self, rows: Sequence[Admitted], numbers: list[int]) -> None:
        """A new loop with these rows, in the rounds that suit them."""
        self.close()
        self._before = self.stats
        self.loop = self._captured(rows) if self._can_capture(rows) else None
        self.is_captured = self.loop is not None
        if self.loop is None:
            self.loop = self._on_host(rows)
        with torch.inference_mode(), ragged_attention_on(self.chain.models):
            self.loop.start([one.row for one in rows], [one.left for one in rows])
        self.loop.numbers = numbers

    def give_up(self, error: Exception, rows: Sequence[Admitted]) -> None:
        """Captured rounds could not go on with these rows: such rows are never captured again, and `begin` is next."""
        model = self.chain.target.runner.model
        say_once(model, f"{type(model).__name__} continues its stream step by step: {error}")
        self._too_long = min(map(_end, rows)) if isinstance(error, NoRoom) else 0
        self.close(error)
        disown(self.chain.target, self.chain.drafter)

    def close(self, error: BaseException | None = None) -> None:
        """Hand the captured chain back; after an error it is not kept, as who knows how far it came."""
        held, self._held = self._held, ExitStack()
        try:
            with held:
                if error is not None:
                    raise error
        except BaseException as same:
            if same is not error:
                raise

    def _can_capture(self, rows: Sequence[Admitted]) -> bool:
        return bool(rows) and all(_is_plain(one) and _end(one) < self._too_long for one in rows)

    def _captured(self, rows: Sequence[Admitted]) -> Loop | None:
        chain, longest = self.chain, max(map(_end, rows))
        chain.steering = None  # of rounds of the host before
        how = {"rows": [one.row for one in rows], "new_tokens": max(one.left for one in rows)}
        found = self._held.enter_context(captured(chain, LogitsProcessorList(), **how, stream_of=self.max_batch))
        if found is None:
            self.close()
            self._too_long = longest
            return None
        planning = None
        if found.planned:
            planning = Planning(chain.controller, chain.levels, found)
            chain.waiting = set(range(len(chain.levels)))  # until there is a controller
        return Loop(CapturedRounds(found, chain.target, chain.drafter, planning=planning), **self.how)

    def _on_host(self, rows: Sequence[Admitted]) -> Loop:
        rounds = self.chain.host_rounds(self.device)
        self.chain.target.start(len(rows), self.device)
        loop = Loop(rounds, **self.how)
        if not rows:
            loop.start([], [])
        return loop


def _is_plain(one: Admitted) -> bool:
    """Whether the row takes the largest logits, and nobody asks for them."""
    return one.rule.is_greedy and one.request.logprobs is None


def _end(one: Admitted) -> int:
    """Tokens that the row may reach."""
    return len(one.row) + one.left
