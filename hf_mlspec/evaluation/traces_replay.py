"""How fast would a chain of this shape decode if its drafts were accepted as a trace says? By real forward passes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList

from ..engines.modules.attention import ragged_attention_on
from ..integration.compare import accumulate
from ..integration.config import SpeculationConfig
from ..integration.levels.resolve import Level, resolve
from ..integration.levels.wiring import Chain, Wiring
from ..integration.request import check_model, vocab_size
from ..speculation.loop import decode
from ..speculation.sampling import Sampler
from ..speculation.stats import SpeculationStats
from ..speculation.traces.script import NEVER_STOPS, ScriptedChecker, scripted
from ..speculation.traces.trace import Trace, TracedRow, longest


@dataclass
class ReplayResult:
    """Result of a replay. Seconds are of this machine and these models, acceptances are those of the trace.

    stats: counts and seconds summed over batches; names of levels end in "(replayed)". seconds: wall time of all
    batches, without building levels and decoders. fused_rounds: whether whole rounds ran as one call, as in captured
    rounds. Step by step they do not, because a compiled round would decide about acceptance itself: levels above the
    last run round by round, with each pass compiled if it is in `generate`.
    """

    name: str
    data: str
    batch_size: int
    rows: int
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    seconds: float = 0.0
    fused_rounds: bool = False

    @property
    def tokens(self) -> int:
        """New tokens, summed over rows."""
        return self.stats.new_tokens

    @property
    def decode_seconds(self) -> float:
        """Wall time after every row had its first tokens; what a draft with its own cache did before is left out."""
        return self.stats.seconds - self.stats.prefill_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Of the whole batch, decode-only; None where the first passes wrote all there was."""
        tokens = self.tokens - self.stats.prefill_tokens
        return tokens / self.decode_seconds if tokens else None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        derived = {name: getattr(self, name) for name in ("tokens", "decode_seconds", "tokens_per_second")}
        return {**vars(self), "stats": self.stats.to_dict(), **derived, "replayed": True}


def replay(
    model: PreTrainedModel,
    trace: Trace,
    levels: Sequence[Any],
    *,
    batch_size: int = 1,
    max_new_tokens: int | None = None,
    rows: Sequence[int] | None = None,
    speculation_config: SpeculationConfig | dict | None = None,
    name: str | None = None,
) -> ReplayResult:
    """Run every forward pass of the rounds in `trace` on `model` and `levels`, of any shapes and any weights.

    Prompts are random ids of the recorded lengths. Row r of a batch drafts, accepts and ends as its row of the trace
    did; its tokens mean nothing. A row that max_new_tokens cuts off runs its last round in full.

    levels: as generate takes them, one per level of the trace, with any vocabularies; `trace.alone()` is the trace of
        a target without levels.
    rows: numbers of the trace's rows to replay, in this order, batch_size at a time; None: all. The last batch may be
        smaller.
    speculation_config: how levels are built (cast_rule, shared_cache, prepare ...); draft lengths are the trace's, and
        confidences are computed if it has a threshold.
    name: of the result, with "(replayed)" appended.
    Raises ValueError, before anything is computed, for a wrong number of levels, rows that the trace does not have,
    a batch larger than the rows, more new tokens than were recorded, and models with too few positions.
    """
    return replayed(_StepByStep, model, trace, levels, batch_size, max_new_tokens, rows, speculation_config, name)


class Batches(Protocol):
    """A way to replay the batches of a trace. fused_rounds: as in `ReplayResult`."""

    fused_rounds: bool

    def batch(self, rows: Sequence[TracedRow], result: ReplayResult) -> None:
        """Decode one batch from its prompts to the end of its last row, and add what it took."""


def replayed(
    way: Callable[..., Batches], model: PreTrainedModel, trace: Trace, levels: Sequence[Any], batch_size: int,
    max_new_tokens: int | None, rows: Sequence[int] | None, given: SpeculationConfig | dict | None, name: str | None,
) -> ReplayResult:  # fmt: skip
    """Check what `replay` was asked for, and replay all batches; way: called as `ReplayedChain`."""
    trace = _selected(trace, rows, batch_size, max_new_tokens)
    check_model(model, "the target")
    _check_level_count(trace, levels)
    run = way(model, trace, list(levels), _config_of(given, trace), max_new_tokens, batch_size)
    words = [level if isinstance(level, str) else type(level).__name__ for level in levels]
    result = ReplayResult(f"{name or words} (replayed)", trace.data, batch_size, len(trace.rows))
    result.fused_rounds = run.fused_rounds
    for start in range(0, len(trace.rows), batch_size):
        run.batch(trace.rows[start : start + batch_size], result)
    for level in result.stats.levels:
        level.name = f"{level.name} (replayed)"
    return result


