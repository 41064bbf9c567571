"""Do chains of any depth keep the target's distribution, and would this test notice if one did not?

200,000 sequences per chain are held against exact enumeration. Every level has a distribution of its own.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from tables import PointMasses, chain, checker, counts, drafter, exact, table, write

from hf_mlspec.speculation.chain import CheckedDrafter
from hf_mlspec.speculation.checker import Verdict
from hf_mlspec.speculation.draft import Draft, Rows
from hf_mlspec.speculation.drafters.model import ModelDrafter

DRAWS = 200_000
TARGET, FIRST, SECOND, THIRD, FOURTH = (table(seed) for seed in range(5))


def p_value(written: torch.Tensor, target: torch.Tensor) -> float:
    seen = counts(written)
    expected = exact(target, written.shape[1])
    return chisquare(seen.numpy(), (expected * (seen.sum() / expected.sum())).numpy()).pvalue


def point_masses() -> PointMasses:
    return PointMasses([1, 2, 3, 0])


# name -> (the chain below the target, tokens a sequence has: enough for the last level to draft)
CHAINS = {
    "depth 1": (lambda: drafter(FIRST), 3),
    "depth 1, threshold": (lambda: drafter(FIRST, threshold=0.4), 3),
    "depth 1, point masses": (point_masses, 3),
    "depth 2": (lambda: chain([SECOND], drafter(FIRST)), 3),
    "depth 2, thresholds": (lambda: chain([SECOND], drafter(FIRST, 0.3), threshold=0.3), 4),
    "depth 3, point masses": (lambda: chain([THIRD, SECOND], point_masses(), threshold=0.2), 4),
    "depth 4, thresholds": (lambda: chain([FOURTH, THIRD, SECOND], drafter(FIRST, 0.3), threshold=0.3), 5),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_keeps_the_targets_distribution(name):
    below, tokens = CHAINS[name]
    level = below()
    written = write(TARGET, level, rows=DRAWS, tokens=tokens, seed=11)
    assert p_value(written, TARGET) > 1e-3
    # It was speculation that was tested: at every level guesses were made, kept, and refused.
    assert 0 < level.stats.accepted < level.stats.drafted
    while isinstance(level, CheckedDrafter):
        level = level.inner
        assert 0 < level.stats.accepted < level.stats.drafted


class WithoutCorrections(CheckedDrafter):
    """Breaks invariant 1: hands up the accepted tokens only, with the checker's probabilities."""

    def _round(self, seen: Rows, limits: list[int], alive: list[bool]) -> Verdict:
        verdict = super()._round(seen, limits, alive)
        if any(limits):
            verdict.tokens = [tokens[:n] for tokens, n in zip(verdict.tokens, verdict.accepted, strict=True)]
        return verdict


class ForgetfulDrafter(ModelDrafter):
    """Breaks invariant 6: takes back the token whose own probability was below the threshold."""

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        draft = super().propose(rows, limits)
        for r, length in enumerate(draft.lengths):
            if length:
                last = draft.probs[r, length - 1, draft.tokens[r, length - 1]]
                draft.lengths[r] -= int(last < self.threshold)
        return draft


def test_a_level_that_drops_its_correction_is_noticed():
    level = WithoutCorrections(checker(SECOND), drafter(FIRST), num_draft_tokens=2, threshold=0.0)
    assert p_value(write(TARGET, level, rows=DRAWS // 4, tokens=3, seed=11), TARGET) < 1e-6


def test_a_threshold_that_drops_tokens_is_noticed():
    honest = drafter(FIRST, threshold=0.4)
    level = ForgetfulDrafter(honest.runner, honest.sampler, "forgetful", threshold=0.4)
    assert p_value(write(TARGET, level, rows=DRAWS // 4, tokens=3, seed=11), TARGET) < 1e-6


def test_a_draft_with_another_levels_probabilities_is_noticed():
    level = drafter(FIRST)
    propose = level.propose

    def claims(rows: Rows, limits: list[int]) -> Draft:
        draft = propose(rows, limits)
        if draft.probs is not None:
            draft.probs = draft.probs.roll(1, dims=-1)
        return draft

    level.propose = claims
    assert p_value(write(TARGET, level, rows=DRAWS // 4, tokens=3, seed=11), TARGET) < 1e-6
