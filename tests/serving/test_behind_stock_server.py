"""Does transformers' own server, after one line, answer with a chain, and each request as generate does alone?"""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import torch

openai = pytest.importorskip("openai", reason="the packages of the extra serve are not installed")
pytest.importorskip("typer", reason="transformers' server needs it")

from fastapi import HTTPException  # noqa: E402
from servers import DRAFT, TARGET  # noqa: E402 - only where the server's packages are
from transformers import GenerationConfig  # noqa: E402
from transformers.cli.serve import Serve  # noqa: E402
from transformers.cli.serving import utils  # noqa: E402

from hf_mlspec.serving import stock  # noqa: E402
from hf_mlspec.serving.messages import Ended, News  # noqa: E402
from hf_mlspec.serving.server import listen  # noqa: E402
from hf_mlspec.speculation.sampling import drawn_seed  # noqa: E402

PROMPTS = ["def fib(n):", "class Node:", "import os\n", "for i in range("]


class Stock:
    """`transformers serve TARGET --continuous-batching` in threads of this process."""

    def __init__(self, levels, **how):
        with listen("127.0.0.1", 0) as free:
            self.port = free.getsockname()[1]
        stock.enable(levels, **how)
        self.serve = Serve(force_model=TARGET, continuous_batching=True, device="cpu", dtype="float32", port=self.port,
                           host="127.0.0.1", non_blocking=True, log_level="error")

    @property
    def manager(self):
        return self.serve._generation_state._cb_manager

    def until(self, done):
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)

    def __enter__(self):
        self.until(lambda: self.serve.server.started)
        url = f"http://127.0.0.1:{self.port}/v1"
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
        return self

    def __exit__(self, *_):
        self.client.close()
        self.serve.kill_server()
        stock.disable()
        assert utils.CBGenerateManager is stock._STOCK


@pytest.fixture(scope="module")
def served():
    with Stock(["mxfp4", DRAFT], slots=3) as running:
        yield running


def ask(served, prompt, **options):
    return served.client.completions.create(model=TARGET, prompt=prompt, **options)


def text_of(alone, prompt, **options):
    return alone.tokenizer.decode(alone.ids(prompt, **options), skip_special_tokens=True)


def test_the_answer_is_that_of_generate_and_the_levels_draft(served, alone):
    answer = ask(served, PROMPTS[0], max_tokens=24, temperature=0)
    assert answer.choices[0].text == text_of(alone, PROMPTS[0], max_new_tokens=24, do_sample=False)
    assert answer.usage.completion_tokens == len(alone.ids(PROMPTS[0], max_new_tokens=24, do_sample=False))
    assert isinstance(served.manager, stock.StreamsBehind)
    assert served.manager.backend.levels == ["mxfp4", DRAFT]
    assert served.manager.backend.levels_error is None


def test_a_stream_has_the_same_text_and_counts_its_tokens(served, alone):
    events = list(ask(served, PROMPTS[1], max_tokens=20, temperature=0, stream=True))
    expected = alone.ids(PROMPTS[1], max_new_tokens=20, do_sample=False)
    text = "".join(event.choices[0].text for event in events)
    assert text == alone.tokenizer.decode(expected, skip_special_tokens=True)
    assert events[-1].usage.completion_tokens == len(expected)


def test_requests_at_a_time_have_settings_of_their_own(served, alone):
    """transformers' manager takes the settings of the first request for all."""
    limits = [7, 30, 18, 25]

    async def everyone():
        url = f"http://127.0.0.1:{served.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked = (client.completions.create(model=TARGET, prompt=prompt, max_tokens=limit, temperature=0,
                                               frequency_penalty=0.5 if n % 2 else None)
                     for n, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)))
            return await asyncio.gather(*asked)

    for n, (answer, prompt, limit) in enumerate(zip(asyncio.run(everyone()), PROMPTS, limits, strict=True)):
        options = {"repetition_penalty": 1.5} if n % 2 else {}
        assert answer.choices[0].text == text_of(alone, prompt, max_new_tokens=limit, do_sample=False, **options)


def test_a_sampled_request_has_the_tokens_of_its_seed(served, alone):
    body = '{"do_sample": true, "temperature": 0.9, "max_new_tokens": 12, "top_k": 20}'
    answers = [ask(served, PROMPTS[0], seed=seed, extra_body={"generation_config": body}) for seed in (3, 4, 3)]
    expected = [text_of(alone, PROMPTS[0], seed=seed, do_sample=True, temperature=0.9, max_new_tokens=12, top_k=20)
                for seed in (3, 4, 3)]
    assert [one.choices[0].text for one in answers] == expected
    assert expected[0] != expected[1]


