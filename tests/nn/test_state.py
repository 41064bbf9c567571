"""Is what is remembered of a model its own, weakly held, and said once?"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from dataclasses import fields

import pytest
from torch import nn

from hf_mlspec.nn.state import ModelState, is_prepared, say_once, state_of


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
    state_of(model).levels["mxfp4"] = (), 1
    twin = copy.deepcopy(model)
    assert is_prepared(model)
    assert not is_prepared(twin)
    assert state_of(twin) == ModelState()


def test_a_warning_is_given_once_for_each_model(caplog):
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (one, one, other):
        say_once(model, "is slow")
    say_once(one, "is large")
    assert [record.getMessage() for record in caplog.records] == ["is slow", "is slow", "is large"]


def test_numbers_do_not_make_another_kind_of_warning(caplog):
    model = nn.Linear(1, 1)
    for count in (3, 4):
        say_once(model, f"{count} rows", kind=" rows")
    assert [record.getMessage() for record in caplog.records] == ["3 rows"]


@pytest.mark.parametrize("prepared", [False, True])
def test_clear_leaves_nothing_but_that_the_model_is_prepared(prepared):
    state = ModelState()
    full = {"prepared": prepared, "engine": "cpu" if prepared else None, "decoders": {dict: ((), {})},
            "levels": {"mxfp4": ((), 1)}, "chains": [1], "costs": {"cpu": 1}, "checks": {"cpu": 1},
            "memories": {"mxfp4": 1}, "learned": {"mxfp4": 1}, "openings": {"mxfp4": 1}, "shelved": {"mxfp4": 1},
            "known": {("mxfp4",): 1}, "last_stats": 1, "alike": ((), ()), "warnings": {"is slow"}}
    assert full.keys() == {one.name for one in fields(ModelState)}
    for name, value in full.items():
        setattr(state, name, value)
    stays = {"prepared": True, "engine": "cpu", "decoders": {dict: ((), {})}} if prepared else {}
    state.clear()
    assert state == ModelState(**stays)


def test_threads_that_ask_first_get_one_state():
    for _ in range(20):
        model, ready, found = nn.Linear(1, 1), threading.Barrier(4), []

        def ask(model=model, ready=ready, found=found):
            ready.wait()
            found.append(state_of(model))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(state) for state in found}) == 1
