"""Do logits become the scores, probabilities and tokens that processors and warpers ask for?"""

from __future__ import annotations

import torch
from scipy.stats import chisquare

from hf_mlspec.engines.engine import Guess
from hf_mlspec.speculation.sampling import Sampler


def test_fit_pads_and_cuts():
    short = Sampler(5).fit(torch.zeros(2, 1, 3, dtype=torch.bfloat16))
    assert short.dtype == torch.float32
    assert short[0, 0].tolist() == [0, 0, 0, float("-inf"), float("-inf")]
    assert Sampler(2).fit(torch.arange(4.0)[None, None]).tolist() == [[[0, 1]]]


def test_probabilities_are_a_softmax_in_float32():
    scores = torch.tensor([[0.0, float("-inf"), 2.0]])
    torch.testing.assert_close(Sampler(3).probabilities(scores), torch.softmax(scores, -1))


def test_greedy_draw():
    tokens, probs, confidence = Sampler(3).draw(torch.tensor([[0.1, 3.0, 0.2], [5.0, 5.0, 5.0]]))
    assert tokens[0] == 1
    assert probs is None
    torch.testing.assert_close(confidence, torch.tensor([0.896, 1 / 3]), atol=1e-3, rtol=0)


def test_sampled_draw():
    torch.manual_seed(0)
    weights = torch.tensor([0.5, 0.2, 0.3])
    tokens, probs, confidence = Sampler(3, do_sample=True).draw(weights.log().expand(50_000, 3))
    torch.testing.assert_close(probs[0], weights)
    assert torch.equal(confidence, probs.gather(1, tokens[:, None])[:, 0])
    assert chisquare(torch.bincount(tokens).numpy(), [25_000, 10_000, 15_000]).pvalue > 1e-3


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
