"""Do rounds that are short share an event, is nothing of them lost, and does nobody wait longer than was said?"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the packages of the extra serve are not installed")

from servers import Running

from hf_mlspec import Completion, NewTokens
from hf_mlspec.serving.answer import Answer
from hf_mlspec.serving.backend import Backend, Ticket
from hf_mlspec.serving.errors import ApiError
from hf_mlspec.serving.messages import Ended, News

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "def fib(n):", "max_tokens": 60, "logit_bias": {"1": -100}, "return_token_ids": True}


@pytest.mark.parametrize(("every", "levels"), [(0.0, False), (60.0, False), (60.0, True)])
def test_what_short_rounds_bring_comes_together(alone, every, levels):
    expected = alone.ids("def fib(n):", max_new_tokens=60, sequence_bias={(1,): -100.0})
    with Running(levels=[], every=every) as server:
        body = {**BODY, "return_levels": levels}
        chunks = [event["choices"][0] for event in server.stream(TEXT, body)]
        chat = {**body, "messages": [{"role": "user", "content": "def fib(n):"}], "n": 2}
        del chat["prompt"]
        parts = [event["choices"][0] for event in server.stream(CHAT, chat)]
        assert server.metric("mlspec_row_passes_total") == 60 * 3
    told = [chunk["token_ids"] for chunk in chunks if "token_ids" in chunk]
    assert [token for tokens in told for token in tokens] == expected
    assert "".join(chunk["text"] for chunk in chunks) == alone.tokenizer.decode(expected)
    assert chunks[-1]["finish_reason"] == "length"
    assert len(told[0]) == 1  # the first token is told at once
    assert len(told) == (2 if every and not levels else 60)  # and the last one with those between them
    for index in range(2):
        own = [part for part in parts if part["index"] == index]
        assert sum(len(part.get("token_ids", [])) for part in own) == 60
        assert sum("token_ids" in part for part in own) == len(told)


class Heard(dict):
    """What was told, by the name of the ticket, and in how many calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, news: list[News]) -> None:
        self.calls += 1
        for one in news:
            self.setdefault(one.number, []).append(one)


@pytest.fixture
def telling(monkeypatch):
    """A backend without a model that is told of rounds by hand, at times that the test sets."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("hf_mlspec.serving.backend.time.perf_counter", lambda: clock.now)
    wrote = []
    watch = SimpleNamespace(began=lambda ticket: None, ended=lambda ticket, now: None,
                            wrote=lambda levels, passes: wrote.append((sum(levels.values()), passes)))  # fmt: skip
    heard = Heard()
    return Backend(None, None, [], watch=watch, tell=heard), clock, wrote, heard


def tickets(backend: Backend, **every: float | None) -> list[Ticket]:
    """One for each name, that the backend decodes."""
    made = []
    for name, seconds in every.items():
        made.append(Ticket(name, [5], seconds))
        backend._live[id(made[-1])] = made[-1]
    return made


def gains(ticket: Ticket, *tokens: int) -> NewTokens:
    return NewTokens(ticket, list(tokens), levels=[None] * len(tokens))


def test_a_round_is_one_call_whatever_it_brought(telling):
    backend, clock, wrote, heard = telling
    fast, slow, whole = tickets(backend, fast=0.0, slow=0.1, whole=None)
    for number in range(30):
        clock.now += 0.01
        backend._tell([gains(one, number) for one in (fast, slow, whole)])
    assert heard.calls == 30
    assert [news.tokens for news in heard["fast"]] == [[number] for number in range(30)]
    assert heard["slow"][0].tokens == [0]
    assert [len(news.tokens) for news in heard["slow"][1:]] == [9, 9, 9]  # another round would be more than 0.1 s
    assert "whole" not in heard
    backend._tell([Completion(whole, [], list(range(30)), "length")])
    assert [(news.tokens, news.end) for news in heard["whole"]] == [(list(range(30)), Ended("length"))]
    assert backend.running == 2
    assert tuple(map(sum, zip(*wrote, strict=True))) == (90, 90)


def test_streams_that_began_apart_are_told_in_the_same_rounds(telling):
    backend, clock, _, heard = telling
    early, late, all_rounds = tickets(backend, early=0.1, late=0.1, all_rounds=0.0)
    for number in range(30):
        clock.now += 0.01
        backend._tell([gains(one, number) for one in (early, late)[: 1 + (number >= 5)]])
    assert [len(news.tokens) for news in heard["early"]] == [1, 9, 9, 9]
    assert [len(news.tokens) for news in heard["late"]] == [1, 4, 9, 9]  # its first token at once, then with `early`
    assert heard.calls == 5
    clock.now += 0.01
    backend._tell([gains(one, 30) for one in (early, all_rounds)])
    assert len(heard["all_rounds"]) == 1
    assert len(heard["early"]) == 4  # who is told every round brings nobody with it


def test_levels_are_told_to_whom_they_matter(telling):
    backend, _, _, heard = telling
    plain, coloured = Ticket("plain", [5]), Ticket("coloured", [5], levels=True)
    backend._tell([NewTokens(one, [7, 8], levels=["mxfp4", None]) for one in (plain, coloured)])
    assert [heard[name][0].levels for name in ("plain", "coloured")] == [[], ["mxfp4", None]]


def test_what_nobody_hears_of_yet_is_counted_once_a_second(telling):
    backend, clock, wrote, heard = telling
    (whole,) = tickets(backend, whole=None)
    backend._counted = clock.now
    for number in range(35):
        clock.now += 0.125
        backend._tell([gains(whole, number)])
    assert wrote == [(8, 8)] * 4
    assert heard == {}


def test_rounds_longer_than_the_time_between_events_are_told_at_once(telling):
    backend, clock, _, heard = telling
    (one,) = tickets(backend, one=0.04)
    for number in range(5):
        clock.now += 0.05
        backend._tell([gains(one, number)])
    assert [news.tokens for news in heard["one"]] == [[0], [1], [2], [3], [4]]


class Telling:
    """A backend's end that tells some news of the only request, and then that its time is over."""

    def __init__(self, *news: News) -> None:
        self.news, self.cancelled = news, []

    async def submit(self, asks, listener) -> None:
        asks[0].number = 0
        for one in (*self.news, None):
            listener(one)

    def cancel(self, numbers: list[int]) -> None:
        self.cancelled += numbers


async def told_of(end: Telling) -> list[list[int]]:
    asked = SimpleNamespace(return_levels=False, top_logprobs=None, options={})
    answer = Answer(end, asked, 1000.0, 0.0)
    answer.add([5], 9, None, SimpleNamespace(add=lambda tokens: [], rest=list))
    await answer.start()
    return [[token for step in steps for token in step.tokens] async for steps in answer.steps()]


def test_an_answer_that_is_whole_when_its_time_is_over_is_no_failure():
    whole = Telling(News(0, [7]), News(0, [8], end=Ended("length")))
    assert asyncio.run(told_of(whole)) == [[7, 8]]
    assert whole.cancelled == []
    cut = Telling(News(0, [7]))
    with pytest.raises(ApiError, match="took longer than a request may"):
        asyncio.run(told_of(cut))
    assert cut.cancelled == [0]
