"""What would a recorded pair have drafted and accepted with other draft lengths, as far as its trace shows?

Greedily, whether a draft agrees with its checker at a position of the text is a property of the position: everything
before it is the text itself, however the rounds were cut. A round of d drafted and a accepted tokens that starts at
position s shows that positions s .. s + a - 1 agree and, if a < d, that s + a does not; if all were accepted, position
s + a was written by the checker undrafted, and whether the draft would have agreed there is not known. Every position
is committed once, so each is known at most once.

`reschedule` walks over these agreements with the draft lengths it is given. Unknown positions (undrafted ones, and
those behind a recorded row) get a drawn verdict: agreement with the probability seen at the known ones, the same
draw in every call. How many were needed is in `Trace.origin`. Tokens after the target's first rejection were never
text, so the rounds of a level there are drawn as well; they decide how many tokens are drafted, never how many the
target keeps.

Two effects are not in a trace: a draft in the target's cache reads keys and values of its own for the tokens of its
round, so that its verdicts depend a little on where rounds begin; and a confidence threshold ended recorded drafts at
places where agreement is rarer than elsewhere, which drawn verdicts at undrafted positions do not know.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..speculation.traces.trace import Round, Trace, TracedRow


@dataclass(frozen=True)
class Agreements:
    """Per new token of a row, from the first: does a level agree with the one that checks it? None: not known.

    levels: one list per level, from the one below the target down, each as long as the row has new tokens.
    """

    levels: tuple[list[bool | None], ...]


def agreements(trace: Trace) -> list[Agreements]:
    """What every row of `trace` reveals."""
    return [_row_agreements(row, len(trace.levels)) for row in trace.rows]


def agreement_rates(rows: Sequence[Agreements]) -> list[float]:
    """Per level the share of known positions that agree; ValueError for a level of which nothing is known."""
    found = []
    for index in range(len(rows[0].levels)):
        known = [verdict for row in rows for verdict in row.levels[index] if verdict is not None]
        if not known:
            raise ValueError(f"level {index} drafted nothing in this trace: there is nothing to reschedule")
        found.append(sum(known) / len(known))
    return found


def reschedule(
    trace: Trace, num_draft_tokens: int | Sequence[int], *, prompt_tokens: int | None = None, seed: int = 0
) -> Trace:
    """A trace of the same rows in which all drafts have a fixed length, as in captured rounds (docs/traces.md).

    num_draft_tokens: one number per level, from the one below the target down; a single number for one level. With two
        levels the first is rounded up to whole rounds of the second: [8, 3] drafts 2 rounds of 3 + 1 tokens.
    prompt_tokens: assume this many tokens for every prompt, to choose the length of the cache.
    seed: of the verdicts that are drawn at random. The result's first round reads the prompt and drafts nothing,
        thresholds are 0, and `origin["rescheduled"]` holds the recorded lengths, the rates and the share of drawn
        verdicts.
    Raises ValueError for more than two levels, a wrong number of num_draft_tokens, and counts below 1.
    """
    lengths = [num_draft_tokens] if isinstance(num_draft_tokens, int) else list(num_draft_tokens)
    _check(trace, lengths, prompt_tokens)
    known = agreements(trace)
    rates = agreement_rates(known)
    unroll = -(-lengths[0] // (lengths[1] + 1)) if len(lengths) == 2 else 1
    rows, drawn, used = [], 0, 0
    for number, (row, revealed) in enumerate(zip(trace.rows, known, strict=True)):
        walk = _Walk(revealed, rates, random.Random(f"{seed} {number}"))
        rounds = tuple(walk.rounds(row.new_tokens, lengths[-1], unroll))
        rows.append(TracedRow(prompt_tokens or row.prompt_tokens, row.new_tokens, rounds))
        drawn, used = drawn + walk.drawn, used + walk.used
    widest = [unroll * (lengths[1] + 1), lengths[1]] if len(lengths) == 2 else lengths
    levels = tuple(
        replace(level, num_draft_tokens=most, confidence_threshold=0.0)
        for level, most in zip(trace.levels, widest, strict=True)
    )
    told = {"from": [level.num_draft_tokens for level in trace.levels], "agreement": rates, "seed": seed,
            "prompt_tokens": prompt_tokens, "drawn": drawn / used if used else 0.0}
    return replace(trace, levels=levels, rows=tuple(rows), origin={**trace.origin, "rescheduled": told})


class _Walk:
    """One row, position by position; `asked`: (level, position) of every verdict on the text that was needed."""

    def __init__(self, revealed: Agreements, rates: list[float], draw: random.Random):
        self.revealed, self.rates, self.draw = revealed, rates, draw
        self.asked: set[tuple[int, int]] = set()
        self._drawn_on_text: dict[tuple[int, int], bool] = {}  # drawn once, so that every round meets the same
        self._off_text_draws = 0

    @property
    def drawn(self) -> int:
        """Verdicts that the trace did not reveal."""
        return len(self._drawn_on_text) + self._off_text_draws

    @property
    def used(self) -> int:
        """All verdicts."""
        return len(self.asked) + self._off_text_draws

    def rounds(self, new_tokens: int, inner: int, unroll: int) -> Iterator[Round]:
        """From the pass that reads the prompt to the one that settles the last token."""
        yield Round(0, 0)
        at = 1
        while at < new_tokens:
            below = tuple(self._inner(at, inner, unroll)) if len(self.rates) == 2 else ()
            drafted = sum(round.settled for round in below) if below else inner
            accepted = self._run(0, at, drafted)
            yield Round(drafted, accepted, below)
            at += accepted + 1

    def _inner(self, start: int, most: int, unroll: int) -> Iterator[Round]:
        """The rounds that make one draft; true as long as the target would keep what they settle."""
        on_text, at = True, start
        for _ in range(unroll):
            accepted = self._run(1, at, most) if on_text else self._off_text(1, most)
            yield Round(most, accepted)
            on_text = on_text and self._run(0, at, accepted + 1) == accepted + 1
            at += accepted + 1

    def _run(self, level: int, start: int, most: int) -> int:
        """How many positions from `start` on agree one after the other."""
        return next((n for n in range(most) if not self._agrees(level, start + n)), most)

    def _off_text(self, level: int, most: int) -> int:
        for count in range(most):
            self._off_text_draws += 1
            if self.draw.random() >= self.rates[level]:
                return count
        return most

    def _agrees(self, level: int, position: int) -> bool:
        self.asked.add((level, position))
        verdicts = self.revealed.levels[level]
        verdict = verdicts[position] if position < len(verdicts) else None
        if verdict is None:
            verdict = self._drawn_on_text.setdefault((level, position), self.draw.random() < self.rates[level])
        return verdict


def _row_agreements(row: TracedRow, levels: int) -> Agreements:
    found: tuple[list[bool | None], ...] = tuple([None] * row.new_tokens for _ in range(levels))
    at = 0
    for round in row.rounds:
        _reveal(found, 0, at, round, at + round.accepted)
        at += round.settled
    return Agreements(found)


def _reveal(found: Sequence[list[bool | None]], level: int, start: int, round: Round, last: int) -> None:
    """Write what a round at `start` says; positions behind `last` were no text, and the row may have ended before."""
    if level == len(found):
        return
    told = [True] * round.accepted + [False] * (round.accepted < round.drafted)
    for position, verdict in enumerate(told, start):
        if position <= last and position < len(found[level]):
            found[level][position] = verdict
    for inner in round.inner:
        _reveal(found, level + 1, start, inner, last)
        start += inner.settled


def _check(trace: Trace, lengths: list[int], prompt_tokens: int | None) -> None:
    if not 1 <= len(trace.levels) <= 2:
        raise ValueError(f"the trace has {len(trace.levels)} levels; only traces with one or two can be rescheduled")
    if len(lengths) != len(trace.levels):
        raise ValueError(
            f"num_draft_tokens has {len(lengths)} numbers and the trace {len(trace.levels)} levels: give one for each"
        )
    if min(lengths) < 1 or (prompt_tokens is not None and prompt_tokens < 1):
        raise ValueError(
            f"num_draft_tokens {lengths} and prompt_tokens {prompt_tokens}: captured rounds draft at least one token, "
            "and a prompt has at least one"
        )
