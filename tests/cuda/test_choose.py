"""Is the token chosen on a GPU the right one, with its probability, and the same whatever rows stand beside it?"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_mlspec import ops
from hf_mlspec.ops import choose

DEVICE = "cuda"
SHAPES = [(1, 1), (3, 7), (2, 64), (5, 1000), (1, 32001), (9, 32000), (3, 128256), (2, 262144)]


def logits_of(n: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(n, vocab, generator=torch.Generator().manual_seed(n + vocab)) * 3).to(dtype).to(DEVICE)


def noise_of(n: int, seed: int = -5) -> tuple[Tensor, Tensor, Tensor]:
    streams, positions = torch.arange(n) % 3, torch.arange(n) + 100
    return torch.tensor([seed], device=DEVICE), streams.int().to(DEVICE), positions.int().to(DEVICE)


def check(logits: Tensor, softcap: float = 0.0, noise: tuple[Tensor, Tensor, Tensor] = ()) -> None:
    tokens, confidence = (t.cpu() for t in ops.choose_rows(logits, softcap, *noise))
    scores = logits.double().cpu()
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if noise:
        keys = scores + choose.gumbel_noise(*(t.cpu() for t in noise), logits.shape[1]).double()
        chosen = keys.gather(1, tokens[:, None].long())[:, 0]
        assert (chosen >= keys.max(1).values - 1e-4).all()  # log in float32 here and there
    else:
        assert torch.equal(tokens.long(), logits.cpu().float().argmax(1))
    expected = scores.softmax(1).gather(1, tokens[:, None].long())[:, 0]
    assert torch.allclose(confidence.double(), expected, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "vocab"), SHAPES)
def test_against_float64(n, vocab, dtype):
    logits = logits_of(n, vocab, dtype)
    check(logits)
    check(logits, softcap=4.0)
    check(logits, noise=noise_of(n))
    check(logits, softcap=4.0, noise=noise_of(n, seed=1 << 40))


def test_the_first_of_equals_wins():
    logits = torch.zeros(4, 5000, dtype=torch.bfloat16, device=DEVICE)
    logits[1, 700:] = 1
    logits[2, [3, 4999]] = 2
    logits[3] = -torch.inf
    assert ops.choose_rows(logits)[0].tolist() == [0, 700, 3, 0]


def test_rows_with_seeds_of_their_own_and_rows_without_noise():
    logits, (_, streams, positions) = logits_of(6, 5000), noise_of(6)
    seeds = torch.tensor([3, -5, 3, 1 << 40, 9, 9], device=DEVICE)
    streams[2] = streams[5] = -1
    tokens, _ = ops.choose_rows(logits, 0.0, seeds, streams, positions)
    greedy = ops.choose_rows(logits)[0]
    for r in range(6):
        alone = ops.choose_rows(logits[r : r + 1], 0.0, seeds[r : r + 1], streams[r : r + 1], positions[r : r + 1])[0]
        assert tokens[r] == (greedy[r] if r in (2, 5) else alone[0])


@pytest.mark.parametrize("where", [0, 31, 777, 4999])
def test_nan_is_told(where):
    logits = logits_of(3, 5000)
    logits[1, where] = torch.nan
    clean = ops.choose_rows(logits_of(3, 5000))
    for noise in ((), noise_of(3)):
        tokens, confidence = ops.choose_rows(logits, 0.0, *noise)
        assert tokens[1] == -1
        assert confidence[1].isnan()
        assert tokens[[0, 2]].ge(0).all()
    assert torch.equal(ops.choose_rows(logits)[1][[0, 2]], clean[1][[0, 2]])


def test_masked_tokens_are_not_drawn():
    logits = logits_of(64, 1000, torch.float32)
    logits[:, 3:] = -torch.inf
    assert ops.choose_rows(logits, 0.0, *noise_of(64))[0].lt(3).all()


@pytest.mark.parametrize("vocab", [1001, 32000])
def test_a_row_alone_has_the_same_bits(vocab):
    logits, (seed, streams, positions) = logits_of(640, vocab), noise_of(640)
    whole = ops.choose_rows(logits), ops.choose_rows(logits, 3.0, seed, streams, positions)
    for r in range(0, 640, 71):
        one = slice(r, r + 1)
        alone = ops.choose_rows(logits[one]), ops.choose_rows(logits[one], 3.0, seed, streams[one], positions[one])
        for (token, confidence), (tokens, confidences) in zip(alone, whole, strict=True):
            assert torch.equal(token, tokens[one])
            assert torch.equal(confidence, confidences[one])


def test_draws_follow_the_softmax():
    """Chi-square over 40000 draws of 7 tokens: 6 degrees of freedom, beyond 30 in 4 of 100000 tries."""
    count, vocab = 40_000, 7
    logits = torch.linspace(-2, 2, vocab, device=DEVICE).repeat(count, 1)
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE)
    streams = torch.zeros_like(positions)
    tokens, _ = ops.choose_rows(logits, 0.0, torch.tensor([3], device=DEVICE), streams, positions)
    expected = logits[0].double().softmax(0).cpu() * count
    seen = torch.bincount(tokens.long().cpu(), minlength=vocab)
    assert ((seen - expected).square() / expected).sum() < 30


def test_noise_depends_on_seed_stream_and_position():
    logits = torch.zeros(1, 1000, device=DEVICE).repeat(4, 1)
    streams, positions = (torch.tensor(n, dtype=torch.int32, device=DEVICE) for n in ([0, 0, 1, 0], [0, 1, 0, 0]))
    first, second = (ops.choose_rows(logits, 0.0, torch.tensor([seed], device=DEVICE), streams, positions)[0].tolist()
                     for seed in (0, 1 << 32))  # fmt: skip
    assert first[0] == first[3]
    assert len({*first[:3], *second[:3]}) == 6
