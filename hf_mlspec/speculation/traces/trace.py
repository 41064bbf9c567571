"""What happened round by round when a chain decoded: how many tokens were drafted, how many of them were accepted?

A trace holds no tokens and no weights, only counts, so it can be kept beside the code and replayed on a model of any
shape (`traces/script.py`). docs/traces.md describes the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

SCHEMA = "mlspec-trace/1"


class Round(NamedTuple):
    """One check of one row: `accepted` of `drafted` tokens were kept, and the checker put one more after them.

    inner: the rounds of the level below that made this draft, in order; () where the level that drafted is the last,
    or drafted nothing.
    """

    drafted: int
    accepted: int
    inner: tuple[Round, ...] = ()

    @property
    def settled(self) -> int:
        """Tokens the row gained, unless it ended among them."""
        return self.accepted + 1


@dataclass(frozen=True)
class TracedModel:
    """The shape of a model, all sizes None for a level without one (a lookup).

    weights: "bfloat16", "float32", "mxfp4", "int4" ...: how most of its weights are stored. activation_bits: what
    multiplies 4-bit weights, None for others and where only the level's name says it.
    """

    name: str
    weights: str | None = None
    activation_bits: int | None = None
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None


@dataclass(frozen=True)
class TracedLevel(TracedModel):
    """A level as it was wired.

    num_draft_tokens: the most it was asked for at a time. confidence_threshold: it stopped after a token less probable
    (0: never). in_target_cache: whether it drafted in the target's KV cache, and so not before the prefill.
    draft_window: how many of the last tokens it saw, besides the first ones of a row (0: all). draft_cache: the format
    of a cache of its own, None for keys and values as they are computed.
    """

    num_draft_tokens: int = 0
    confidence_threshold: float = 0.0
    in_target_cache: bool = False
    draft_window: int = 0
    draft_cache: str | None = None


@dataclass(frozen=True)
class TracedRow:
    """One prompt: its tokens, the tokens it gained (an end-of-sequence token included), its rounds in order."""

    prompt_tokens: int
    new_tokens: int
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Trace:
    """The recorded rounds of a chain; made by `record_trace`.

    levels: from the one below the target down. data: the name of the prompts. prompts_sha256: of their token ids.
    origin: versions, commit and other information about the recording.
    Raises ValueError, naming row and round, if the numbers contradict each other.
    """

    target: TracedModel
    levels: tuple[TracedLevel, ...]
    data: str
    prompts_sha256: str
    max_new_tokens: int
    batch_size: int
    rows: tuple[TracedRow, ...]
    origin: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            _check_row(f"row {number}", row, self)

    @property
    def new_tokens(self) -> int:
        """Tokens gained, summed over rows."""
        return sum(row.new_tokens for row in self.rows)

    @property
    def passes(self) -> int:
        """Rounds of the target, summed over rows."""
        return sum(len(row.rounds) for row in self.rows)

    def rounds(self, level: int) -> Iterator[Round]:
        """Every round in which level `level` (0: below the target) drafted, of all rows."""
        return rounds_at((round for row in self.rows for round in row.rounds), level)

    def alone(self) -> Trace:
        """The same rows decoded by the target alone: no levels, one token a round."""
        rows = (replace(row, rounds=(Round(0, 0),) * row.new_tokens) for row in self.rows)
        return replace(self, levels=(), rows=tuple(rows))

    def of_rows(self, rows: list[int]) -> Trace:
        """Only these rows, in this order; ValueError naming one that is not there."""
        missing = [row for row in rows if not 0 <= row < len(self.rows)]
        if missing:
            raise ValueError(f"the trace has {len(self.rows)} rows, numbered from 0; there is no row {missing[0]}")
        return replace(self, rows=tuple(self.rows[row] for row in rows))


def rounds_at(rounds: Iterator[Round], level: int) -> Iterator[Round]:
    """The rounds `level` levels below these."""
    for round in rounds:
        if level:
            yield from rounds_at(iter(round.inner), level - 1)
        else:
            yield round


def longest(row: TracedRow, new_tokens: int) -> int:
    """Tokens of prompt, continuation and guesses that a level sees at most until the row gained `new_tokens`."""
    end, most = row.prompt_tokens, row.prompt_tokens
    for round in row.rounds:
        if end - row.prompt_tokens >= new_tokens:
            break
        most = max(most, _reach(end, round))
        end += round.settled
    return most


def _reach(start: int, round: Round) -> int:
    """Where the longest guess of a round, or of one inside it, ends."""
    most = start + round.drafted
    for inner in round.inner:
        most = max(most, _reach(start, inner))
        start += inner.settled
    return most


def _check_row(name: str, row: TracedRow, trace: Trace) -> None:
    settled = [round.settled for round in row.rounds]
    if row.prompt_tokens < 1 or not 1 <= row.new_tokens <= trace.max_new_tokens:
        raise ValueError(
            f"{name}: {row.prompt_tokens} prompt tokens and {row.new_tokens} new ones; there must be at least one of "
            f"each, and of the new ones at most max_new_tokens ({trace.max_new_tokens})"
        )
    for number, round in enumerate(row.rounds):
        _check_round(f"{name}, round {number}", round, trace.levels)
    if not sum(settled[:-1]) < row.new_tokens <= sum(settled):
        raise ValueError(
            f"{name}: {row.new_tokens} new tokens, but its {len(settled)} rounds commit {sum(settled)}, "
            f"{sum(settled[:-1])} of them before the last"
        )


def _check_round(name: str, round: Round, levels: tuple[TracedLevel, ...]) -> None:
    """`levels`: the one that drafted and those below it."""
    most = levels[0].num_draft_tokens if levels else 0
    if not 0 <= round.accepted <= round.drafted <= most:
        raise ValueError(
            f"{name}: {round.accepted} of {round.drafted} drafted tokens accepted, where a draft holds at most {most}"
        )
    made = sum(inner.settled for inner in round.inner)
    if len(levels) > 1 and made != round.drafted:
        raise ValueError(f"{name}: {round.drafted} tokens drafted, but its inner rounds commit {made}")
    if len(levels) < 2 and round.inner:
        raise ValueError(f"{name}: {len(round.inner)} inner rounds, but there is no level below the one that drafted")
    for number, inner in enumerate(round.inner):
        _check_round(f"{name}, inner round {number}", inner, levels[1:])
