"""Do chains of any depth write what the target alone writes, does that follow its distribution, and would this test
notice if not?

200,000 sequences per chain are held against exact enumeration. Every level has a distribution of its own.
"""

from __future__ import annotations

import random

import pytest
import torch
from scipy.stats import chisquare
from tables import SEED, PointMasses, chain, checker, counts, drafter, exact, table, write

from hf_mlspec.speculation.draft import Draft, Drafter, Rows
from hf_mlspec.speculation.drafters.checked import CheckedDrafter

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


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """What the target writes without levels."""
    return write(TARGET, None, rows=DRAWS, tokens=5)


def test_the_target_alone_follows_its_distribution(alone):
    for tokens in (3, 4, 5):
        assert p_value(alone[:, :tokens], TARGET) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_chain_writes_what_the_target_writes(name, alone):
    below, tokens = CHAINS[name]
    level = below()
    written = write(TARGET, level, rows=DRAWS, tokens=tokens)
    assert torch.equal(written, alone[:, :tokens])
    assert p_value(written, TARGET) > 1e-3
    # It was speculation that was tested: at every level guesses were made, kept, and refused.
    assert 0 < level.stats.accepted < level.stats.drafted
    while isinstance(level, CheckedDrafter):
        level = level.inner
        assert 0 < level.stats.accepted < level.stats.drafted


class Restless:
    """A level whose drafts have another length in every round and row, or are none at all."""

    def __init__(self, inner: Drafter, seed: int):
        self.inner, self.rng, self.round = inner, random.Random(seed), seed
        self.lengths: set[int] = set()

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def propose(self, rows: Rows, limits: list[int]) -> Draft:
        self.round += 1
        most = 5 if self.round % 3 else 1
        draft = self.inner.propose(rows, [min(limit, self.rng.randrange(most)) for limit in limits])
        self.lengths |= set(draft.lengths)
        return draft


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CHAINS)
def test_lengths_that_change_from_round_to_round_change_no_token(name, seed, alone):
    level = CHAINS[name][0]()
    inner = level
    while isinstance(inner, CheckedDrafter):
        inner.inner = Restless(inner.inner, seed)
        inner = inner.inner.inner
    level = Restless(level, seed)
    written = write(TARGET, level, rows=DRAWS // 10, tokens=5)
    assert torch.equal(written, alone[: DRAWS // 10])
    assert {0, 1, 2} <= level.lengths
    assert 0 < level.stats.accepted < level.stats.drafted


def test_noise_of_its_own_costs_a_level_acceptance_and_changes_no_token(alone):
    shared, own = drafter(TARGET), drafter(TARGET, seed=SEED + 1)
    for level in (shared, own):
        assert torch.equal(write(TARGET, level, rows=2000, tokens=5), alone[:2000])
    assert shared.stats.accepted == shared.stats.drafted
    assert own.stats.accepted < 0.7 * own.stats.drafted


def test_another_seed_writes_something_else_of_the_same_distribution(alone):
    written = write(checker(TARGET, SEED + 1), None, rows=DRAWS, tokens=3)
    assert p_value(written, TARGET) > 1e-3
    both = torch.stack([written[:, 0], alone[:, 0]], dim=1)
    together = torch.outer(TARGET[0], TARGET[0]).flatten().double()
    assert chisquare(counts(both).numpy(), (together * (DRAWS / together.sum())).numpy()).pvalue > 1e-3


def test_a_draft_may_end_for_any_reason(alone):
    """Even for the values of its own tokens: a guess that is not made is no guess that failed."""
    level = chain([SECOND], drafter(FIRST))
    propose = level.propose

    def forgets(rows: Rows, limits: list[int]) -> Draft:
        draft = propose(rows, limits)
        ends = [next((i for i, token in enumerate(line[:n]) if token == 2), n)
                for line, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)]
        draft.lengths = ends
        return draft

    level.propose = forgets
    assert torch.equal(write(TARGET, level, rows=DRAWS // 4, tokens=3), alone[: DRAWS // 4, :3])


def broken(choose) -> torch.Tensor:
    """What is written where `choose(best, firsts, round, sampler)` stands between the target and its noise."""
    target, rounds = checker(TARGET), []
    honest = target.sampler.choose

    def chosen(scores, firsts, lengths):
        rounds.append(None)
        return choose(lambda *firsts: honest(scores, *firsts, lengths), firsts, len(rounds), target.sampler)

    target.sampler.choose = chosen
    return write(target, drafter(FIRST), rows=DRAWS // 4, tokens=3)


def test_noise_that_depends_on_the_round_is_noticed(alone):
    def choose(best, firsts, number, sampler):
        sampler.seed = SEED + number
        return best(firsts)

    assert not torch.equal(broken(choose), alone[: DRAWS // 4, :3])


def test_noise_that_is_used_twice_is_noticed():
    def choose(best, firsts, number, sampler):
        return best([0] * len(firsts))

    assert p_value(broken(choose), TARGET) < 1e-6


def test_rows_that_share_their_noise_are_noticed():
    def choose(best, firsts, number, sampler):
        sampler.row_ids = [row // 2 for row in sampler.row_ids]
        return best(firsts)

    written = broken(choose)
    pairs = torch.stack([written[0::2, 0], written[1::2, 0]], dim=1)
    together = torch.outer(TARGET[0], TARGET[0]).flatten().double()
    assert chisquare(counts(pairs).numpy(), (together * (len(pairs) / together.sum())).numpy()).pvalue < 1e-6