class ReplayedChain:
    """What every batch of a replay runs on."""

    def __init__(self, model: PreTrainedModel, trace: Trace, levels: list, config: SpeculationConfig,
                 max_new_tokens: int | None, batch_size: int):
        self.model, self.trace, self.config, self.batch_size = model, trace, config, batch_size
        self.most = trace.max_new_tokens if max_new_tokens is None else max_new_tokens
        self.levels = resolve(model, levels, None, config)
        self.capacity = max(longest(row, self.most) for row in trace.rows) + 1
        self._check_fit(self._chain())

    def _chain(self) -> Chain:
        return _ReplayWiring(self.model, self.config, self.levels, self.capacity).build(self.levels)

    def _prompts(self, rows: Sequence[TracedRow], more: Sequence[int] | None = None) -> list[list[int]]:
        """Random ids that every level can embed, the same in every call; `more` of them than the prompts had."""
        generator = torch.Generator().manual_seed(0)
        sizes = [vocab_size(model) for model in (self.model, *(level.model for level in self.levels)) if model]
        lengths = [row.prompt_tokens + n for row, n in zip(rows, more or [0] * len(rows), strict=True)]
        return [torch.randint(min(sizes), (length,), generator=generator).tolist() for length in lengths]

    def _check_fit(self, chain: Chain) -> None:
        """ValueError for a model without the positions, or a chain without the cache, that the rounds need."""
        drafted = max((level.num_draft_tokens for level in self.trace.levels), default=0)
        for name, runner in zip(
            ("the target", *(level.name for level in chain.levels)), (chain.target.runner, *chain.runners), strict=True
        ):
            most = runner.max_positions if runner is not None else None
            needed = max(self.capacity - 1, 2 * drafted)
            if most is not None and most < needed:
                raise ValueError(
                    f"the trace needs {needed} positions (prompt, new tokens and guesses of its longest row), and "
                    f"{name} has {most}: replay fewer new tokens (max_new_tokens) or shorter rows (rows), or use a "
                    "model with more positions"
                )
        early = next((n for n, row in enumerate(self.trace.rows) if row.rounds[0].drafted), None)
        if early is not None and getattr(chain.drafter, "follows", False):
            raise ValueError(
                f"row {early} of the trace drafts before the prompt was read, in a cache of the draft's own, and "
                f"level {chain.drafter.name} drafts in the target's: pass speculation_config={{'shared_cache': False}}"
            )


class _StepByStep(ReplayedChain):
    """Every pass by itself, every check overruled."""

    fused_rounds = False

    def batch(self, rows: Sequence[TracedRow], result: ReplayResult) -> None:
        """From its first round to its last."""
        chain = self._chain()
        target = ScriptedChecker(chain.target)
        if chain.drafter is not None:
            chain.levels = scripted(chain.drafter, target)
        device = next(self.model.parameters()).device
        prompts, budgets = self._prompts(rows), [min(row.new_tokens, self.most) for row in rows]
        with ragged_attention_on(chain.models), torch.inference_mode():
            begin = time.perf_counter()
            target.start(len(rows), device)
            target.follow([row.rounds for row in rows])
            stats = decode(
                target, chain.levels[0] if chain.levels else None, prompts, budgets,
                num_draft_tokens=chain.num_draft_tokens, device=device,
            )
            result.seconds += time.perf_counter() - begin
        accumulate(result.stats, chain.finish(stats))


class _ReplayWiring(Wiring):
    """A greedy chain without processors, in which every token id is everyone's."""

    def __init__(self, model: PreTrainedModel, config: SpeculationConfig, levels: list[Level], capacity: int):
        super().__init__(model, None, config, processors=LogitsProcessorList(), prompts=None,
                         capacity=capacity, keep_logits=False)
        self.vocab_size = max([self.vocab_size, *(vocab_size(level.model) for level in levels if level.model)])

    def _sampler(self, vocab_size: int | None = None) -> Callable[[], Sampler]:
        return partial(Sampler, self.vocab_size)

    def _same_vocabulary(self, *_: Any) -> bool:
        return True


def _selected(trace: Trace, rows: Sequence[int] | None, batch_size: int, max_new_tokens: int | None) -> Trace:
    """The rows to be replayed; ValueError for some that are not there, and for counts out of range."""
    if rows is not None:
        trace = trace.of_rows(list(rows))
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}: it must be a positive integer")
    if batch_size > len(trace.rows):
        raise ValueError(f"a batch of {batch_size} needs as many rows, and {len(trace.rows)} are to be replayed")
    if max_new_tokens is not None and not 1 <= max_new_tokens <= trace.max_new_tokens:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}: the trace was recorded with {trace.max_new_tokens}; "
            "use 1 to that many, or record a longer trace"
        )
    return trace


def _check_level_count(trace: Trace, levels: Sequence[Any]) -> None:
    """ValueError unless there is a level for each of the trace's."""
    if len(levels) != len(trace.levels):
        recorded = ", ".join(level.name for level in trace.levels) or "none"
        raise ValueError(
            f"the trace has {len(trace.levels)} levels ({recorded}), the replay is given {len(levels)}: give one for "
            "each, or trace.alone() for the target alone"
        )


def _config_of(given: SpeculationConfig | dict | None, trace: Trace) -> SpeculationConfig:
    """The user's way to build levels, with the trace's draft lengths."""
    given = SpeculationConfig.of(given)
    if given.num_draft_tokens is not None or given.confidence_threshold is not None:
        raise ValueError(
            "num_draft_tokens and confidence_threshold of a replay are those of the trace: leave them out"
        )
    if given.tree is not None:
        raise ValueError(f"tree is {given.tree}, and a replay drafts the rows of its trace: leave tree out")
    lengths = [max(1, level.num_draft_tokens) for level in trace.levels]
    thresholds = [NEVER_STOPS if level.confidence_threshold > 0 else 0.0 for level in trace.levels]
    return SpeculationConfig(**{**vars(given), "num_draft_tokens": lengths, "confidence_threshold": thresholds})
