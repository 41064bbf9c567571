"""Does sampling through generate follow the target's own distribution, with warpers and processors?"""

from __future__ import annotations

import pytest
import torch
from models import letters, near, prompts, tiny
from scipy.stats import chisquare
from transformers import LogitsProcessor, LogitsProcessorList

from hf_mlspec import Request, SpeculationConfig, generate_stream
from hf_mlspec.integration.levels.vocabulary import padding_apart
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.sampling import drawn_seed

TARGET = tiny(seed=2, vocab_size=6, initializer_range=0.15)
NEAR = near(TARGET, 0.1)
FAR = tiny(seed=9, vocab_size=6, initializer_range=0.15)
PROMPT = torch.tensor([[3, 4, 5, 3]])
ROWS = 2500


class Favour(LogitsProcessor):
    """Depends on the last token: what follows it is likelier."""

    def __call__(self, input_ids, scores):
        following = (input_ids[:, -1:] + 1) % scores.shape[1]
        return scores.scatter_add(1, following, torch.ones_like(scores[:, :1]))


def exact(options: dict, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation, from stock generate's own scores."""
    probabilities = {(): 1.0}
    for _ in range(length):
        longer = {}
        for sequence, probability in probabilities.items():
            ids = torch.cat([PROMPT, torch.tensor([sequence], dtype=torch.long)], dim=1)
            out = TARGET.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=1, eos_token_id=None,
                return_dict_in_generate=True, output_scores=True, **options,
            )  # fmt: skip
            following = torch.softmax(out.scores[0][0].double(), dim=-1).tolist()
            longer |= {(*sequence, token): probability * p for token, p in enumerate(following) if p > 0}
        probabilities = longer
    return probabilities


CHAINS = {
    "a model unlike it": [FAR],
    "first layers": ["early_exit:1"],
    "a model, first layers": [NEAR, "early_exit:1"],
    "a model, another, lookup": [NEAR, FAR, "prompt_lookup"],
}
OPTIONS = {
    "warped": {"temperature": 0.8, "top_k": 4, "top_p": 0.9},
    "processed": {"logits_processor": LogitsProcessorList([Favour()]), "temperature": 1.2},
}
EXACT: dict = {}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chain", CHAINS)
def test_distribution(chain, name):
    if name not in EXACT:
        EXACT[name] = exact(OPTIONS[name], 3)
    torch.manual_seed(17)
    batch = PROMPT.expand(ROWS, -1)
    out = TARGET.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=True,
        max_new_tokens=5,
        eos_token_id=None,
        return_dict_in_generate=True,
        assistant_models=CHAINS[chain],
        speculation_config=SpeculationConfig(num_draft_tokens=4, confidence_threshold=0.2),
        **OPTIONS[name],
    )
    places = {sequence: i for i, sequence in enumerate(EXACT[name])}
    seen = torch.zeros(len(places))
    for row in out.sequences[:, 4:7].tolist():
        seen[places[tuple(row)]] += 1  # a KeyError: a sequence of probability 0
    expected = torch.tensor(list(EXACT[name].values()), dtype=torch.float64) * ROWS
    often = expected >= 5
    seen = torch.cat([seen[often], seen[~often].sum(0, keepdim=True)])
    expected = torch.cat([expected[often], expected[~often].sum(0, keepdim=True)])
    if expected[-1] < 5:
        seen[0], expected[0] = seen[0] + seen[-1], expected[0] + expected[-1]
        seen, expected = seen[:-1], expected[:-1]
    assert chisquare(seen.numpy(), (expected * (ROWS / expected.sum())).numpy()).pvalue > 1e-3
    assert 0 < out.speculation.levels[0].accepted < out.speculation.levels[0].drafted


def written(levels, seed=3, tokens=15, lengths=(8, 3, 6), **options):
    """New tokens of a float32 model on one engine; two sequences of each prompt."""
    torch.manual_seed(seed)
    return WIDE.generate(
        **prompts(list(lengths)), do_sample=True, max_new_tokens=tokens, eos_token_id=None, num_return_sequences=2,
        assistant_models=levels, **options,
    )[:, max(lengths):].tolist()  # fmt: skip


WIDE = tiny(seed=2, dtype=torch.float32)
CLOSE = near(WIDE, 0.02)
ENGINES = ["modules", *(["cpu", "cuda"] if has_compiled_decoder() else [])]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 0, "repetition_penalty": 1.2}])
def test_levels_and_draft_lengths_change_no_token_of_a_seed(options, engine):
    alone = written([], **options, speculation_config={"engine": "modules"})
    assert written([], seed=4, **options) != alone
    for levels in ([], [CLOSE], [CLOSE, "early_exit:1"], ["ngram"]):
        for lengths in (1, 3, 8):
            config = {"engine": engine, "num_draft_tokens": lengths}
            assert written(levels, **options, speculation_config=config) == alone, (levels, lengths)


def test_a_stream_with_the_seed_of_a_call_writes_its_first_row():
    inputs = prompts([8])["input_ids"]
    options = {"do_sample": True, "max_new_tokens": 15, "eos_token_id": None, "temperature": 0.8}
    torch.manual_seed(9)
    seed = drawn_seed()
    torch.manual_seed(9)
    call = WIDE.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_models=[CLOSE], **options)
    (one,) = generate_stream(WIDE, [Request(inputs, seed=seed)], assistant_models=[], **options)
    assert list(one.sequence) == call[0].tolist()


def test_seeds_make_it_repeatable():
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        options = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": None}
        found.append(TARGET.generate(PROMPT, **options, assistant_models=[NEAR, FAR]).tolist())
    assert found[0] == found[1] != found[2]


def test_a_model_with_another_tokenizer_in_sampling():
    tokenizer, other = letters(), letters(extra=200)
    target, level = tiny(seed=2), tiny(seed=2, vocab_size=264)
    assert not padding_apart(64, 264)
    for common in (True, False):
        torch.manual_seed(1)
        out = target.generate(
            **prompts([8, 3]), do_sample=True, max_new_tokens=12, tokenizer=tokenizer, assistant_tokenizers=[other],
            assistant_models=[level], speculation_config={"common_vocabulary": common}, eos_token_id=None,
        )  # fmt: skip
        assert out.shape == (2, 20)
        torch.manual_seed(1)
        assert torch.equal(out, target.generate(
            **prompts([8, 3]), do_sample=True, max_new_tokens=12, assistant_models=[], eos_token_id=None,
        ))  # fmt: skip
