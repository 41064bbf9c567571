"""Can stock assisted decoding draw its candidates from a chain?"""

from __future__ import annotations

import pytest
import torch
from models import alone, near, prompts, tiny
from scipy.stats import chisquare
from transformers import GenerationConfig
from transformers.generation import CandidateGenerator

from hf_mlspec import ChainCandidateGenerator

TARGET = tiny(seed=2)
NEAR = near(TARGET, 0.02)
INPUTS = prompts([8])
CHAINS = {
    "model": [NEAR],
    "first layers": ["early_exit:1"],
    "model, first layers": [NEAR, "early_exit:1"],
    "model, table": [NEAR, "ngram"],
    "lookup": ["prompt_lookup"],
}


def drive(target, levels, settings: GenerationConfig, **options):
    """Stock assisted decoding with our candidates; the generator, and what was written."""
    made = []

    def ours(**kwargs):
        settings, processors = kwargs["generation_config"], kwargs["logits_processor"]
        made.append(ChainCandidateGenerator(target, levels, generation_config=settings, logits_processor=processors))
        return made[0]

    target._get_candidate_generator = ours
    try:
        out = target.generate(generation_config=settings, assistant_model=target, **options)
    finally:
        del target._get_candidate_generator
    assert isinstance(made[0], CandidateGenerator)
    return made[0], out


@pytest.mark.parametrize("name", CHAINS)
def test_greedy(name):
    settings = GenerationConfig(max_new_tokens=30, do_sample=False, eos_token_id=62, pad_token_id=0)
    reference = alone(TARGET, INPUTS, max_new_tokens=30, eos_token_id=62)
    candidates, out = drive(TARGET, CHAINS[name], settings, **INPUTS)
    assert out[:, 8:].tolist() == reference
    outermost = candidates.stats[0]
    assert outermost.rounds > 0
    assert outermost.accepted <= outermost.tested <= outermost.drafted
    if name != "lookup":
        assert outermost.accepted > 0


def test_greedy_with_a_processor():
    settings = GenerationConfig(max_new_tokens=30, do_sample=False, repetition_penalty=1.5, eos_token_id=62)
    reference = alone(TARGET, INPUTS, max_new_tokens=30, repetition_penalty=1.5, eos_token_id=62)
    _, out = drive(TARGET, CHAINS["model, first layers"], settings, **INPUTS)
    assert out[:, 8:].tolist() == reference


def test_sampled_candidates_are_point_masses_and_repeat():
    settings = GenerationConfig(do_sample=True, max_new_tokens=9, max_length=40, top_k=0)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        generator = ChainCandidateGenerator(TARGET, [NEAR], generation_config=settings)
        ids, logits = generator.get_candidates(INPUTS["input_ids"])
        assert logits is None
        found.append(ids.tolist())
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_sampled_distribution():
    target = tiny(seed=2, vocab_size=6, initializer_range=0.15)
    target.generation_config.eos_token_id = None
    prompt = torch.tensor([[3, 4, 5, 3]])
    settings = GenerationConfig(
        do_sample=True, max_new_tokens=3, top_k=0, eos_token_id=None, pad_token_id=0, temperature=1.0
    )
    first = torch.softmax(target(input_ids=prompt).logits[0, -1].double(), dim=-1)
    followed = torch.cat([prompt.expand(6, -1), torch.arange(6)[:, None]], dim=1)
    exact = first[:, None] * torch.softmax(target(input_ids=followed).logits[:, -1].double(), dim=-1)
    seen = torch.zeros(6, 6)
    torch.manual_seed(2)
    chain = [near(target, 0.1), "early_exit:1"]
    for _ in range(700):
        _, out = drive(target, chain, settings, input_ids=prompt, attention_mask=torch.ones_like(prompt))
        seen[out[0, 4], out[0, 5]] += 1
    expected = exact.flatten() * 700 / exact.sum()
    often = expected >= 5
    seen = torch.cat([seen.flatten()[often], seen.flatten()[~often].sum(0, keepdim=True)])
    expected = torch.cat([expected[often], expected[~often].sum(0, keepdim=True)])
    assert chisquare(seen.numpy() + 0.0, (expected * (700 / expected.sum())).detach().numpy()).pvalue > 1e-3


def test_candidates_end_with_max_length():
    generator = ChainCandidateGenerator(
        TARGET,
        [TARGET],
        generation_config=GenerationConfig(max_length=11),
        speculation_config={"confidence_threshold": 0.0},
    )
    ids, logits = generator.get_candidates(INPUTS["input_ids"])
    assert ids.shape[1] == 10  # the check adds the last one
    assert logits is None


def test_another_text_starts_anew():
    target = tiny(seed=2)
    generator = ChainCandidateGenerator(
        target,
        [near(target, 0.0)],
        generation_config=GenerationConfig(max_new_tokens=20, do_sample=False),
        speculation_config={"confidence_threshold": 0.0},
    )
    for seed in (3, 4):
        ids = prompts([8], seed=seed)["input_ids"]
        guess, _ = generator.get_candidates(ids)
        reference = target.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert torch.equal(guess, reference)
        generator.update_candidate_strategy(torch.cat([guess, guess[:, -1:]], dim=1), None, 8)


def test_without_levels_there_is_nothing_to_draw_from():
    with pytest.raises(ValueError, match="at least one level"):
        ChainCandidateGenerator(TARGET, [])
