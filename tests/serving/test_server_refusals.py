"""Is bad input answered as OpenAI answers it, in one error that names the field, and with nobody else harmed?"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="the packages of the extra serve are not installed")

from servers import Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD = {"prompt": "def fib(n):", "max_tokens": 4}
BAD_FIELDS = {
    "negative number of tokens": ({"max_tokens": -1}, "max_tokens"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "more than the limit": ({"max_tokens": 201}, "max_tokens"),
    "a text of tokens": ({"max_tokens": "12"}, "max_tokens"),
    "negative temperature": ({"temperature": -0.1}, "temperature"),
    "next to no temperature": ({"temperature": 1e-300}, "temperature"),
    "hot": ({"temperature": 2.1}, "temperature"),
    "no probability": ({"top_p": 0}, "top_p"),
    "two probabilities": ({"top_p": 1.5}, "top_p"),
    "half a choice": ({"n": 1.5}, "n"),
    "no choice": ({"n": 0}, "n"),
    "many choices": ({"n": 17}, "n"),
    "many prompts": ({"prompt": ["a"] * 9, "n": 2}, "n"),
    "long seed": ({"seed": 2**70}, "seed"),
    "text as seed": ({"seed": "x"}, "seed"),
    "five stops": ({"stop": list("abcde")}, "stop"),
    "an empty stop": ({"stop": ""}, "stop"),
    "a number as stop": ({"stop": [3]}, "stop"),
    "unknown field": ({"max_token": 3}, "max_token"),
    "a penalty": ({"presence_penalty": 0.5}, "presence_penalty"),
    "stream as text": ({"stream": "yes"}, "stream"),
    "bias without ids": ({"logit_bias": {"a": 1}}, "logit_bias"),
    "bias beyond the vocabulary": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "bias out of bounds": ({"logit_bias": {"3": 101}}, "logit_bias"),
    "log probabilities of many": ({"logprobs": 21}, "logprobs"),
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty ids": ({"prompt": []}, "prompt"),
    "ids that are none": ({"prompt": [1, 10**9]}, "prompt"),
    "negative ids": ({"prompt": [-1]}, "prompt"),
    "mixed prompts": ({"prompt": ["a", 3]}, "prompt"),
    "too long": ({"prompt": [5] * 5000}, "prompt"),
}
BAD_MESSAGES = {
    "none": None, "empty": [], "a text": "hello", "no object": ["hello"], "no role": [{"content": "x"}],
    "unknown role": [{"role": "king", "content": "x"}], "a number": [{"role": "user", "content": 3}],
    "a picture": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "a part without text": [{"role": "user", "content": [{"type": "text"}]}],
    "a call without arguments": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
}  # fmt: skip


def require_error(found: tuple[int, dict], status: int, code: str | None = None, param: str | None = None) -> str:
    got, body = found
    assert got == status, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code or error["code"], param or error["param"])
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    return error["message"]


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_field_that_cannot_be_is_named(server, fields, param):
    assert param in require_error(server.ask(TEXT, {**GOOD, **fields}), 400, param=param)
    assert server.ask(TEXT, GOOD)[0] == 200


@pytest.mark.parametrize("messages", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_messages_that_are_none_are_refused(server, messages):
    status, body = server.ask(CHAT, {"messages": messages})
    require_error((status, body), 400)
    assert body["error"]["param"].startswith("messages")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": ' + b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(server, body):
    assert "JSON" in require_error(server.ask(TEXT, body), 400)


def test_unknown_models_and_paths_are_404(server):
    require_error(server.ask(TEXT, {**GOOD, "model": "gpt-9"}), 404, "model_not_found", "model")
    require_error(server.ask(CHAT, {"model": 3, "messages": []}), 404, "model_not_found", "model")
    require_error(server.ask("/v1/nothing"), 404)
    require_error(server.ask("/v1/completions"), 405)


def test_a_megabyte_is_413_and_read_no_further(server):
    large = json.dumps({**GOOD, "prompt": "x" * 1_000_000}).encode()
    assert "1000000" in require_error(server.ask(TEXT, large), 413)
    connection = server.connect()  # without a length the bytes are counted as they come
    connection.putrequest("POST", TEXT)
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    for _ in range(11):
        connection.send(b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
    response = connection.getresponse()
    require_error((response.status, json.loads(response.read())), 413)
    connection.close()
    assert server.ask(TEXT, GOOD)[0] == 200


def test_who_closes_behind_a_megabyte_reads_413_too(server):
    """With bytes that nobody has read the connection would be reset, and the answer lost."""
    large = json.dumps({**GOOD, "prompt": "x" * 3_000_000}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(large)}\r\n\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(head.encode() + large)
            with client.makefile("rb") as answer:
                read = answer.read()
        assert read.startswith(b"HTTP/1.1 413 ")
        assert b"1000000" in read


@pytest.mark.parametrize("said", [500, 3_000_000], ids=["short", "too large"])
def test_who_leaves_in_the_middle_of_a_body_is_no_failure_of_the_server(server, said):
    left = f'mlspec_requests_total{{path="{TEXT}",status="499"}}'
    before = server.metric(left)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {said}\r\n\r\n{{".encode())
    server.until(lambda: server.metric(left) == before + 1)


def test_a_model_without_a_chat_template_says_what_to_do(server):
    template, server.chat_tokenizer.chat_template = server.chat_tokenizer.chat_template, None
    try:
        said = require_error(server.ask(CHAT, {"messages": [{"role": "user", "content": "x"}]}), 400,
                             "no_chat_template")
    finally:
        server.chat_tokenizer.chat_template = template
    assert "--chat-template" in said


def test_a_full_queue_is_429_and_those_inside_are_answered():
    with Running(slots=1, queue=3) as server:
        body = {"prompt": "def fib(n):", "max_tokens": 150, "logit_bias": {"1": -100}}
        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(lambda _: server.ask(TEXT, body), range(12)))
        statuses = [status for status, _ in found]
        assert set(statuses) == {200, 429}
        assert 3 <= statuses.count(200) <= 8
        assert len({body["choices"][0]["text"] for status, body in found if status == 200}) == 1
        for status, refused in found:
            if status == 429:
                require_error((status, refused), 429, "queue_full")
        assert server.metric('mlspec_requests_total{path="/v1/completions",status="429"}') == statuses.count(429)


def test_keys_are_asked_for_and_wrong_ones_are_401():
    with Running(levels=[], keys=["right", "other"]) as server:
        for path, body in ((TEXT, GOOD), (CHAT, {}), ("/v1/models", None), ("/metrics", None)):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"},
                            {"Authorization": "Bearer"}, {"Authorization": "Basic right"}):
                require_error(server.ask(path, body, **headers), 401, "invalid_api_key")
        for key in ("right", "other"):
            assert server.ask(TEXT, GOOD, Authorization=f"Bearer {key}")[0] == 200
        assert server.ask("/health")[0] == 200


def test_what_takes_too_long_is_504_and_gives_its_slot_back():
    with Running(levels=[], slots=1, seconds=0.05, new_tokens=1000) as server:
        body = {"prompt": "x", "max_tokens": 1000, "logit_bias": {"1": -100}}
        require_error(server.ask(TEXT, body), 504, "timeout")
        last = server.stream(TEXT, body)[-1]
        assert last["error"]["code"] == "timeout"
        server.until(lambda: server.backend.running == 0)
        server.until(lambda: server.ask(TEXT, GOOD)[0] == 200)  # at once, unless the machine is busy