def test_an_answer_ends_with_its_stop_text(served, alone):
    """transformers' manager hears nothing of it."""
    whole = text_of(alone, PROMPTS[0], max_new_tokens=24, do_sample=False)
    stop = whole[len(whole) // 2 :][:2]
    answer = ask(served, PROMPTS[0], max_tokens=24, temperature=0, stop=[stop])
    assert stop in answer.choices[0].text
    assert len(answer.choices[0].text) < len(whole)


def test_without_a_limit_an_answer_ends_with_the_positions(served, alone):
    answer = ask(served, PROMPTS[2], temperature=0)
    left = alone.model.config.max_position_embeddings - answer.usage.prompt_tokens
    assert answer.usage.completion_tokens <= left
    assert answer.choices[0].finish_reason == ("length" if answer.usage.completion_tokens == left else "stop")


def test_who_leaves_is_decoded_no_further(served):
    events = ask(served, PROMPTS[0], max_tokens=200, temperature=0, stream=True)
    next(iter(events))
    events.close()
    served.until(lambda: served.manager.backend.running == 0 and not served.manager._listeners)


def test_what_cannot_be_is_told_and_harms_nobody(served, alone):
    positions = alone.model.config.max_position_embeddings
    with pytest.raises(openai.BadRequestError) as told:
        ask(served, "x = 1\n" * positions, max_tokens=4)
    assert f"{positions}" in told.value.response.text
    beams = {"extra_body": {"generation_config": '{"num_beams": 3, "max_new_tokens": 4}'}}
    with pytest.raises(openai.BadRequestError) as told:
        ask(served, PROMPTS[0], **beams)
    assert "num_beams" in told.value.response.text
    with pytest.raises(openai.APIError) as told:
        list(ask(served, PROMPTS[0], stream=True, **beams))
    assert "num_beams" in str(told.value.body)
    answer = ask(served, PROMPTS[0], max_tokens=6, temperature=0)
    assert answer.choices[0].text == text_of(alone, PROMPTS[0], max_new_tokens=6, do_sample=False)


def test_more_than_the_queue_holds_is_429():
    with Stock([], slots=1, queue=1) as served:
        ask(served, PROMPTS[0], max_tokens=1, temperature=0)
        told, backend, goes_on = [], served.manager.backend, threading.Event()
        tell = backend.tell
        backend.tell = lambda news: goes_on.wait(60) and tell(news)  # the first answer holds the only slot

        def one():
            try:
                told.append(ask(served, PROMPTS[0], max_tokens=4, temperature=0).usage.completion_tokens)
            except openai.RateLimitError as error:
                told.append(error.status_code)

        threads = [threading.Thread(target=one) for _ in range(5)]
        for thread in threads:
            thread.start()
        try:
            served.until(lambda: 429 in told)
        finally:
            goes_on.set()
        for thread in threads:
            thread.join()
        assert {4, 429} == set(told)


@pytest.fixture
def manager():
    """A manager whose backend takes all tickets and decodes none."""
    found = stock.StreamsBehind(stock.Settings())
    found.backend, found._loop = SimpleNamespace(submit=lambda tickets: None), None
    return found


def streams(manager, model, settings, parser=None):
    processor = SimpleNamespace(_tokenizer=None)
    return manager.generate_streaming(model, processor, {"input_ids": [5]}, settings, "a", parser)[0]


def test_a_parser_that_fails_holds_up_nobody(manager, alone):
    class Parser:
        initial_events = ()

        def finalize(self):
            raise KeyError("arguments")

    settings = GenerationConfig(do_sample=False, max_new_tokens=4)
    failing, other = streams(manager, alone.model, settings, Parser()), streams(manager, alone.model, settings)
    manager._hear([News(0, end=Ended("stop")), News(1, end=Ended("stop"))])
    assert failing.get_nowait().msg == "KeyError: 'arguments'"
    assert other.get_nowait() is None
    assert not manager._listeners


def test_a_seed_is_drawn_with_the_request_where_only_the_model_samples(manager, alone):
    """A request's own settings need not say so: generate takes what they leave out from the model's."""
    own = SimpleNamespace(config=alone.model.config, generation_config=GenerationConfig(do_sample=True))
    torch.manual_seed(3)
    ticket = manager._ticket(own, None, {"input_ids": [5]}, GenerationConfig(max_new_tokens=4), None)
    torch.manual_seed(3)
    assert ticket.seed == drawn_seed()
    own.generation_config.do_sample = False
    assert manager._ticket(own, None, {"input_ids": [5]}, GenerationConfig(max_new_tokens=4), None).seed is None


def test_levels_that_do_not_fit_the_model_are_told_to_who_asks(alone):
    unfit = stock.StreamsBehind(stock.Settings(["early_exit:99"], how={"prefill_chunk": None, "prefix_cache": None}))

    async def asked():
        given = {"input_ids": [5]}, GenerationConfig(max_new_tokens=4), "a"
        await unfit.generate_non_streaming(alone.model, alone.tokenizer, *given)

    for _ in range(2):
        with pytest.raises(HTTPException, match="503: the chain cannot begin: early_exit: num_layers is 99"):
            asyncio.run(asked())
    assert unfit.is_alive()
    unfit.stop()


@pytest.mark.parametrize(("how", "said"), [
    ({"levels": "mxfp4"}, "levels is 'mxfp4', it must be a list"), ({"slots": 0}, "slots is 0"),
    ({"queue": True}, "queue is True"), ({"prefix_cache": "much"}, "prefix_cache is 'much'"),
    ({"prefill_chunk": -1}, "prefill_chunk is -1"), ({"levels": ["no-such-word"]}, "no-such-word"),
])  # fmt: skip
def test_what_enable_refuses(how, said):
    before = utils.CBGenerateManager
    with pytest.raises((TypeError, ValueError), match=said):
        stock.enable(**how)
    assert utils.CBGenerateManager is before
