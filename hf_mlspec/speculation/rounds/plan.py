"""Can the rounds of a chain be captured, and as which levels? Each no says why."""

from __future__ import annotations

from ..checker import Checker
from ..draft import Drafter
from ..drafters.checked import CheckedDrafter
from ..drafters.model import ModelDrafter
from ..drafters.prompt_lookup import PromptLookup
from ..row_sampling import RowSampler
from ..sampling import Sampler
from .program import MOST_PASSES, Level, LookupLevel, RoundLevel, rounds_of

# Rows from which padding is no longer free: a draft in the middle is then made in a single round.
_MANY_ROWS = 16


class NotCaptured(ValueError):
    """The rounds of this chain run step by step; the message says why."""


def round_levels(
    target: Checker, drafter: Drafter | None, *, num_draft_tokens: int, batch: int, longest: int
) -> list[Level]:
    """The levels of a round, the target first, without their keys and values.

    longest: maximal length of a row of the batch. NotCaptured names the first thing that prevents capturing.
    """
    if target.keep_logits:
        raise NotCaptured("scores or logits are returned")
    levels = [_level(target.runner, target.sampler, target.name)]
    wanted = num_draft_tokens
    while drafter is not None:
        level = _below(drafter, longest)
        if isinstance(drafter, CheckedDrafter):
            level.most = 1 if batch >= _MANY_ROWS else _rounds(drafter, wanted)
            wanted, drafter = drafter.num_draft_tokens, drafter.inner
        else:
            level.most, drafter = wanted, None
        levels.append(level)
    _require_few(levels)
    return levels


def can_be_captured(target: Checker, drafter: Drafter | None) -> bool:
    """Whether short rounds of a chain can be captured."""
    try:
        round_levels(target, drafter, num_draft_tokens=1, batch=1, longest=1)
    except NotCaptured:
        return False
    return True


def too_long(drafter: ModelDrafter | CheckedDrafter | PromptLookup, longest: int) -> str:
    """Why a level cannot draft for rows that may reach `longest` tokens; "" where it can."""
    if isinstance(drafter, PromptLookup) or drafter.max_positions is None or longest <= drafter.max_positions:
        return ""
    return f"level {drafter.name} sees {drafter.max_positions} tokens, rows may have {longest}"


def _require_few(levels: list[Level]) -> None:
    passes, drafts = 1, 1
    for level in levels[1:]:
        drafts *= level.most
        passes += drafts if isinstance(level, RoundLevel) else 0
    if passes > MOST_PASSES:
        raise NotCaptured(f"a round has {passes} passes, at most {MOST_PASSES} are captured: lower num_draft_tokens")


def _rounds(drafter: CheckedDrafter, wanted: int) -> int:
    """Rounds of the level below after which a draft has at least `wanted` tokens, if all of them are kept."""
    inner = drafter.inner
    each = drafter.num_draft_tokens
    if isinstance(inner, CheckedDrafter):
        each = _rounds(inner, each) * (inner.num_draft_tokens + 1)
    return rounds_of(wanted, each)


def _below(drafter: Drafter, longest: int) -> Level:
    if type(drafter) is PromptLookup:  # another class may find other tokens
        return LookupLevel(drafter.name, drafter.min_ngram, drafter.max_ngram)
    if not isinstance(drafter, (ModelDrafter, CheckedDrafter)):
        raise NotCaptured(f"level {drafter.name} is neither a prompt lookup nor a model with the target's vocabulary")
    checks = isinstance(drafter, CheckedDrafter)
    judge = drafter.checker if checks else drafter
    if not checks and drafter.allowed is not None:
        raise NotCaptured(f"level {drafter.name} may draft some tokens only")
    if reason := too_long(drafter, longest):
        raise NotCaptured(reason)
    level = _level(judge.runner, judge.sampler, f"level {drafter.name}")
    level.threshold = drafter.threshold
    return level


def _level(runner, sampler: Sampler, name: str) -> RoundLevel:
    if not runner.can.capturable:
        how = "module by module" if runner.can.by_module else "in steps, some of which wait for the host"
        raise NotCaptured(f"{name} runs {how}")
    if type(sampler) is not Sampler and not (isinstance(sampler, RowSampler) and sampler.is_plain):
        raise NotCaptured("rows have settings of their own")
    if sampler.reads_tokens:
        raise NotCaptured("logits processors read the tokens before a position")
    own = runner.follow is None
    how = {"cache_format": runner.kept_in, "draft_window": runner.draft_window}
    return RoundLevel(name, runner.decoder, own, runner.bits, sampler.vocab_size, **how)
