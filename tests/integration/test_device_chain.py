"""Do captured rounds return what the target alone returns? On the CPU a round runs as it would be captured.

The way of models on a GPU, over the same ops: `wiring._as_on_device` lets models on the CPU take it. What a round
enqueues, how its lengths move, how rows leave and buckets shrink is all here; only graphs and kernels are not.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from models import near, prompts, tiny

import hf_mlspec
from hf_mlspec.integration import decoding, wiring
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder
from hf_mlspec.speculation.captured import CapturedDecoding

pytestmark = [
    pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
    pytest.mark.usefixtures("nothing_said_yet"),
]

OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
BATCHES = {"one row": prompts([9]), "three": prompts([3, 17, 1]), "eight": prompts([3, 17, 1, 9, 9, 2, 30, 5])}


@pytest.fixture
def on_device(monkeypatch):
    """Models take the way of those on a GPU; the rounds of every call are counted."""
    rounds = []
    play = CapturedDecoding.round

    def counted(self):
        rounds.append(self._bucket)
        return play(self)

    monkeypatch.setattr(CapturedDecoding, "round", counted)
    monkeypatch.setattr(wiring, "_as_on_device", True)
    return rounds


@pytest.fixture
def target():
    return tiny(seed=2, dtype=torch.bfloat16)


@pytest.fixture
def draft(target):
    return near(target, 0.05)


def chains(draft) -> dict[str, list]:
    return {
        "alone": [],
        "draft": [draft],
        "mxfp4": ["mxfp4"],
        "early exit": ["early_exit:1"],
        "mxfp4, draft": ["mxfp4", draft],
        "mxfp4, early exit": ["mxfp4", "early_exit:1"],
        "draft, early exit of it": [draft, hf_mlspec.early_exit(draft, 1) if draft else None],
        "mxfp4, draft, draft": ["mxfp4", draft, draft],
    }


CHAINS = list(chains(None))
CONFIGS = {
    "defaults": {},
    "never stops": {"num_draft_tokens": 3, "confidence_threshold": 0.0},
    "stops early": {"num_draft_tokens": 4, "confidence_threshold": 0.9},
    "own caches": {"num_draft_tokens": 2, "confidence_threshold": 0.0, "shared_cache": False},
}


@contextmanager
def _nothing(*_):
    yield None


def stepwise(target, inputs, levels=(), **options) -> torch.Tensor:
    """What the same decoders return in the ordinary loop, step by step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "captured", _nothing)
        return target.generate(**inputs, **{**OPTIONS, **options}, assistant_models=list(levels))


@pytest.mark.parametrize("inputs", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("chain", CHAINS)
def test_greedy_ids_are_those_of_the_target_alone(on_device, target, draft, chain, config, inputs):
    alone = stepwise(target, inputs)
    levels = chains(draft)[chain]
    out = target.generate(**inputs, **OPTIONS, assistant_models=levels, speculation_config=CONFIGS[config])
    assert torch.equal(out, alone)
    assert on_device
    stats = hf_mlspec.last_stats(target)
    assert stats.new_tokens == alone[:, inputs["input_ids"].shape[1] :].numel()
    assert all(level.accepted > 0 for level in stats.levels)
