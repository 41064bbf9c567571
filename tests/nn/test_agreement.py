"""Does a process that waits for others learn that they failed, or that they gave up?

Ranks are threads over one store here; real processes are in test_tensor_parallel.py.
"""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hf_mlspec.nn import agreement
from hf_mlspec.nn.agreement import Exchange, RankFailed


class Sum:
    """An exchange of two ranks: over when both began it."""

    def __init__(self):
        self.both = threading.Barrier(2)
        self.over = threading.Event()

    def begin(self):
        threading.Thread(target=self._arrive, daemon=True).start()
        return self

    def _arrive(self):
        self.both.wait()
        self.over.set()

    def wait(self, patience):
        if not self.over.wait(patience.total_seconds()):
            raise RuntimeError("timed out")

    def is_completed(self):
        return self.over.is_set()


class Rank(Exchange):
    """One of two, without a process group."""

    def __init__(self, index, store, sums):
        self.index, self.count, self.within, self.gone = index, 2, False, None
        self._number = self.failures = 0
        self._store, self.sums = store, sums

    def _begun(self, every, own):
        self._number += 1
        return self.sums[self._number].begin()


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(agreement, "_LOOKS", timedelta(milliseconds=10))
    monkeypatch.setattr(agreement, "_PATIENCE", timedelta(milliseconds=200))
    store, sums = dist.HashStore(), {number: Sum() for number in range(1, 9)}
    return [Rank(index, store, sums) for index in range(2)]


def waiting(rank: Rank) -> tuple[threading.Thread, list]:
    """A thread in which a rank waits for a part, and what it raised there."""
    raised = []

    def run():
        try:
            rank.parts(torch.zeros(2))
        except RankFailed as error:
            raised.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_who_waits_is_told_of_a_failure_and_all_can_go_on(ranks):
    thread, raised = waiting(ranks[0])
    ranks[1].fail(ValueError("odd\nand more"))
    thread.join(5)
    assert raised == ["rank 1 of 2 that share the model failed: ValueError: odd"]
    assert [(rank.failures, rank.gone, rank._number) for rank in ranks] == [(1, None, 1)] * 2
    thread, raised = waiting(ranks[0])
    ranks[1].parts(torch.zeros(2))
    thread.join(5)
    assert raised == []


def test_who_waits_later_is_told_that_another_one_gave_up(ranks):
    ranks[1].fail(ValueError("odd"))  # nobody hears of it in time
    assert "ValueError: odd, and not all processes heard of it" in ranks[1].gone
    with pytest.raises(RankFailed, match=r"start them again"):
        ranks[1].parts(torch.zeros(2))
    for _ in range(2):
        thread, raised = waiting(ranks[0])
        thread.join(5)
        assert not thread.is_alive()
        assert "ValueError: odd, and not all processes heard of it" in raised[0]
        assert raised[0].endswith("start them again")


def test_who_went_on_after_another_one_gave_up_does_not_wait_for_it_in_the_next_call(ranks):
    for rank in ranks:
        rank.failures = 3  # of earlier calls
    ranks[1]._give_up("rank 1 is somewhere else")
    thread, raised = waiting(ranks[0])
    thread.join(5)
    assert raised == ["rank 1 is somewhere else: end all processes that share the model and start them again"]


def test_a_failure_of_which_not_all_hear_ends_all(ranks):
    ranks[0]._store.set("0-waits-1", agreement.pickle.dumps((0, None)))
    ranks[1]._give_up("rank 1 is somewhere else")
    ranks[0].fail(ValueError("odd"))
    assert "ValueError: odd, and not all processes heard of it" in ranks[0].gone
    assert ranks[0].failures == 0
