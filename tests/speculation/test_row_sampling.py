"""Does a row that samples with noise of its own keep the target's distribution, and notice nothing but its seed?"""

from __future__ import annotations

import gc

import pytest
import torch
from scipy.stats import chisquare
from tables import CPU, VOCAB, PointMasses, TableRunner, counts, exact, table

from hf_mlspec.engines.engine import Guess
from hf_mlspec.speculation import row_sampling
from hf_mlspec.speculation.checker import Checker
from hf_mlspec.speculation.draft import Drafter
from hf_mlspec.speculation.drafters.checked import CheckedDrafter
from hf_mlspec.speculation.drafters.model import ModelDrafter
from hf_mlspec.speculation.loop import Loop
from hf_mlspec.speculation.rounds.host import HostRounds
from hf_mlspec.speculation.row_sampling import RowRule, RowSampler
from hf_mlspec.speculation.sampling import Sampler, drawn

TARGET, FIRST, SECOND = (table(seed) for seed in range(3))
ROWS, TOKENS = 20_000, 4
Rules = list[RowRule]


def small(rules: Rules, threshold: float = 0.0) -> Drafter:
    return ModelDrafter(TableRunner(FIRST), RowSampler(VOCAB, rules), "small", threshold=threshold)


def middle(rules: Rules, threshold: float = 0.0) -> Drafter:
    checker = Checker(TableRunner(SECOND), RowSampler(VOCAB, rules), "middle")
    return CheckedDrafter(checker, small(rules, threshold), num_draft_tokens=2, threshold=threshold)


CHAINS = {
    "alone": lambda rules: None,
    "model": small,
    "model, threshold": lambda rules: small(rules, 0.4),
    "point masses": lambda rules: PointMasses([1, 2, 3, 0]),
    "two levels": middle,
    "two levels, thresholds": lambda rules: middle(rules, 0.3),
}


def sampled(seeds: list[int]) -> Rules:
    return [RowRule(VOCAB, prompt_length=1, seed=seed) for seed in seeds]


def write(name: str, rules: Rules) -> torch.Tensor:
    """The tokens of every rule's row after token 0: int64 `[rows, TOKENS]`."""
    rows, rules = [[0] for _ in rules], list(rules)
    target, below = Checker(TableRunner(TARGET), RowSampler(VOCAB, rules), "target"), CHAINS[name](rules)
    loop = Loop(
        HostRounds(target, below, num_draft_tokens=3, device=CPU),
        stop=lambda number, row, tokens: (len(tokens), False),
        emit=lambda numbers, kept, verdict: None,
    )
    target.start(len(rows), CPU)
    loop.start(rows, [TOKENS] * len(rows))
    gc.disable()  # tens of thousands of lists live at once, all of them wanted
    try:
        while going := loop.round():
            loop.select(going)
            rules[:] = [rules[r] for r in going]
    finally:
        gc.enable()
    if below is not None:
        assert 0 < below.stats.accepted < below.stats.drafted
    return torch.tensor(rows)[:, 1:]


def p_value(written: torch.Tensor) -> float:
    expected = exact(TARGET, TOKENS)
    return chisquare(counts(written).numpy(), (expected * (len(written) / expected.sum())).numpy()).pvalue


@pytest.mark.slow
def test_rows_follow_the_targets_distribution():
    assert p_value(write("alone", sampled(range(ROWS)))) > 1e-3


@pytest.mark.parametrize("name", [name for name in CHAINS if name != "alone"])
def test_no_level_below_changes_a_token(name):
    seeds = list(range(2_000))
    assert torch.equal(write(name, sampled(seeds)), write("alone", sampled(seeds)))


@pytest.mark.slow
def test_noise_that_is_used_twice_is_noticed(monkeypatch):
    """Every position has the noise of the first."""
    monkeypatch.setattr(row_sampling, "drawn", lambda scores, seed, streams, *_: drawn(scores, seed, streams, [0]))
    assert p_value(write("alone", sampled(range(ROWS)))) < 1e-6


