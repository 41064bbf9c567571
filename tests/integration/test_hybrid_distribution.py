"""Do sampled tokens of targets that keep a state follow the target's distribution, with levels as without?"""

from __future__ import annotations

import itertools

import pytest
import torch
from decoders import random_model
from scipy.stats import chisquare

import hf_mlspec
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")

VOCAB, PROMPT, TOKENS, ROWS, TEMPERATURE = 5, [1, 3, 2, 4], 3, 2000, 4.0
SHAPES = {"qwen3.5": {"hidden_size": 96, "intermediate_size": 160}, "mamba2": {"hidden_size": 96, "num_heads": 12},
          "granite-hybrid": {"hidden_size": 96, "mamba_n_heads": 12, "shared_intermediate_size": 160}}  # fmt: skip


@torch.no_grad()
def exact(model) -> torch.Tensor:
    """Chances of all continuations by the modules, in the order of itertools.product."""
    every = torch.tensor(list(itertools.product(range(VOCAB), repeat=TOKENS)))
    ids = torch.cat([torch.tensor([PROMPT]).expand(len(every), -1), every], dim=1)
    logits = model(ids, use_cache=False).logits[:, len(PROMPT) - 1 : -1].double() / TEMPERATURE
    return logits.log_softmax(-1).gather(2, every[:, :, None]).sum((1, 2)).exp()


def written(model, levels: list[str]) -> torch.Tensor:
    ids = torch.tensor([PROMPT]).expand(ROWS, -1)
    options = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    return model.generate(ids, attention_mask=torch.ones_like(ids), assistant_models=levels, **options,
                          speculation_config={"num_draft_tokens": 2})[:, -TOKENS:]  # fmt: skip


def p_value(tokens: torch.Tensor, chances: torch.Tensor) -> float:
    numbers = (tokens * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    seen = torch.bincount(numbers, minlength=VOCAB**TOKENS).double()
    expected = chances * len(tokens)
    rare = expected < 5  # together one cell
    cells = [torch.cat([one[~rare], one[rare].sum()[None]]) for one in (seen, expected)]
    cells = [one[cells[1] > 0] for one in cells]
    return chisquare(cells[0].numpy(), (cells[1] * (cells[0].sum() / cells[1].sum())).numpy()).pvalue


@pytest.mark.parametrize("name", SHAPES)
def test_chains_of_hybrids_follow_the_distribution_of_the_target(name):
    model = random_model(name, torch.float32, vocab_size=VOCAB, tie_word_embeddings=False, **SHAPES[name])
    chances = exact(model)
    assert float(chances.sum()) == pytest.approx(1)
    alone = written(model, [])
    assert isinstance(decoder_of(model, "cpu"), CpuDecoder)
    assert p_value(alone, chances) > 1e-3
    assert p_value(alone, chances.flip(0)) < 1e-6  # another distribution is noticed
    assert torch.equal(written(model, ["mxfp4"]), alone)
    level = hf_mlspec.last_stats(model).levels[0]
    assert 0 < level.accepted < level.drafted
