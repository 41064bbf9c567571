"""Do the rows of a stream run in captured rounds, or step by step on the host?

Captured rounds take the largest logits, or the largest with the noise of a row's own seed, tell tokens alone, and need
memory of their own. Where a request asks for more, such as log probabilities or a top-p, or memory is short, all rows
go on step by step; a stream without rows under way may come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from transformers.generation import LogitsProcessorList

from ...engines.modules.attention import ragged_attention_on
from ...nn.agreement import raise_if_shared
from ...nn.state import say_once
from ...speculation.loop import Emit, Loop, Stop
from ...speculation.rounds.beginning import Beginnings
from ...speculation.rounds.caches import disown
from ...speculation.rounds.chain import CapturedChain
from ...speculation.rounds.rounds import NoRoom
from ...speculation.rounds.state import Noise
from ...speculation.stats import SpeculationStats
from ..call import loop_over
from ..capture import captured
from ..compare import accumulate
from ..levels.wiring import Chain
from .request import Admitted


class StreamRounds:
    """The loop over a chain in which the rows of a stream are, one after another where the kind of rounds changes.

    max_batch: rows that captured rounds have room for. begun: what was read of rows before they join. live: those that
    have a slot, by number. loop: the present one. is_captured: whether its rounds are.
    """

    def __init__(
        self, chain: Chain, device: torch.device, max_batch: int, stop: Stop, emit: Emit, begun: Beginnings,
        live: Mapping[int, Admitted],
    ):  # fmt: skip
        self.chain, self.device, self.max_batch, self._live = chain, device, max_batch, live
        self.how, self.begun = {"stop": stop, "emit": emit}, begun
        self._failures: list[str] = []
        self._suspected: Exception | None = None  # what may have been a level's error, or the target's
        self._broken = False  # the present loop cannot go on
        self.is_captured = False
        # Where logits are capped a row without a temperature is alone chosen in a pass that caps and divides nothing.
        self._divides = not getattr(getattr(chain.target.runner, "decoder", None), "logit_softcap", 0)
        self._samples = False  # whether a row of captured rounds ever did: rounds without noise are not come back to
        self._before = SpeculationStats()  # of the loops before the present one
        self._held = ExitStack()  # the captured chain
        # Rows of this many tokens cannot be in captured rounds.
        self._too_long: float = float("inf") if chain.target.runner.can.capturable else 0
        # Rounds that may be captured are made when there are rows: nobody knows before which ones they are.
        self.loop = Loop(None, **self.how) if self._too_long else self._on_host([])

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
        if self._broken:
            return False
        if not joining:
            return True
        if not self.is_captured:
            return self.loop.rounds is not None and (bool(going) or not self._can_capture(joining))
        refusal = self.loop.rounds.refusal
        if not self._samples and any(map(_samples, joining)):
            return False
        return self._can_capture(joining) and not any(refusal(_end(one)) for one in joining)

    def begin(self, rows: Sequence[Admitted], numbers: list[int]) -> None:
        """A new loop with these rows, in the rounds that suit them."""
        try:
            self._begin(rows, numbers)
        except Exception as error:
            if self.chain.drafter is None or not self._can_capture(rows):
                raise
            self._suspect(error)
            self._begin(rows, numbers)

    def _begin(self, rows: Sequence[Admitted], numbers: list[int]) -> None:
        self.close()
        self._before, self.loop, self._broken = self.stats, Loop(None, **self.how), False
        for level in self.chain.levels:  # it was counted: also where what comes next cannot begin
            level.stats.reset()
        self.loop = self._captured(rows) if self._can_capture(rows) else None
        self.is_captured = self.loop is not None
        if self.loop is None:
            self.loop = self._on_host(rows)
        with torch.inference_mode(), ragged_attention_on(self.chain.models):
            self.loop.start([one.row for one in rows], [one.left for one in rows], numbers=numbers)

    def give_up(self, error: Exception, rows: Sequence[Admitted]) -> None:
        """Rounds could not go on with these rows, and `begin` is next. Where memory was short, or logits NaN, which
        end one request only, such rows are never captured again. Of other errors of captured rounds nobody knows whose
        they are: the target goes on alone, if it was not. Raises the error where none of it would change anything."""
        of_one = isinstance(error, (NoRoom, FloatingPointError))
        if not self.is_captured or not (of_one or self.chain.drafter is not None):
            raise error
        if not of_one:
            self._suspect(error)
            return
        model = self.chain.target.runner.model
        raise_if_shared(model, error)
        say_once(model, f"{type(model).__name__} continues its stream step by step: {error}")
        self._too_long = min(map(_end, rows)) if isinstance(error, NoRoom) else 0
        self._break(error)

    def _suspect(self, error: Exception) -> None:
        """Levels may have raised it: the target goes on alone, and where that does better, they did (`goes_on`)."""
        raise_if_shared(self.chain.target.runner.model, error)
        self._break(error)
        _without_levels(self.chain)
        self._suspected = error

    def leave_out(self, error: Exception) -> None:
        """A level failed outside of rounds: from now on the target is alone, with the same tokens."""
        raise_if_shared(self.chain.target.runner.model, error)
        if self.is_captured:
            self._break(error)
        elif self.loop.rounds is not None:
            self.loop.rounds.drafter = self.loop.rounds.steering = None
        _leave_out(self.chain, self._failures, error)

    def goes_on(self) -> None:
        """A round is over."""
        error, self._suspected = self._suspected, None
        if error is not None:
            _leave_out(self.chain, self._failures, error)

    def _break(self, error: Exception) -> None:
        """The captured rounds are over, and hold no memory."""
        self._broken = True
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
        return bool(rows) and all(self._is_plain(one) and _end(one) < self._too_long for one in rows)

    def _is_plain(self, one: Admitted) -> bool:
        """Whether captured rounds choose the row's tokens, and nobody asks for its logits."""
        rule = one.rule
        chosen = rule.is_plain if self._divides else rule.sampler.is_greedy
        return chosen and one.request.logprobs is None

    def _captured(self, rows: Sequence[Admitted]) -> Loop | None:
        chain, longest = self.chain, max(map(_end, rows))
        chain.steering = None  # of rounds of the host before
        how = {"rows": [one.row for one in rows], "new_tokens": max(one.left for one in rows)}
        self._samples = self._samples or any(map(_samples, rows))
        how |= {"stream_of": self.max_batch, "sampled": self._samples, "divided": self._samples and self._divides}
        found = self._held.enter_context(captured(chain, LogitsProcessorList(), **how))
        if found is None:
            self.close()
            self._too_long = longest
            return None
        loop = self._loop(found)
        loop.rounds.noise, loop.rounds.steps.soon = partial(_noise, self._live), True
        return loop

    def _on_host(self, rows: Sequence[Admitted]) -> Loop:
        self.chain.target.start(len(rows), self.device)
        loop = self._loop(None)
        loop.rounds.on_failure = partial(_leave_out, self.chain, self._failures)  # a method of ours would be a cycle
        if not rows:
            loop.start([], [])
        return loop

    def _loop(self, found: CapturedChain | None) -> Loop:
        loop = loop_over(self.chain, found, self.device, self.how)
        loop.rounds.begun = self.begun
        return loop

    def shrink(self, least: int) -> None:
        """The caches grew with the longest row; when it has left, they need not stay so large. least: slots that stay.
        """
        longest = max(map(len, self.loop.rows), default=0)
        for runner in filter(None, (self.chain.target.runner, *self.chain.runners)):
            runner.shrink(max(longest + longest // 2, least))

    @property
    def failure(self) -> str:
        """What made levels be left out, in words; "" where they are not."""
        return next(iter(self._failures), "")

    @property
    def drafting(self) -> Sequence[int]:
        """The levels that are at work: all of them where nobody chooses."""
        if self.chain.drafter is None:
            return ()
        if self.chain.controller is None:
            return range(len(self.chain.levels))
        if self.is_captured:
            return self.loop.rounds.program.active
        return () if self.chain.steering is None else self.chain.steering.active


def closed_up(rows: list[int]) -> list[int]:
    """These rows with the last ones in the places of those that are missing: the others stay where they are."""
    kept = set(rows)
    last = iter(sorted((r for r in kept if r >= len(kept)), reverse=True))
    return [place if place in kept else next(last) for place in range(len(kept))]


def _samples(one: Admitted) -> bool:
    """Whether the row has noise."""
    return one.rule.seed is not None


def _noise(live: Mapping[int, Admitted], number: int) -> Noise:
    """How a row samples: as its request alone does, as its first row."""
    rule = live[number].rule
    return Noise() if rule.seed is None else Noise(rule.seed, 0, rule.temperature)


def _end(one: Admitted) -> int:
    """Tokens that the row may reach."""
    return len(one.row) + one.left


def _leave_out(chain: Chain, failures: list[str], error: Exception) -> None:
    """A level failed: the target goes on alone, in this loop and in those to come, with the same tokens."""
    model = chain.target.runner.model
    raise_if_shared(model, error)
    failures.append(str(error) or repr(error))
    say_once(model, f"{type(model).__name__}: levels failed, the stream goes on with the target alone: {error!r}")
    _without_levels(chain)


def _without_levels(chain: Chain) -> None:
    """The levels draft no more, and hold no memory."""
    chain.drafter = chain.controller = chain.steering = chain.deferred = None
    for runner in filter(None, chain.runners):
        runner.cache = None
    chain.runners = [None] * len(chain.runners)
    chain.target.runner.tap = None  # a head was told of rows that leave and join, and nobody reads it any more
