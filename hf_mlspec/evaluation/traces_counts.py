"""How often is a drafted token kept, level by level and position by position? Counted from a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..speculation.stats import LevelStats
from ..speculation.traces.trace import Round, Trace


@dataclass(frozen=True)
class LevelAcceptance:
    """Acceptance of the drafts of one level; counts as in `hf_mlspec.LevelStats`.

    level_index: 0 for the level below the target. by_position: for each draft position (0: the first token) how many
    tokens were tested, all before them being accepted, and how many of these were accepted. draft_lengths: number of
    drafts of each length; index 0 counts rounds in which nothing was drafted. tokens_per_pass: tokens committed per
    pass of the level above, the target's prefill included, as in `hf_mlspec.last_stats`. Programs that time decoding
    (eval/bench_decode, eval/replay) leave out that pass and its token, so their number is larger.
    """

    level: str
    level_index: int
    drafted: int
    accepted: int
    tested: int
    by_position: list[tuple[int, int]]
    draft_lengths: list[int]
    tokens_per_pass: float

    @property
    def acceptance(self) -> float | None:
        """Probability that a token is accepted, given that all before it were; None if no token was tested."""
        return self.accepted / self.tested if self.tested else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        positions = [{"position": at, "tested": tested, "accepted": accepted}
                     for at, (tested, accepted) in enumerate(self.by_position)]
        return {**vars(self), "by_position": positions, "acceptance": self.acceptance}


def level_acceptance(trace: Trace) -> list[LevelAcceptance]:
    """One entry per level, from the one below the target down. Counts equal those of `hf_mlspec.last_stats` over the
    recorded calls; both include tokens after an end of sequence in a last round.
    """
    found = []
    for index, level in enumerate(trace.levels):
        rounds = list(trace.rounds(index))
        passes = len(rounds) if index else trace.passes
        tokens = sum(round.settled for round in rounds) if index else trace.new_tokens
        found.append(_counted(level.name, index, rounds, tokens / passes if passes else 0.0))
    return found


def _counted(name: str, index: int, rounds: list[Round], tokens_per_pass: float) -> LevelAcceptance:
    stats = LevelStats(name)
    stats.settle([round.drafted for round in rounds], [round.accepted for round in rounds])
    longest = max((round.drafted for round in rounds), default=0)
    # Place p is reached where p tokens before it were accepted.
    by_position = [
        (sum(one.drafted > p and one.accepted >= p for one in rounds), sum(one.accepted > p for one in rounds))
        for p in range(longest)
    ]
    lengths = [sum(round.drafted == n for round in rounds) for n in range(longest + 1)]
    return LevelAcceptance(name, index, stats.drafted, stats.accepted, stats.tested, by_position, lengths,
                           tokens_per_pass)
