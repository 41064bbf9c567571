"""Which tokens does a check keep, token by token, and with what probability?"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from hf_mlspec.speculation.acceptance import accept_greedy, accept_sampled, draw


@pytest.mark.parametrize(
    ("tokens", "length", "best", "accepted"),
    [
        ([5, 6, 7], 3, [5, 6, 7, 8], 3),
        ([5, 6, 7], 2, [5, 6, 7, 8], 2),  # the third entry is padding, however well it fits
        ([5, 9, 7], 3, [5, 6, 7, 8], 1),
        ([9, 6, 7], 3, [5, 6, 7, 8], 0),
        ([5, 6, 7], 0, [5, 6, 7, 8], 0),
    ],
)
def test_greedy_keeps_the_prefix_that_agrees(tokens, length, best, accepted):
    assert accept_greedy(torch.tensor([tokens]), torch.tensor([length]), torch.tensor([best])).tolist() == [accepted]


def test_greedy_without_a_draft():
    none = torch.empty(2, 0, dtype=torch.long)
    assert accept_greedy(none, torch.tensor([0, 0]), torch.tensor([[3], [4]])).tolist() == [0, 0]


def test_greedy_judges_every_row_on_its_own():
    tokens = torch.tensor([[1, 2], [1, 2], [1, 2]])
    best = torch.tensor([[1, 2, 3], [0, 2, 3], [1, 0, 3]])
    assert accept_greedy(tokens, torch.tensor([2, 2, 2]), best).tolist() == [2, 0, 1]


P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.1, 0.2, 0.3, 0.4])


def check(token: int, uniform: float, draft_probs: torch.Tensor | None = Q, noise=(1.0, 1.0, 1.0, 1.0)):
    accepted, after = accept_sampled(
        torch.tensor([[token]]),
        torch.tensor([1]),
        None if draft_probs is None else draft_probs[None, None],
        torch.stack([P, P.flip(0)])[None],
        torch.tensor([[uniform]]),
        torch.tensor([list(noise)]),
    )
    return accepted.item(), after.item()


def test_sampled_accepts_with_probability_p_over_q():
    assert check(0, 0.999)[0] == 1  # p > q: always
    assert check(2, 0.66)[0] == 1  # p / q = 2 / 3
    assert check(2, 0.67)[0] == 0
    assert check(3, 0.0)[0] == 0  # p = 0: never


def test_sampled_point_mass_is_accepted_with_probability_p():
    assert check(1, 0.29, None)[0] == 1
    assert check(1, 0.31, None)[0] == 0


def test_after_a_rejection_the_residual_is_drawn_from():
    # p - q = (0.4, 0.1, -0.1, -0.4): tokens 2 and 3 can not follow, whatever the noise favours.
    assert check(3, 0.5, noise=(1.0, 1.0, 1e-9, 1e-9)) == (0, 0)
    assert check(3, 0.5, noise=(1.0, 1e-3, 1.0, 1.0)) == (0, 1)


def test_after_a_rejected_point_mass_the_token_itself_cannot_follow():
    assert check(0, 0.9, None, noise=(1e-9, 1.0, 1.0, 1.0)) == (0, 1)


def test_after_full_acceptance_the_next_position_is_drawn_from():
    # The next distribution is P reversed, whose first entry is 0.
    assert check(0, 0.0, noise=(1e-9, 1.0, 1.0, 1.0)) == (1, 3)


def test_a_row_without_draft_draws_from_p_unreduced():
    accepted, after = accept_sampled(
        torch.tensor([[2]]),
        torch.tensor([0]),
        Q[None, None],
        torch.stack([P, P])[None],
        torch.tensor([[0.0]]),
        torch.tensor([[1.0, 1.0, 1e-9, 1.0]]),
    )
    assert (accepted.item(), after.item()) == (0, 2)


def test_equal_distributions_leave_no_empty_residual():
    accepted, after = accept_sampled(
        torch.tensor([[3]]),
        torch.tensor([1]),
        P[None, None],
        torch.stack([P, P])[None],
        torch.tensor([[0.5]]),
        torch.ones(1, 4),
    )
    assert accepted.item() == 0  # token 3 has p = 0
    assert P[after.item()] > 0


def test_draw_follows_the_weights():
    torch.manual_seed(5)
    weights = torch.tensor([4.0, 0.0, 1.0, 3.0])
    seen = torch.bincount(draw(weights.expand(80_000, 4), torch.empty(80_000, 4).exponential_()), minlength=4)
    assert seen[1] == 0
    assert chisquare(seen[[0, 2, 3]].numpy(), [40_000, 10_000, 30_000]).pvalue > 1e-3
