"""What is enqueued in one round of a chain, at fixed shapes and without the host?

Every level drafts for the one above it: the last by steps, one in the middle by rounds of its own (draft, check). Rows
that are done early are fed padding. How far each row got is known on the device only, so a level is fed its last
tokens anew where it may lack them: one that was checked at its own level and every level up to `since` lacks at most
one token for each. What it has already is written again with the same bits (invariant 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ... import ops
from ...engines.cuda.decoder import CudaDecoder
from ...engines.cuda.engine import soft_capped
from ...engines.cuda.states import DeltaStates
from ...formats import CacheFormat
from ...nn.plane_source import PlaneSource
from ...ops.delta import AT_START, KEEP
from ...precision import Bits
from .state import RoundState

UNROLLED = 8  # tokens a target without levels decodes for one wait of the host
MOST_PASSES = 256  # of one round: each is some hundreds of kernels, which take milliseconds to capture
CHECK_FIELDS = 2  # drafted, accepted
NOT_CHECKED = -1  # in both of them: the row took no part


@dataclass
class RoundLevel:
    """A level of a captured chain.

    kv: ``[layers, 2, batch, kv_heads, slots, dim]``, the target's or its own, in cache_format, None for
    keys and values as they are computed. states: of recurrent layers, as kv. most: where nothing else is said,
    steps of the last level's draft; of a level in the middle the rounds that make one. vocab_size: tokens the level
    above knows. draft_window: as
    `Engine.draft_window`.
    """

    name: str
    decoder: CudaDecoder
    own_cache: bool
    bits: Bits
    vocab_size: int
    threshold: float = 0.0
    most: int = 1
    draft_window: int = 0
    cache_format: CacheFormat | None = None
    kv: Tensor | None = None
    states: DeltaStates | None = None


@dataclass
class LookupLevel:
    """The last level of a captured chain, if it copies from the row; see `PromptLookup`. most: tokens of its draft,
    where nothing else is said. It reads no cache."""

    name: str
    min_ngram: int
    max_ngram: int
    most: int = 1
    own_cache = False


Level = RoundLevel | LookupLevel


@dataclass(frozen=True)
class Check:
    """A check of a round: which level's, where in a row's report it stands, how many tokens it may have accepted."""

    level: int
    column: int
    judged: int


class RoundProgram:
    """The steps of a round over `levels`, the target first.

    sampled: tokens are those of logits plus the noise that all levels share (sampling.py); warp: what is done to
    float32 logits ``[n, vocab]`` before, None for nothing; divided: they are divided by temperatures of rows. most:
    for each level below the target what its own `most` says otherwise. active: the numbers of those levels in their
    chain, 0 for the one below the target. steps: tokens of a round of the target alone. draft_window: of all levels
    below the target, where they have none of their own. lead: tokens of a row, its last ones, that the target's first
    step is fed, where it is alone; more than one: those that its cache lacks are among them.
    """

    def __init__(
        self,
        levels: list[Level],
        sampled: bool = False,
        warp: Callable[[Tensor], Tensor] | None = None,
        divided: bool = False,
        *,
        most: Sequence[int] | None = None,
        active: Sequence[int] | None = None,
        steps: int = UNROLLED,
        draft_window: int = 0,
        lead: int = 1,
    ):
        self.levels, self.sampled, self.warp, self.divided, self.lead = levels, sampled, warp, divided, lead
        self.most = [1, *([level.most for level in levels[1:]] if most is None else most)]
        self.active = tuple(range(len(levels) - 1) if active is None else active)
        # Of each level; a lookup reads no cache.
        self.windows = [0, *(getattr(level, "draft_window", 0) or draft_window for level in levels[1:])]
        self.checks: list[Check] = []
        self.fields, self.steps = 1, steps if len(levels) == 1 else 1
        if len(levels) == 1:
            for _ in range(steps):
                self._plan(0, 1)
        else:
            self._plan_draft(1)
            self._plan(0, self.most_checked)

    def handed_up(self, index: int) -> int:
        """The most tokens a level below the target drafts for a check."""
        most = self.most[index]
        return most if index + 1 == len(self.levels) else most * (self.handed_up(index + 1) + 1)

    @property
    def most_checked(self) -> int:
        """Tokens of the target's check."""
        return 1 if len(self.levels) == 1 else self.handed_up(1) + 1

    @property
    def layers(self) -> int:
        """Layers of all forward passes of a round: what capturing it takes is in proportion to them."""
        return sum(self.forwards(index) * (level.decoder.num_layers + level.decoder.num_recurrent)
                   for index, level in enumerate(self.levels) if isinstance(level, RoundLevel))  # fmt: skip

    @property
    def plane_sources(self) -> list[PlaneSource]:
        """Where its levels' streamed planes come from."""
        decoders = [level.decoder for level in self.levels if isinstance(level, RoundLevel)]
        return list({id(source): source for decoder in decoders for source in decoder.plane_sources}.values())

    def drafts(self, index: int) -> int:
        """How often a level below the target drafts in a round."""
        return sum(check.level == index - 1 for check in self.checks)

    def forwards(self, index: int) -> int:
        """Forward passes of a level in a round."""
        if isinstance(self.levels[index], LookupLevel):
            return 0
        if index and index + 1 == len(self.levels):
            return self.most[index] * self.drafts(index)
        return sum(check.level == index for check in self.checks)

    def enqueue(self, state: RoundState, report: Tensor) -> None:
        """One round: `state` moves on, `report` (int32 ``[batch, fields]``) says how, whose logits held NaN first."""
        checks = iter(self.checks)
        if len(self.levels) == 1:
            for check in checks:
                self._check(state, report, check, 0)
        else:
            self._draft(state, report, 1, 0, checks)
            self._check(state, report, next(checks), 0)
        report[:, 0] = state.failed

    def _plan_draft(self, index: int) -> None:
        if index + 1 < len(self.levels):
            for _ in range(self.most[index]):
                self._plan_draft(index + 1)
                self._plan(index, self.handed_up(index + 1) + 1)

    def _plan(self, level: int, judged: int) -> None:
        self.checks.append(Check(level, self.fields, judged))
        self.fields += CHECK_FIELDS + (judged if level == 0 else 0)

    def _draft(self, state: RoundState, report: Tensor, index: int, since: int, checks) -> None:
        """Level `index` drafts for the one above; since: the highest level that checked since it was fed last."""
        script = None if state.script is None else state.script[index - 1]
        cursor = None if state.cursor is None else state.cursor[index - 1]
        above, own = _marks(state, index - 1), _marks(state, index)
        ops.round_open(*above, self.handed_up(index), script, cursor, *own)
        if index + 1 == len(self.levels):
            self._steps(state, index, since)
            return
        for _ in range(self.most[index]):
            self._draft(state, report, index + 1, since, checks)
            self._check(state, report, next(checks), since)
            since = index

    def _steps(self, state: RoundState, index: int, since: int) -> None:
        level = self.levels[index]
        lengths, active, ends = _marks(state, index)
        if isinstance(level, LookupLevel):
            ops.round_lookup(state.tokens, lengths, active, ends, level.min_ngram, level.max_ngram)
            return
        lead = self._lead(index, since)
        ids, starts, counts, pick, _ = ops.round_window(state.tokens, lengths, lengths, active, lead, 1)
        for step in range(self.most[index]):
            picked = pick if step == 0 and lead > 1 else None
            logits = self._forward(index, ids, starts, counts, picked, first=since == 0 and step == 0)
            chosen, confidence = self._choose(level, state, logits, lengths)
            operands = state.tokens, lengths, active, ends, chosen, confidence, level.threshold, state.failed
            ids, starts, counts = ops.round_push(*operands, index + 1)

    def _check(self, state: RoundState, report: Tensor, check: Check, since: int) -> None:
        level, index = self.levels[check.level], check.level
        base, active, ends = _marks(state, index)
        lengths = state.lengths[index + 1] if index + 1 < len(self.levels) else base
        lead = self._lead(index, since)
        window = ops.round_window(state.tokens, base, lengths, active, lead, check.judged)
        ids, starts, counts, pick, positions = window
        logits = self._forward(index, ids, starts, counts, pick if lead > 1 else None, first=since == 0)
        chosen, confidence = self._choose(level, state, logits, positions)
        scripted = state.script is not None and len(self.levels) > 1
        width = CHECK_FIELDS + (check.judged if index == 0 else 0)
        ops.round_settle(
            state.tokens, base, lengths, active, ends, chosen, confidence, level.threshold,
            state.script[index] if scripted else None, state.cursor[index] if scripted else None,
            report[:, check.column : check.column + width], state.failed, index + 1,
        )  # fmt: skip

    def _lead(self, index: int, since: int) -> int:
        """Accepted tokens a level is fed: the last, and one more for each level that checked it since."""
        if index == 0:
            return self.lead
        return index - since + 1 if self.levels[index].own_cache else 1

    def _forward(
        self, index: int, ids: Tensor, starts: Tensor, counts: Tensor, pick: Tensor | None, first: bool
    ) -> Tensor:
        """first: nothing behind these tokens was fed since the target checked; what is, may be taken back."""
        level, view = self.levels[index], {"bits": self.levels[index].bits, "draft_window": self.windows[index]}
        kv = level.kv[: level.decoder.num_layers, :, : len(ids)]
        if level.states is not None:
            settles = AT_START if first and level.own_cache else KEEP
            view |= {"states": level.states.part(0, len(ids)), "settles": settles}
        logits = level.decoder.forward(ids, starts, counts, kv, pick=pick, **view)
        return logits if logits.shape[1] <= level.vocab_size else logits[:, : level.vocab_size].contiguous()

    def _choose(
        self, level: RoundLevel, state: RoundState, logits: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        cap = level.decoder.logit_softcap
        if self.warp is not None:
            logits, cap = self.warp(soft_capped(logits.float(), cap)), 0.0
        if not self.sampled:
            return ops.choose_rows(logits, cap)
        each = len(positions) // len(state.streams)

        def of_positions(rows: Tensor) -> Tensor:
            return rows[:, None].expand(-1, each).reshape(-1).contiguous()

        if self.divided:
            logits, cap = _over(soft_capped(logits.float(), cap), of_positions(state.temperatures)), 0.0
        seeds, streams = of_positions(state.seeds), of_positions(state.streams)
        return ops.choose_rows(logits, cap, seeds, streams, positions)


def _over(scores: Tensor, temperatures: Tensor) -> Tensor:
    """Every line over its temperature, with the bits that torch gives it for a single number: on a GPU it multiplies
    by the reciprocal."""
    return scores * temperatures.reciprocal()[:, None] if scores.is_cuda else scores / temperatures[:, None]


def rounds_of(wanted: int, below: int) -> int:
    """Rounds of a level in the middle after which it hands up at least `wanted` tokens, if all are kept: each commits
    `below` that are handed up to it, and one of its own."""
    return -(-wanted // (below + 1))


def repeats_of(lengths: Sequence[int]) -> list[int]:
    """`most` of every level, from the top down, that drafts at least so many tokens for the one above."""
    found, below = [], 0
    for wanted in reversed(lengths):
        found.insert(0, rounds_of(wanted, below) if found else wanted)
        below = found[0] * (below + 1) if len(found) > 1 else wanted
    return found


def _marks(state: RoundState, index: int) -> tuple[Tensor, Tensor, Tensor]:
    return state.lengths[index], state.active[index], state.ends[index]