def test_a_row_has_the_noise_of_a_call_of_one_row():
    one, scores = RowSampler(500, [RowRule(500, prompt_length=1, seed=s) for s in (7, 8)]), torch.zeros(2, 3, 500)
    alone = Sampler(500, seed=7)
    alone.start(1)
    found = one.choose(scores, [4, 9], [2, 2])
    assert torch.equal(found[:1], alone.choose(scores[:1], [4], [2]))
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_has_noise(seed):
    rule = RowRule(500, prompt_length=1, seed=seed)
    assert len(set(RowSampler(500, [rule]).choose(torch.zeros(1, 9, 500), [0], [8])[0].tolist())) > 5


@pytest.mark.parametrize("name", CHAINS)
def test_greedy_rows_take_the_best_beside_rows_that_sample(name):
    rules = sampled(range(30))
    greedy = [RowRule(VOCAB, prompt_length=1) for _ in range(10)]
    mixed = [rule for triple, one in zip(zip(*[iter(rules)] * 3, strict=True), greedy, strict=True)
             for rule in (*triple, one)]
    written = write(name, mixed)
    expected = [0]
    for _ in range(TOKENS):
        expected.append(int(TARGET[expected[-1]].argmax()))
    assert (written[3::4] == torch.tensor(expected[1:])).all()
    assert torch.equal(written[0::4], write("alone", sampled(range(0, 30, 3))))


def test_equal_scores_go_to_the_first():
    sampler = RowSampler(5, [RowRule(5, prompt_length=1), *sampled([0])])
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 3.0]]).repeat(2, 1)
    tokens, confidence = sampler.draw(scores[:, :VOCAB + 1], [1, 1], [True, False])
    assert tokens[0] == 1
    torch.testing.assert_close(confidence[0], scores[0].softmax(-1)[1])


def test_rows_are_processed_by_their_own_rules_only():
    asked = []

    def process(prefixes, scores, numbers):
        asked.extend(tuple(prefix) for prefix in prefixes)
        assert set(numbers) == {0}
        return scores.masked_fill(torch.arange(VOCAB) == 2, float("-inf"))

    rules = [
        RowRule(VOCAB, prompt_length=2, process=process),
        RowRule(VOCAB, prompt_length=1, warp=lambda scores: 2 * scores),
        RowRule(VOCAB, prompt_length=1),
        RowRule(VOCAB, prompt_length=2, process=process),
    ]
    sampler = RowSampler(VOCAB, rules)
    assert not sampler.is_greedy
    assert sampler.reads_tokens
    logits = torch.randn(4, 3, VOCAB)
    before = logits.clone()
    draft, lengths = torch.tensor([[1, 3], [0, 0], [1, 1], [1, 1]]), [2, 1, 2, 2]
    scores = sampler.scores(logits, [[0, 1], [1], [2], [0, 0]], Guess(draft, lengths), [True, True, True, False])
    assert torch.equal(logits, before)
    assert scores[0, :, 2].isneginf().all()
    assert torch.equal(scores[1, :2], 2 * logits[1, :2])
    assert torch.equal(scores[2], logits[2])
    assert sorted(asked) == [(0, 1), (0, 1, 1), (0, 1, 1, 3)]  # nothing of the row that rests


def test_a_row_whose_processor_fails_leaves_the_others_alone():
    def process(prefixes, scores, numbers):
        raise KeyError("mine")

    rules = [RowRule(VOCAB, prompt_length=1, process=process), RowRule(VOCAB, prompt_length=1, warp=lambda s: s + 1)]
    logits = torch.randn(2, 1, VOCAB)
    RowSampler(VOCAB, rules).scores(logits, [[0], [0]])
    assert rules[0].error is None  # a guess without processors is a guess, too
    scores = RowSampler(VOCAB, rules, judges=True).scores(logits, [[0], [0]])
    assert isinstance(rules[0].error, KeyError)
    assert rules[0].failed_at == 1
    assert torch.equal(scores[0], logits[0])
    assert rules[1].error is None
    assert torch.equal(scores[1], logits[1] + 1)


def test_all_greedy_rows_are_as_good_as_none():
    rules = [RowRule(VOCAB, prompt_length=1) for _ in range(3)]
    sampler = RowSampler(VOCAB, rules)
    assert sampler.is_greedy
    logits = torch.randn(3, 2, VOCAB)
    assert sampler.scores(logits, [[0]] * 3) is not None
    assert torch.equal(sampler.choose(logits, [1] * 3, [1] * 3), logits.argmax(-1))
    rules += sampled([3])
    assert not sampler.is_greedy
