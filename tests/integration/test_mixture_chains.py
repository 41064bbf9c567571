"""Do chains over a trained mixture of experts write what it writes alone, at every batch size?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec import SpeculationConfig
from hf_mlspec.engines.choose import decoder_of
from hf_mlspec.engines.cpu.decoder import CpuDecoder
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from tests.models import prompts, tiny

MODELS = Path(os.environ.get("MLSPEC_MODELS", "../shared/models"))
pytestmark = pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built")
NAMES = ["code-moe", "code-oss"]  # the latter by eval.train_mixture
SUBJECTS = ("add two numbers", "sort a list", "count words of a file", "reverse a string", "multiply matrices",
            "parse a date", "search in a tree", "the n-th prime")  # fmt: skip
PROMPTS = [f'def f{i}(a, b={i}):\n    """{SUBJECTS[i % 8]}."""\n' for i in range(32)]
CHAINS = {
    "cast": ["mxfp4"],
    "model": ["code-4m"],
    "cast, model": ["mxfp4", "code-4m"],
    "fewer experts": ["experts:1"],
    "cast, fewer experts": ["mxfp4", "experts:1"],
    "first layers": ["early_exit:3"],
    "lookup": ["prompt_lookup"],
}


def trained(name: str, dtype: torch.dtype):
    """A model of the folder; the test is skipped where it is not there."""
    if not (MODELS / name).is_dir():
        pytest.skip(f"no model at $MLSPEC_MODELS/{name}")
    return AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=dtype).eval()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=NAMES)
def target(request, dtype):
    return trained(request.param, dtype)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_chains_over_a_trained_mixture_change_no_token(target, batch):
    tokenizer = AutoTokenizer.from_pretrained(target.name_or_path, padding_side="left")
    inputs = tokenizer(PROMPTS[:batch], return_tensors="pt", padding=True)
    options = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "do_sample": False,
               "max_new_tokens": 24}  # fmt: skip
    alone = target.generate(**options, assistant_models=[])
    assert isinstance(decoder_of(target, "cpu"), CpuDecoder)
    config = SpeculationConfig(num_draft_tokens=4, confidence_threshold=0.0)
    for name, words in CHAINS.items():
        levels = [str(MODELS / word) if word == "code-4m" else word for word in words]
        out = target.generate(**options, assistant_models=levels, speculation_config=config)
        assert torch.equal(out, alone), name
        stats = hf_mlspec.last_stats(target)
        assert sum(level.accepted for level in stats.levels) > 0, name


@pytest.mark.parametrize("name", NAMES)
def test_alone_it_follows_stock_in_float32(name):
    """Every token is stock's best, or so near to it that rounding decides."""
    model = trained(name, torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    for prompt in PROMPTS[:4]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(input_ids=ids, do_sample=False, max_new_tokens=32, assistant_models=[])
        with torch.no_grad():
            logits = model(out).logits[0, ids.shape[1] - 1 : -1]
        chosen = logits.gather(1, out[0, ids.shape[1] :, None])[:, 0]
        assert ((logits.max(dim=1).values - chosen) / logits.std(dim=1)).max() < 0.05


@pytest.mark.parametrize("batch", [[7], [9, 4, 6]], ids=["one row", "three rows"])
@pytest.mark.parametrize(("one", "other"), [("llama", "qwen3_moe"), ("qwen3_moe", "llama"), ("gpt_oss", "mixtral")])
def test_a_mixture_drafts_for_a_dense_model_and_the_reverse(one, other, batch):
    target, draft = tiny(one, dtype=torch.bfloat16), tiny(other, dtype=torch.bfloat16, seed=1)
    options = {**prompts(batch), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    alone = target.generate(**options, assistant_models=[])
    config = SpeculationConfig(num_draft_tokens=3, confidence_threshold=0.0)
    for levels in ([draft], ["mxfp4", draft]):
        assert torch.equal(target.generate(**options, assistant_models=levels, speculation_config=config), alone)
        assert hf_mlspec.last_stats(target).levels[0].drafted > 0
