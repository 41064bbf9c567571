"""Is what is remembered of a model its own, weakly held, and said once?"""

from __future__ import annotations

import copy
import gc
import weakref

from torch import nn

from hf_mlspec.nn.state import is_prepared, say_once, state_of


def test_a_state_is_its_models_own_and_goes_with_it():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert state_of(one) is state_of(one)
    assert state_of(one) is not state_of(other)
    state = weakref.ref(state_of(one))
    del one
    gc.collect()
    assert state() is None


def test_a_deep_copy_starts_with_an_empty_state():
    model = nn.Linear(1, 1)
    state_of(model).prepared = True
    state_of(model).kept["levels"] = [1]
    twin = copy.deepcopy(model)
    assert is_prepared(model)
    assert not is_prepared(twin)
    assert state_of(twin).kept == {}


def test_a_warning_is_given_once_for_each_model(caplog):
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (one, one, other):
        say_once(model, "is slow")
    say_once(one, "is large")
    assert [record.getMessage() for record in caplog.records] == ["is slow", "is slow", "is large"]


def test_engines_and_what_is_kept_are_dropped_apart():
    model = nn.Linear(1, 1)
    state = state_of(model)
    state.prepared, state.decoders[dict], state.kept["chains"] = True, ((), {}), [1]
    state.drop_engines()
    assert (state.decoders, state.kept) == ({}, {"chains": [1]})
    state.drop_kept()
    assert state.kept == {}
    assert state.prepared
