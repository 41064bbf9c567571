"""Does a replica answer as a server does, and is every request answered where replicas die?"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

pytest.importorskip("openai", reason="the packages of the extra serve are not installed")

from servers import DRAFT, TARGET
from starlette.requests import Request

import hf_mlspec
from hf_mlspec.serving.forwarding import forwarded
from hf_mlspec.serving.replica import Replica, Served, beginning_of

try:
    from ray import serve
except ModuleNotFoundError:
    serve = None
ASKED = {"prompt": "def f(x):\n    ", "max_tokens": 12, "return_token_ids": True}
HEADERS = [(b"content-type", b"application/json")]


def parts(body: dict, path: str = "/v1/completions") -> tuple:
    return "POST", path, b"", HEADERS, json.dumps(body).encode()


async def read(messages) -> tuple[int, bytes]:
    start, *pieces = [one async for one in messages]
    return start["status"], b"".join(one.get("body", b"") for one in pieces)


def test_a_replica_answers_as_generate_alone(alone):
    async def ask():
        replica = Replica(Served.of({"model": TARGET, "levels": ["mxfp4", DRAFT], "limits": {"new_tokens": 50}}))
        try:
            whole = await read(replica.answered(*parts(ASKED)))
            stream = await read(replica.answered(*parts({**ASKED, "stream": True})))
            wrong = await read(replica.answered(*parts({**ASKED, "max_tokens": 0})))
            health = await read(replica.answered("GET", "/health", b"", [], b""))
            left = replica.answered(*parts({**ASKED, "max_tokens": 50, "stream": True}))
            await anext(left)
            await left.aclose()
            for _ in range(500):
                if not replica.load():
                    break
                await asyncio.sleep(0.02)
            assert not replica.load()  # nothing is decoded for nobody
            replica.require_healthy()
        finally:
            replica.close()
        with pytest.raises(RuntimeError, match="decoding has ended"):
            replica.require_healthy()
        return whole, stream, wrong, health

    whole, stream, wrong, health = asyncio.run(ask())
    expected = alone.ids(ASKED["prompt"], max_new_tokens=12)
    assert json.loads(whole[1])["choices"][0]["token_ids"] == expected
    events = [json.loads(line[6:]) for line in stream[1].decode().split("\n\n") if line.startswith("data: {")]
    assert [token for event in events for token in event["choices"][0].get("token_ids", [])] == expected
    assert (whole[0], stream[0], wrong[0], health[0]) == (200, 200, 400, 200)
    assert b"max_tokens is 0" in wrong[1]


@pytest.mark.parametrize(("args", "said"), [
    ({}, "args lacks 'model'"),
    ({"model": TARGET, "level": "mxfp4"}, "args has 'level'; known are model, levels"),
    ({"model": TARGET, "levels": "mxfp4"}, "levels is 'mxfp4', it must be a list"),
    ({"model": TARGET, "limits": {"new_tokens": 0}}, "the limit new_tokens is 0"),
    ({"model": TARGET, "limits": {"tokens": 1}}, "tokens"),
    ({"model": TARGET, "prefix_cache": "much"}, "prefix_cache"),
    ({"model": TARGET, "levels": ["mxfp4", 3]}, r"levels is \['mxfp4', 3\], it must be a list of words"),
    ({"model": TARGET, "dtype": "bf17"}, "dtype is 'bf17', choose one of .*bfloat16"),
    ({"model": TARGET, "slots": "8"}, "slots is '8', it must be 1 or more"),
    ({"model": TARGET, "device": 0}, "device is 0, it must be a word"),
])  # fmt: skip
def test_arguments_that_cannot_be_are_refused_before_a_model_is_loaded(args, said):
    with pytest.raises(ValueError, match=said):
        Served.of(args)


def test_requests_that_begin_alike_have_one_word():
    long = "x" * 600
    word = beginning_of(json.dumps({"prompt": long + "a"}).encode())
    assert word == beginning_of(json.dumps({"prompt": long + "b", "max_tokens": 3}).encode()) != ""
    assert word != beginning_of(json.dumps({"prompt": "y" + long}).encode())
    chats = [[{"role": "system", "content": "s"}, {"role": "user", "content": said}] for said in "ab"]
    assert len({beginning_of(json.dumps({"messages": chat}).encode()) for chat in chats}) == 1
    assert {beginning_of(body) for body in (b"", b"{", b"[1]", b'{"prompt": 3}', b'{"prompt": []}')} == {""}


def request(body: bytes) -> Request:
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": HEADERS,
             "server": ("a", 80), "scheme": "http"}  # fmt: skip
    return Request(scope, receive)


def answer(messages: list, body: bytes = b"{}", most: int = 100) -> tuple[int, bytes, int]:
    """What a client gets where one replica after the other sends these; "dies": it is gone. How many were asked."""
    left = list(messages)

    async def ask(beginning, own):
        for one in left.pop(0):
            if one == "dies":
                raise RuntimeError("the actor died")
            yield one

    async def run():
        found = await forwarded(request(body), ask, most)
        sent = []

        async def send(message):
            sent.append(message)

        await found({"type": "http", "method": "POST", "asgi": {"spec_version": "2.4"}}, None, send)
        return found.status_code, b"".join(one.get("body", b"") for one in sent), len(messages) - len(left)

    return asyncio.run(run())


def test_every_request_has_an_answer_where_replicas_die():
    def start(kind):
        return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}

    def piece(text):
        return {"type": "http.response.body", "body": text}

    json_, events = start(b"application/json"), start(b"text/event-stream; charset=utf-8")
    assert answer([["dies"], [json_, piece(b"a"), "dies"], [json_, piece(b"ab"), piece(b"c")]]) == (200, b"abc", 3)
    status, text, asked = answer([["dies"]] * 5)
    assert (status, json.loads(text)["error"]["code"], asked) == (503, "replica_lost", 3)
    assert answer([[events, "dies"], [events, piece(b"data: 1\n\n"), piece(b"data: [DONE]\n\n")]])[2] == 2
    status, text, asked = answer([[events, piece(b"data: 1\n\n"), "dies"], [events]])
    assert (status, asked) == (200, 1)
    assert text.startswith(b"data: 1\n\ndata: {")
    assert json.loads(text.split(b"data: ")[2])["error"]["code"] == "replica_lost"
    assert answer([[json_]], body=b"x" * 101)[::2] == (413, 0)


@pytest.mark.parametrize(("prefix", "path"), [("", "/v1/models"), ("/code", "/code/v1/models"), ("/", "/v1/models")])
def test_a_replica_does_not_see_the_prefix_of_its_application(prefix, path):
    asked = []

    async def ask(beginning, own):
        asked.append(own)
        yield {"type": "http.response.start", "status": 204, "headers": []}

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "root_path": prefix, "query_string": b"a=b", "headers": [],
             "server": ("a", 80), "scheme": "http"}  # fmt: skip
    assert asyncio.run(forwarded(Request(scope, receive), ask, 100)).status_code == 204
    assert asked == [("GET", "/v1/models", b"a=b", [], b"")]


@pytest.mark.skipif(serve is not None, reason="Ray is installed: what its absence says cannot be seen")
def test_without_ray_its_extra_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'hf-mlspec\[ray,serve\]'"):
        import hf_mlspec.serving.ray_serve  # noqa: F401


def test_the_yaml_file_names_what_there_is():
    config = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "ray_serve.yaml").read_text())
    (app,) = config["applications"]
    module, _, name = app["import_path"].partition(":")
    source = (Path(hf_mlspec.__file__).parents[1] / f"{module.replace('.', '/')}.py").read_text()
    assert f"def {name}(" in source
    served = Served.of({**app["args"], "model": TARGET})
    assert (served.levels, served.options().prefix_cache) == (["mxfp4"], 4 << 30)
    for own in app["deployments"]:
        assert f"\nclass {own['name']}:" in source
    if serve is not None:
        from ray.serve.schema import ServeDeploySchema

        ServeDeploySchema.model_validate(config)


def replicas() -> list[int]:
    """Processes of replicas of a chain that this process started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"ServeReplica" in (name := (place / "cmdline").read_bytes()) and b"Chain" in name:
                above = int(place.name)
                while above not in (0, os.getpid()):
                    above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
                found += [int(place.name)] if above else []
    return found


