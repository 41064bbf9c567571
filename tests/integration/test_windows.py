"""Do all engines write what stock generate writes where a prompt is longer than the window?"""

from __future__ import annotations

import pytest
import torch
from models import MODELS_WITH_WINDOWS, alone, near, prompts, tiny, together

import hf_mlspec
from hf_mlspec.engines.choose import engine_of
from hf_mlspec.engines.modules.stateful import StatefulEngine
from hf_mlspec.engines.modules.states import only_the_cache_has_windows

LENGTHS = [40, 33, 8, 1]
NEW = 24
ONLY_IN_THE_CACHE = ["llama, a window in its config alone", "granite, a window in its config alone"]


@pytest.mark.parametrize("engine", [None, "modules"])
@pytest.mark.parametrize("name", MODELS_WITH_WINDOWS)
def test_prompts_past_a_window(name, engine):
    kind, options = MODELS_WITH_WINDOWS[name]
    target, inputs = tiny(kind, dtype=torch.float32, **options), prompts(LENGTHS)
    written = alone(target, inputs, max_new_tokens=NEW)
    other = near(target)
    hf_mlspec.prepare(target, engine=engine)
    assert alone(target, inputs, max_new_tokens=NEW) == written
    for levels in ([], ["mxfp4"], [other, "prompt_lookup"]):
        assert together(target, inputs, levels, max_new_tokens=NEW) == written


@pytest.mark.parametrize("name", MODELS_WITH_WINDOWS)
def test_the_window_is_of_the_cache_alone_where_no_mask_of_the_class_has_one(name):
    kind, options = MODELS_WITH_WINDOWS[name]
    target = tiny(kind, dtype=torch.float32, **options)
    assert only_the_cache_has_windows(target) == (name in ONLY_IN_THE_CACHE)
    assert isinstance(engine_of(target), StatefulEngine) == (name in ONLY_IN_THE_CACHE)


@pytest.mark.parametrize("name", ONLY_IN_THE_CACHE)
def test_a_window_of_the_cache_alone_matters(name):
    """The prompts are long enough that a window over all, or none at all, writes other ids."""
    kind, options = MODELS_WITH_WINDOWS[name]
    target = tiny(kind, dtype=torch.float32, **options)
    inputs = prompts(LENGTHS)
    written = alone(target, inputs, max_new_tokens=NEW)
    target.config.sliding_window = None
    assert alone(target, inputs, max_new_tokens=NEW) != written
