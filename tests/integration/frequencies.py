"""Are tokens that a chain samples as frequent as the target's probabilities say?"""

from __future__ import annotations

import torch
from models import prompts
from transformers import PreTrainedModel

import hf_mlspec


def check_sampled_frequencies(target: PreTrainedModel, levels: list) -> hf_mlspec.SpeculationStats:
    """First tokens of 2000 rows against the probabilities of the target alone; the statistics of the sampled call."""
    prompt = prompts([6])["input_ids"].repeat(2000, 1)
    asked = {"max_new_tokens": 2, "do_sample": True, "top_k": 16, "eos_token_id": None, "temperature": 2.0}
    torch.manual_seed(0)
    mask = torch.ones_like(prompt)
    out = target.generate(prompt, attention_mask=mask, **asked, assistant_models=levels)
    stats = hf_mlspec.last_stats(target)
    asked |= {"assistant_models": [], "return_dict_in_generate": True, "output_scores": True}
    expected = target.generate(prompt[:1], attention_mask=mask[:1], **asked).scores[0][0].double().softmax(-1)
    likely, seen = expected > 0, torch.bincount(out[:, 6], minlength=64)
    assert seen[~likely].sum() == 0
    expected = 2000 * expected[likely]
    assert ((seen[likely] - expected) ** 2 / expected).sum() < 37.7  # chi-squared, 15 degrees of freedom: 1 in 1000
    return stats
