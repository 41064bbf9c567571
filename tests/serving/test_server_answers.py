"""Is every answer of the server that of its request alone, whatever else is asked for?"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

openai = pytest.importorskip("openai", reason="the packages of the extra serve are not installed")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS = ["def fib(n):", "import os\nimport", "class Stack:\n    def", "# a list of", "for i in range(", "The model"]


def mixed(count: int, seed: int = 0) -> list[tuple[dict, list[dict]]]:
    """(fields of a request, per answer the arguments of generate alone)."""
    chance, found = random.Random(seed), []
    for number in range(count):
        prompt = chance.choice(PROMPTS) + " " * (number % 3) + "x" * (number % 5)
        body = {"prompt": prompt, "max_tokens": chance.randrange(1, 60), "return_token_ids": True}
        alone = {"prompt": prompt, "max_new_tokens": body["max_tokens"]}
        if chance.random() < 0.4:
            body["stop"] = chance.choice(["\n", ":", ["def", "    return"]])
            alone["stop_strings"] = body["stop"]
        answers = [alone]
        if chance.random() < 0.6:
            body |= {"temperature": chance.choice([0.5, 1.0, 1.4]), "seed": number, "n": chance.randrange(1, 4)}
            drawn = {"do_sample": True, "temperature": body["temperature"], "top_k": 0}
            if chance.random() < 0.5:
                body["top_p"] = drawn["top_p"] = 0.9
            answers = [{**alone, **drawn, "seed": number + i} for i in range(body["n"])]
        found.append((body, answers))
    return found


def test_sixteen_clients_get_what_generate_alone_writes(server, alone):
    asked = mixed(48)

    async def client(name: int, client: openai.AsyncOpenAI) -> list:
        return [await one(client, body) for body, _ in asked[name::16]]

    async def one(client: openai.AsyncOpenAI, body: dict) -> list[list[int]]:
        extra = {"return_token_ids": True}
        body = {name: value for name, value in body.items() if name != "return_token_ids"}
        if body["max_tokens"] % 2:
            answer = await client.completions.create(model="demo", extra_body=extra, **body)
            return [choice.token_ids for choice in answer.choices]
        ids: list[list[int]] = [[] for _ in range(body.get("n", 1))]
        async for chunk in await client.completions.create(model="demo", stream=True, extra_body=extra, **body):
            for choice in chunk.choices:
                ids[choice.index] += getattr(choice, "token_ids", None) or []
        return ids

    async def everyone() -> list:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as shared:
            return await asyncio.gather(*(client(name, shared) for name in range(16)))

    got = asyncio.run(everyone())
    for name in range(16):
        for (body, answers), ids in zip(asked[name::16], got[name], strict=True):
            assert ids == [alone.ids(**answer) for answer in answers], body
    assert server.backend.running == server.backend.waiting == 0


def test_a_chat_is_its_template_and_streams_the_same_text(server, alone):
    body = {"model": "demo", "messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 20,
            "return_token_ids": True}
    status, whole = server.ask(CHAT, body)
    choice = whole["choices"][0]
    expected = alone.ids("def add(a, b):\n", max_new_tokens=20)
    assert (status, choice["token_ids"], choice["finish_reason"]) == (200, expected, "length")
    assert choice["message"] == {"role": "assistant", "content": alone.tokenizer.decode(expected)}
    prompt = len(choice["prompt_token_ids"])
    assert whole["usage"] == {"prompt_tokens": prompt, "completion_tokens": 20, "total_tokens": prompt + 20}
    events = server.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    deltas = [event["choices"][0] for event in events if event["choices"]]
    assert "".join(one["delta"].get("content", "") for one in deltas) == choice["message"]["content"]
    assert [token for one in deltas for token in one.get("token_ids", [])] == expected
    assert [one["finish_reason"] for one in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert events[-1]["usage"] == whole["usage"]
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("stop", ["return", ["\n\n", "zebra"], ["(n"]])
def test_a_stop_ends_the_text_before_it(server, alone, stop):
    body = {"prompt": "def fib(n):\n", "max_tokens": 40, "stop": stop, "return_token_ids": True}
    choice = server.ask(TEXT, body)[1]["choices"][0]
    assert choice["token_ids"] == alone.ids("def fib(n):\n", max_new_tokens=40, stop_strings=stop)
    stops = [stop] if isinstance(stop, str) else stop
    text = alone.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    ended = [place for one in stops if (place := text.find(one)) >= 0]
    assert choice["text"] == text[: min(ended, default=len(text))]
    assert choice["finish_reason"] == ("stop" if ended else "length")
    assert "".join(event["choices"][0]["text"] for event in server.stream(TEXT, body)) == choice["text"]


def test_log_probabilities_are_those_of_the_target(server, alone):
    body = {"prompt": "def fib(n):", "max_tokens": 12, "logprobs": 3, "return_token_ids": True}
    choice = server.ask(TEXT, body)[1]["choices"][0]
    ids = alone.tokenizer("def fib(n):")["input_ids"]
    with torch.no_grad():
        logits = alone.model(torch.tensor([ids + choice["token_ids"]])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits.double(), -1)
    taken = expected.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0]
    assert torch.tensor(choice["logprobs"]["token_logprobs"]).double().sub(taken).abs().max() < 1e-4
    best = expected.topk(3).values
    found = torch.tensor([sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]])
    assert found.double().sub(best).abs().max() < 1e-4
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["token_ids"] == alone.ids("def fib(n):", max_new_tokens=12)  # being asked changes none


def test_log_probabilities_of_a_chat_come_with_their_tokens(server):
    body = {"messages": [{"role": "user", "content": "import"}], "max_tokens": 9, "logprobs": True, "top_logprobs": 2,
            "temperature": 1.0, "seed": 3, "return_token_ids": True}
    whole = server.ask(CHAT, body)[1]["choices"][0]["logprobs"]["content"]
    assert len(whole) == 9
    assert all(len(entry["top_logprobs"]) == 2 and bytes(entry["bytes"]).decode() == entry["token"] for entry in whole)
    chunks = [event["choices"][0] for event in server.stream(CHAT, body)]
    assert [entry for one in chunks if one["logprobs"] for entry in one["logprobs"]["content"]] == whole
    assert all(len(one["logprobs"]["content"]) == len(one["token_ids"]) for one in chunks if one["logprobs"])


def test_every_token_says_which_level_drafted_it(server):
    before = server.metric('mlspec_tokens_total{level="mxfp4"}')
    body = {"prompt": "def fib(n):", "max_tokens": 40, "return_levels": True, "return_token_ids": True}
    chunks = [event["choices"][0] for event in server.stream(TEXT, body)]
    levels = [level for one in chunks for level in one.get("levels", [])]
    assert len(levels) == sum(len(one.get("token_ids", [])) for one in chunks) > 20
    assert set(levels) <= {None, "mxfp4", "draft"}
    assert levels.count(None) < len(levels) - 5
    for one in chunks:  # the target puts a token of its own behind what it accepts
        assert None not in one.get("levels", [])[:-1]
        # No character of this text takes two tokens.
        assert "".join(one.get("token_texts", [])).removesuffix("<|eos|>") == one["text"]
    assert server.metric('mlspec_tokens_total{level="mxfp4"}') == before + levels.count("mxfp4")


def test_several_prompts_and_ids_are_answered_in_their_order(server, alone):
    ids = [alone.tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:3]]
    body = {"max_tokens": 7, "return_token_ids": True}
    for prompts in (PROMPTS[:3], ids):
        found = server.ask(TEXT, {**body, "prompt": prompts})[1]
        assert [one["token_ids"] for one in found["choices"]] == [alone.ids(p, max_new_tokens=7) for p in PROMPTS[:3]]
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.ask(TEXT, {**body, "prompt": ids[0]})[1]["choices"][0]["token_ids"] == alone.ids(ids[0],
                                                                                                  max_new_tokens=7)


def test_a_bias_forbids_a_token(server, alone):
    first = alone.ids("def fib(n):", max_new_tokens=1)[0]
    body = {"prompt": "def fib(n):", "max_tokens": 6, "logit_bias": {str(first): -100}, "return_token_ids": True}
    found = server.ask(TEXT, body)[1]["choices"][0]["token_ids"]
    assert first not in found
    assert found == alone.ids("def fib(n):", max_new_tokens=6, sequence_bias={(first,): -100.0})


def test_without_a_number_an_answer_ends_at_the_limit(server):
    found = server.ask(TEXT, {"prompt": "x = 1\n", "logit_bias": {"1": -100}})[1]
    assert found["usage"]["completion_tokens"] == 200


def test_the_page_and_its_files_are_there_and_load_nothing_from_elsewhere(server):
    status, page = server.ask("/")
    assert status == 200
    for name in ("page.css", "page.js"):
        assert f'"{name}"' in page
        status, file = server.ask(f"/{name}")
        assert status == 200
        assert "://" not in file
    assert "http" not in page


def test_metrics_count_what_was_written(server):
    name = 'mlspec_tokens_total{level="%s"}'
    before = sum(server.metric(name % level) for level in ("the target", "mxfp4", "draft"))
    passes = server.metric("mlspec_row_passes_total")
    ended = server.metric('mlspec_answers_total{finish_reason="length"}')
    firsts = server.metric("mlspec_time_to_first_token_seconds_count")
    body = {"prompt": "import", "max_tokens": 30, "n": 2, "temperature": 1, "logit_bias": {"1": -100}}
    assert server.ask(TEXT, body)[0] == 200
    after = sum(server.metric(name % level) for level in ("the target", "mxfp4", "draft"))
    assert after - before == 60
    assert 2 <= server.metric("mlspec_row_passes_total") - passes <= 60
    assert server.metric('mlspec_answers_total{finish_reason="length"}') == ended + 2
    assert server.metric("mlspec_time_to_first_token_seconds_count") == firsts + 2
    assert server.metric('mlspec_tested_tokens_total{level="mxfp4"}') >= server.metric(
        'mlspec_accepted_tokens_total{level="mxfp4"}') > 0
    assert server.metric('mlspec_cache_bytes{level="the target"}') > 0
    assert server.metric("mlspec_slots") == 4
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "demo"
