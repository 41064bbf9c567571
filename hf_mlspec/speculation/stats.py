"""How much did each level guess, how much of it was right, and where did the time go?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..nn.plane_source import PlaneCounts


@dataclass
class LevelStats:
    """Counts of one level over a call of generate; tokens are summed over the rows of the batch.

    drafted:  tokens proposed to the level above.
    accepted: drafted tokens that the level above accepted.
    tested:   drafted tokens whose verdict is known: the accepted ones and the first rejected one of each row and
        round.
    rounds:   calls of `propose`.
    forwards: model forward passes of this level (0 for lookups).
    seconds:  wall time inside those forward passes, or inside the lookup; prefill_seconds: the part of it before the
        target's first pass ended.
    cache_bytes: keys and values this level held at the end; 0 if it drafts in the target's cache.
    """

    name: str
    drafted: int = 0
    accepted: int = 0
    tested: int = 0
    rounds: int = 0
    forwards: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    cache_bytes: int = 0

    @property
    def acceptance(self) -> float:
        """Probability that a drafted token is accepted, given that all before it were: accepted / tested."""
        return self.accepted / self.tested if self.tested else 0.0

    def settle(self, drafted: list[int], accepted: list[int]) -> None:
        """Record one check: per row the number of drafted and of accepted tokens."""
        for d, a in zip(drafted, accepted, strict=True):
            self.drafted += d
            self.accepted += a
            self.tested += a + (a < d)

    def reset(self) -> None:
        """Set all counts to zero."""
        self.__init__(self.name)  # type: ignore[misc]


@dataclass
class PlanStats:
    """Rounds of one plan of the controller in a call; a plan says which levels draft, and how many tokens each.

    rounds: how many; captured ones of the target alone count once for each token of a row. timed: those
    of them that did nothing else, such as reading a prompt; all else is about these. tokens, seconds: committed, and
    taken. expected_tokens, expected_seconds: what was expected of the plan. off_seconds: in which the target alone is
    expected to write as many tokens.
    """

    rounds: int = 0
    timed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    expected_tokens: float = 0.0
    expected_seconds: float = 0.0
    off_seconds: float = 0.0

    def count(self, tokens: int, seconds: float, expected_tokens: float, expected_seconds: float, off_seconds: float,
              rounds: int = 1) -> None:
        """Rounds that did nothing else; see the fields."""
        self.rounds += rounds
        self.timed += rounds
        self.tokens += tokens
        self.seconds += seconds
        self.expected_tokens += expected_tokens
        self.expected_seconds += expected_seconds
        self.off_seconds += off_seconds

    def add(self, other: PlanStats) -> None:
        """Rounds of the same plan in another call."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class SpeculationStats:
    """Counts of one call: `.speculation` of a generate output, and `hf_mlspec.last_stats(model)`.

    levels:        from the level below the target down to the smallest.
    new_tokens:    tokens generated, summed over rows, end-of-sequence tokens included.
    target_passes: forward passes of the target, prefill included.
    row_passes:    the same counted per unfinished row; at batch 1 both are equal.
    seconds:       wall time of the whole decoding loop; target_seconds: inside the target's forward passes.
    target_cache_bytes: keys and values of the target when the last row ended.
    prefill_seconds: wall time until every row had its first tokens; prefill_target_seconds: the target's forward pass
        in it; prefill_draft_seconds: forward passes of the level below, which drafts before it if it has its own
        cache; prefill_tokens: tokens committed by that pass. Decode-only figures exclude these.
    capture_seconds: wall time of capturing rounds as CUDA graphs; 0 if the graphs were kept from an earlier call. With
        captured rounds target_seconds is the device time of whole rounds, that of the levels is 0, and prefill is the
        first round with the prefill of every level.
    prompt_tokens: of the prompts that a stream took; prefix_tokens: those of them whose keys and values it had kept of
        other prompts; prefix_bytes: what it keeps. levels_error: what made a stream leave its levels out, in words.
    plans: what the controller chose, in words ("off": the target alone), and how it went; empty where lengths were
        given.
    planes: what was streamed, where the target's planes are; else None.
    """

    levels: list[LevelStats] = field(default_factory=list)
    new_tokens: int = 0
    target_passes: int = 0
    row_passes: int = 0
    seconds: float = 0.0
    target_seconds: float = 0.0
    target_cache_bytes: int = 0
    prefill_seconds: float = 0.0
    prefill_target_seconds: float = 0.0
    prefill_draft_seconds: float = 0.0
    prefill_tokens: int = 0
    capture_seconds: float = 0.0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    prefix_bytes: int = 0
    levels_error: str = ""
    plans: dict[str, PlanStats] = field(default_factory=dict)
    planes: PlaneCounts | None = None

    def of_plan(self, words: str) -> PlanStats:
        """The counts of a plan, told in words."""
        return self.plans.setdefault(words, PlanStats())

    def count_pass(self, rows: int) -> None:
        """One forward pass of the target over so many unfinished rows."""
        self.target_passes += 1
        self.row_passes += rows

    def settled(self, seconds: float, target_seconds: float, draft_seconds: float = 0.0) -> None:
        """The seconds from the start to the commit of a pass; the first commit ends the prefill."""
        if self.target_passes == 1:
            self.prefilled(seconds, target_seconds, draft_seconds)

    def prefilled(self, seconds: float, target_seconds: float, draft_seconds: float = 0.0) -> None:
        """The time and tokens so far are the prefill."""
        self.prefill_seconds, self.prefill_target_seconds = seconds, target_seconds
        self.prefill_draft_seconds = draft_seconds
        self.prefill_tokens = self.new_tokens

    @property
    def tokens_per_target_pass(self) -> float:
        """Tokens per row and forward pass of the target; 1.0 without speculation."""
        return self.new_tokens / self.row_passes if self.row_passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the rounds that a controller chose, measured; 0.0 without a controller."""
        return self._speed("tokens", "seconds")

    @property
    def expected_tokens_per_second(self) -> float:
        """The same as the controller expected it."""
        return self._speed("expected_tokens", "expected_seconds")

    @property
    def gain_over_off(self) -> float:
        """Measured speed over that which the target alone is expected to have; 0.0 without a controller."""
        return self._speed("off_seconds", "seconds")

    def _speed(self, amount: str, seconds: str) -> float:
        amounts, times = (sum(getattr(plan, name) for plan in self.plans.values()) for name in (amount, seconds))
        return amounts / times if times else 0.0

    @property
    def seconds_outside_forwards(self) -> float:
        """Wall time of the loop outside all forward passes and lookups."""
        return self.seconds - self.target_seconds - sum(level.seconds for level in self.levels)

    def to_dict(self) -> dict:
        """Plain numbers, for JSON."""
        levels = [{**vars(level), "acceptance": level.acceptance} for level in self.levels]
        rates = ("tokens_per_second", "expected_tokens_per_second", "gain_over_off") if self.plans else ()
        return {
            **vars(self),
            "levels": levels,
            "planes": None if self.planes is None else vars(self.planes),
            "plans": {name: vars(plan) for name, plan in self.plans.items()},
            **{name: getattr(self, name) for name in rates},
            "tokens_per_target_pass": self.tokens_per_target_pass,
            "seconds_outside_forwards": self.seconds_outside_forwards,
        }
