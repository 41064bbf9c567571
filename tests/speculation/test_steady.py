"""Does a choice stand as long as little changes, and only then?"""

from __future__ import annotations

import pytest

from hf_mlspec.speculation.estimates import PairEstimate
from hf_mlspec.speculation.memory import Memory
from hf_mlspec.speculation.plans import TARGET
from hf_mlspec.speculation.steady import Steady


@pytest.fixture
def memory():
    """Of a level of which 40 tokens of 50 were kept."""
    pair = PairEstimate(0.8)
    for _ in range(10):
        pair.observe(5, 5, 4)
    return Memory({(0, TARGET): pair}, spare=0.001)


@pytest.fixture
def steady(memory):
    found = Steady()
    found.mark(memory, 0.01)
    return found


def test_a_choice_stands_a_few_times_and_is_then_made_anew(steady, memory):
    assert [steady.holds(memory) for _ in range(6)] == [True] * 4 + [False] * 2


def test_another_share_of_kept_tokens_asks_for_another_choice(steady, memory):
    pair = memory.pairs[0, TARGET]
    pair.observe(5, 5, 4)
    assert steady.holds(memory)
    for _ in range(4):
        pair.observe(5, 5, 0)
    assert not steady.holds(memory)


def test_much_that_was_observed_asks_for_another_choice(steady, memory):
    for _ in range(6):
        memory.pairs[0, TARGET].observe(5, 5, 4)
    assert not steady.holds(memory)


def test_seconds_for_a_trial_ask_for_another_choice(steady, memory):
    memory.spare = 0.004
    assert steady.holds(memory)
    memory.spare = 0.005
    assert not steady.holds(memory)


def test_a_level_that_was_never_seen_asks_for_another_choice(steady, memory):
    memory.pairs[1, TARGET] = PairEstimate(0.5)
    assert not steady.holds(memory)


def test_rows_that_change_ask_for_another_choice(steady, memory):
    steady.forget()
    assert not steady.holds(memory)
