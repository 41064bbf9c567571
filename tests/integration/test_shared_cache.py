"""What memory do levels cost, drafting in the target's cache or in their own?"""

from __future__ import annotations

import pytest
import torch
from models import alone, near, prompts, tiny

import hf_mlspec
from hf_mlspec.nn.state import state_of

OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
INPUTS = prompts([9])
# layers x keys and values x slots x heads x dim x bytes of float32
ONE_CACHE = 2 * 2 * 256 * 2 * 8 * 4


@pytest.mark.parametrize("words", [["mxfp4"], ["early_exit:1"], ["mxfp4", "early_exit:1"]], ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_levels_of_the_targets_shape(words, shared):
    target = tiny(seed=2, dtype=torch.float32)
    out = target.generate(
        **INPUTS, **OPTIONS, assistant_models=words, speculation_config={"shared_cache": shared}
    )
    assert out[:, 9:].tolist() == alone(target, INPUTS, max_new_tokens=24, eos_token_id=None)
    stats = hf_mlspec.last_stats(target)
    assert stats.target_cache_bytes == ONE_CACHE
    layers = {"mxfp4": 2, "early_exit:1": 1}
    own = [0 if shared else ONE_CACHE * layers[word] // 2 for word in words]
    assert [level.cache_bytes for level in stats.levels] == own
    assert stats.levels[0].accepted > 0


def test_a_level_below_a_stranger_cannot_share():
    target = tiny(seed=2, dtype=torch.float32)
    other = near(target, 0.05)
    out = target.generate(**INPUTS, **OPTIONS, assistant_models=[other, "mxfp4"])
    assert out[:, 9:].tolist() == alone(target, INPUTS, max_new_tokens=24, eos_token_id=None)
    assert [level.cache_bytes for level in hf_mlspec.last_stats(target).levels] == [ONE_CACHE, ONE_CACHE]


def test_the_prompt_is_read_once_where_the_cache_is_shared():
    target = tiny(seed=2)
    view = hf_mlspec.early_exit(target, 1)
    fed = {True: 0, False: 0}
    for shared in fed:
        handle = view.model.layers[0].register_forward_pre_hook(
            lambda module, args, shared=shared: fed.__setitem__(shared, fed[shared] + args[0].shape[1])
        )
        prompt = prompts([100])
        target.generate(**prompt, **OPTIONS, assistant_models=[view], speculation_config={"shared_cache": shared})
        handle.remove()
    assert fed[False] >= 100 > fed[True]


def test_a_cast_adds_little_memory():
    target = tiny(dtype=torch.bfloat16, hidden_size=128, head_dim=32, intermediate_size=512, vocab_size=256)
    target.generate(**INPUTS, max_new_tokens=4, assistant_models=["mxfp4"])
    _, cast = next(iter(state_of(target).levels.values()))
    linears = [module.weight for module in target.modules() if isinstance(module, torch.nn.Linear)]
    assert hf_mlspec.resident_bytes(cast, shared_with=target) <= 0.28 * sum(weight.nbytes for weight in linears)


def test_caches_start_small_however_long_the_answer_may_get():
    target = tiny(seed=2, max_position_embeddings=100_000)
    target.generate(**prompts([9]), max_new_tokens=90_000, eos_token_id=list(range(64)), assistant_models=[])
    assert hf_mlspec.last_stats(target).target_cache_bytes <= 2 * 2 * 1024 * 2 * 8 * 8
