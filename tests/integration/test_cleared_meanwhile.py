"""Does a call go on with what it found where another thread clears or restores its models in the middle?"""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from models import near, tiny

import hf_mlspec
from hf_mlspec import Request, generate_stream
from hf_mlspec.nn.state import state_of
from hf_mlspec.ops.compiled_decoder import has_compiled_decoder

pytestmark = [
    pytest.mark.plans, pytest.mark.skipif(not has_compiled_decoder(), reason="the compiled kernels are not built"),
]  # fmt: skip
IDS = torch.tensor([[5, 9, 3, 7]])


class ClearedAtOnce(dict):
    """Another thread clears it behind each entry."""

    def __setitem__(self, key, value) -> None:
        self.put = True

    def setdefault(self, key, default=None):
        self.put = True
        return default


class ClearedWhenAsked(dict):
    """Another thread clears it behind each question whether something is there."""

    def __contains__(self, key) -> bool:
        found = super().__contains__(key)
        self.clear()
        return found


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSPEC_CACHE", str(tmp_path))
    target = tiny("llama", dtype=torch.bfloat16).eval()
    target.generation_config.eos_token_id = None
    return target, near(target, 0.05)


def written(target, levels, engine: str) -> list[int]:
    out = target.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=9, do_sample=False,
                          assistant_models=levels, speculation_config={"engine": engine})  # fmt: skip
    return out[0, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("kind", [ClearedAtOnce, ClearedWhenAsked])
@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_what_models_keep_goes_in_the_middle_of_calls(models, kind, engine):
    target, draft = models
    expected = written(target, [], engine)
    for state in (state_of(target), state_of(draft)):
        for field in fields(state):
            if isinstance(kept := getattr(state, field.name), dict):
                setattr(state, field.name, kind(kept))
    for _ in range(3):
        assert written(target, ["mxfp4", draft], engine) == expected
        (done,) = generate_stream(target, [Request([5, 9, 3, 7], max_new_tokens=9, eos_token_id=None)],
                                  assistant_models=[draft], speculation_config={"engine": engine})  # fmt: skip
        assert (done.error, done.new_tokens) == (None, expected)
    hf_mlspec.clear(target)
