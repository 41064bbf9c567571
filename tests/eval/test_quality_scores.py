"""Are the numbers of eval/quality those of the model, and their intervals those of resampling?"""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

from quality_toy import TEXT, arguments, lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval.plans import fidelity as quality_fidelity
from eval.quality import __main__ as quality
from eval.quality import scores as quality_scores


def test_the_perplexity_is_that_of_the_model(toy, saved_model):
    """Against one float64 forward pass per window of transformers' own model."""
    quality.main(arguments(toy, saved_model, "--only", "perplexity"))
    line = next(line for line in lines(toy, "perplexity") if line["system"] == "wide")
    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    text = "".join(TEXT.splitlines(keepends=True)[:3])
    row = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
    total = 0.0
    for target in range(1, len(row)):
        start = max(0, math.ceil((target - 23) / 16)) * 16  # the first window that holds it
        logits = model(torch.tensor([row[start:target]])).logits[0, -1]
        total -= torch.log_softmax(logits, -1)[row[target]].item()
    assert line["tokens"] == len(row) - 1
    assert line["token_perplexity"] == pytest.approx(math.exp(total / (len(row) - 1)), rel=1e-4)
    assert line["word_perplexity"] == pytest.approx(math.exp(total / 12), rel=1e-3)
    assert line["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 23, 24, 25, 39, 40, 41, 100])
@pytest.mark.parametrize(("max_length", "stride"), [(24, 16), (24, 23), (2, 1), (1000, 999)])
def test_windows_score_every_token_once(length, max_length, stride):
    ids = list(range(1, length + 1))
    found = list(quality_scores.windows(ids, 0, max_length, stride))
    assert [token for window in found for token in window.ids[-window.scored :]] == ids
    assert all(len(window.ids) <= max_length and window.scored < len(window.ids) for window in found)
    assert all(len(window.ids) - window.scored >= max_length - stride for window in found[1:])


def test_agreement_of_two_systems():
    expected = [[1, 2, 3, 4], [1, 2], [5, 6, 7], [1, 2, 3]]
    got = [[1, 2, 3, 4], [1, 2, 3], [5, 9, 7], [4, 2, 3]]
    found = quality_fidelity.compared(expected, got, seed=0)
    assert (found["equal"], found["prompts"], found["tokens"]) == (1, 4, 12)
    assert found["mean_first_difference"] == pytest.approx((2 + 1 + 0) / 3)
    assert found["mean_common_tokens"] == pytest.approx((4 + 2 + 1 + 0) / 4)
    assert [entry["position"] for entry in found["differences"]] == [2, 1, 0]
    assert quality_fidelity.compared(expected, expected, 0)["mean_first_difference"] is None


def test_the_interval_is_that_of_resampling():
    items = np.array([1] * 30 + [0] * 20)
    draws = np.random.default_rng(1).choice(items, (20000, 50)).mean(axis=1)
    assert quality_fidelity.interval(30, 50, 0) == pytest.approx(np.quantile(draws, (0.025, 0.975)), abs=0.021)
    assert quality_fidelity.interval(50, 50, 0) == [1.0, 1.0]


def test_probabilities_side_by_side():
    one, other = np.log([0.1, 0.5, 0.9]), np.log([0.2, 0.4, 1.0])
    found = quality_scores.agreement(one, other, 0)
    assert found["pearson_r"] == pytest.approx(np.corrcoef(np.exp(one), np.exp(other))[0, 1])
    assert found["points"] == [[0.1, 0.2], [0.5, 0.4], [0.9, 1.0]]
    assert found["mean_difference"] == pytest.approx(0.1)
    assert quality_scores.agreement(one, [0.0] * 3, 0)["pearson_r"] is None
    many = np.log(np.linspace(0.1, 0.9, 5000))
    first, again, another = (quality_scores.agreement(many, many, seed)["points"] for seed in (0, 0, 1))
    assert len(first) == 2000
    assert first == again != another