@pytest.mark.slow
@pytest.mark.skipif(serve is None, reason="Ray Serve is not installed (extra ray)")
def test_where_one_of_two_replicas_is_killed_every_request_is_answered(alone, monkeypatch):
    from hf_mlspec.batch.ray_workers import ray_cluster
    from hf_mlspec.serving.ray_serve import Chain, Front

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    args = {"model": TARGET, "levels": ["mxfp4", DRAFT], "slots": 2, "prefix_cache": "8MiB", "name": "demo"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ray_cluster(None, 4):
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            chain = Chain.options(num_replicas=2, ray_actor_options={"num_cpus": 1}).bind(Served.of(args))
            serve.run(Front.options(ray_actor_options={"num_cpus": 0}).bind(chain, 1_000_000, True), name="mlspec")
            assert ask(port, {**ASKED, "max_tokens": 0})[0] == 400
            answers = load(port, killed_after=8)
            assert ask(port, ASKED)[0] == 200  # by those that are left
        finally:
            serve.shutdown()
    expected = {number: alone.ids(prompt(number), max_new_tokens=24) for number in range(_REQUESTS)}
    right = 0
    for number, (status, text) in answers.items():
        events = [json.loads(line) for line in text.replace("data: ", "").split("\n\n") if line.startswith("{")]
        if status != 200 or "error" in events[-1]:
            assert events[-1]["error"]["message"]  # it says so
            continue
        choices = [event["choices"][0] for event in events]
        assert [token for choice in choices for token in choice.get("token_ids") or []] == expected[number]
        right += 1
    print(f"{right} of {_REQUESTS} answered right, {_REQUESTS - right} with an error")
    assert len(answers) == _REQUESTS
    assert right >= _REQUESTS - 4  # no more than the dead one had in its slots and told of already


_REQUESTS = 48


def prompt(number: int) -> str:
    return f"def f{number}(x):\n    "


def ask(port: int, body: dict) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode()


def load(port: int, killed_after: int) -> dict[int, tuple[int, str]]:
    """Answers of requests, eight at a time, every other one a stream; a replica is killed behind so many."""
    answers: dict[int, tuple[int, str]] = {}
    numbers, victim = iter(range(_REQUESTS)), replicas()[0]

    def client() -> None:
        for number in numbers:
            body = {**ASKED, "prompt": prompt(number), "max_tokens": 24, "stream": bool(number % 2)}
            answers[number] = ask(port, body)

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    while len(answers) < killed_after:
        time.sleep(0.005)
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join(300)
    return answers
