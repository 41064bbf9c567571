"""Do logits become the scores, probabilities and tokens that processors and warpers ask for?"""

from __future__ import annotations

import torch
from scipy.stats import chisquare

from hf_mlspec.engines.engine import Guess
from hf_mlspec.speculation.sampling import Sampler, drawn_seed


def test_fit_pads_and_cuts():
    short = Sampler(5).fit(torch.zeros(2, 1, 3, dtype=torch.bfloat16))
    assert short.dtype == torch.float32
    assert short[0, 0].tolist() == [0, 0, 0, float("-inf"), float("-inf")]
    assert Sampler(2).fit(torch.arange(4.0)[None, None]).tolist() == [[[0, 1]]]


def test_probabilities_are_a_softmax_in_float32():
    scores = torch.tensor([[0.0, float("-inf"), 2.0]])
    torch.testing.assert_close(Sampler(3).probabilities(scores), torch.softmax(scores, -1))


def test_greedy_draw():
    tokens, confidence = Sampler(3).draw(torch.tensor([[0.1, 3.0, 0.2], [5.0, 5.0, 5.0]]), [1, 1])
    assert tokens[0] == 1
    torch.testing.assert_close(confidence, torch.tensor([0.896, 1 / 3]), atol=1e-3, rtol=0)


def test_sampled_draw():
    weights, made = torch.tensor([0.5, 0.2, 0.3]), Sampler(3, seed=5)
    made.start(50_000)
    scores = weights.log().expand(50_000, 3)
    tokens, confidence = made.draw(scores, [7] * 50_000)
    torch.testing.assert_close(confidence, weights[tokens])
    assert chisquare(torch.bincount(tokens).numpy(), [25_000, 10_000, 15_000]).pvalue > 1e-3
    assert torch.equal(made.choose(scores[:, None], [7] * 50_000, [0] * 50_000)[:, 0], tokens)


def test_a_choice_depends_on_seed_row_position_and_scores_only():
    scores = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    made = Sampler(50, seed=2)
    made.start(3)
    whole = made.choose(scores, [10, 20, 30], [3, 3, 3])
    assert torch.equal(made.choose(scores[:, 2:], [12, 22, 32], [1, 1, 1]), whole[:, 2:])
    made.select([2, 0])
    assert torch.equal(made.choose(scores[[2, 0]], [30, 10], [3, 3]), whole[[2, 0]])
    made.admit(1)
    made.replace(0)
    assert made.row_ids == [4, 0, 3]


def test_there_is_no_choice_where_scores_are_nan_or_forbidden():
    scores = torch.zeros(3, 1, 4)
    scores[0, 0, 1], scores[1] = float("nan"), float("-inf")
    for seed, expected in ((None, [-1, 0]), (3, [-1, -1])):
        made = Sampler(4, seed=seed)
        made.start(3)
        chosen = made.choose(scores, [1] * 3, [0] * 3)[:, 0].tolist()
        assert chosen[:2] == expected
        assert chosen[2] >= 0
        assert (made.draw(scores[:, 0], [1] * 3)[0] >= 0).all()


def test_a_drawn_seed_repeats_with_torchs():
    torch.manual_seed(4)
    first = drawn_seed()
    assert drawn_seed() != first
    torch.manual_seed(4)
    assert drawn_seed() == first


def test_warp_comes_after_the_cut():
    seen = []

    def warp(scores):
        seen.append(scores.shape)
        return scores * 2

    out = Sampler(3, warp=warp).scores(torch.ones(2, 4, 5), [[1], [2]])
    assert seen == [(2, 4, 3)]
    assert torch.equal(out, torch.full((2, 4, 3), 2.0))


class Asked:
    """A processor that records what it is asked, and forbids what `forbids` says."""

    def __init__(self, forbids=()):
        self.calls, self.forbids = [], forbids

    def __call__(self, prefixes, scores, numbers):
        self.calls.append(list(zip(numbers, map(tuple, prefixes), strict=True)))
        scores = scores.clone()
        for line, prefix in zip(scores, prefixes, strict=True):
            for context, token in self.forbids:
                if tuple(prefix[-len(context) :]) == context:
                    line[token] = float("-inf")
        return scores


def sampler(process, prompt_lengths, **options) -> Sampler:
    made = Sampler(9, process=process, prompt_lengths=prompt_lengths, **options)
    made.start(len(prompt_lengths))
    return made


def test_positions_with_equally_many_generated_tokens_are_asked_together():
    asked = Asked()
    rows = [[1, 2, 3], [4, 5, 6, 7]]  # one and three generated tokens
    draft = torch.tensor([[8, 7, 6], [5, 4, 0]])
    sampler(asked, [2, 1]).scores(torch.zeros(2, 4, 9), rows, Guess(draft, [3, 2]))
    assert asked.calls == [
        [(0, (1, 2, 3))],
        [(0, (1, 2, 3, 8))],
        [(0, (1, 2, 3, 8, 7)), (1, (4, 5, 6, 7))],
        [(0, (1, 2, 3, 8, 7, 6)), (1, (4, 5, 6, 7, 5))],
        [(1, (4, 5, 6, 7, 5, 4))],
    ]


def test_nothing_is_asked_behind_a_forbidden_guess():
    asked = Asked([((3, 8), 7)])
    scores = sampler(asked, [2]).scores(torch.zeros(1, 4, 9), [[1, 2, 3]], Guess(torch.tensor([[8, 7, 6]]), [3]))
    assert [call[0][1] for call in asked.calls] == [(1, 2, 3), (1, 2, 3, 8)]
    assert scores[0, 1, 7] == float("-inf")
    assert torch.equal(scores[0, 2:], torch.zeros(2, 9))


def test_nothing_is_asked_behind_the_end_of_a_sequence():
    asked = Asked()
    made = sampler(asked, [2, 2], ends=frozenset({7}))
    made.scores(torch.zeros(2, 3, 9), [[7, 7, 3], [1, 2, 7]], Guess(torch.tensor([[7, 5], [5, 5]]), [2, 2]))
    # Ends within a prompt are no end of it.
    assert asked.calls == [[(0, (7, 7, 3))]]
    asked.calls.clear()
    made.scores(torch.zeros(2, 3, 9), [[7, 7, 3], [1, 2, 6]], Guess(torch.tensor([[5, 7], [5, 5]]), [2, 2]))
    assert [len(call) for call in asked.calls] == [2, 2, 1]


def test_select_keeps_the_numbers_of_the_original_batch():
    asked = Asked()
    made = sampler(asked, [1, 1, 1])
    made.select([2, 0])
    made.scores(torch.zeros(2, 1, 9), [[3], [4]])
    assert asked.calls == [[(2, (3,)), (0, (4,))]]
    made.select([0])
    made.scores(torch.zeros(1, 1, 9), [[3]])
    assert asked.calls[1] == [(2, (3,))]


def test_scores_leave_the_logits_alone():
    logits = torch.zeros(1, 1, 9)
    sampler(Asked([((3,), 2)]), [1]).scores(logits, [[3]])
    assert not logits.any()
