"""Do clients that leave, read slowly or ask for everything harm anybody else?"""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

openai = pytest.importorskip("openai", reason="the packages of the extra serve are not installed")

from servers import Running  # noqa: E402 - only where the server's packages are

TEXT = "/v1/completions"
LONG = {"prompt": "def fib(n):", "max_tokens": 200, "logit_bias": {"1": -100}}


def begun(server, body: dict) -> socket.socket:
    """A connection that has asked for something, and reads nothing."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    content = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_is_decoded_no_further(server, stream):
    cancelled = server.metric('mlspec_answers_total{finish_reason="cancelled"}')
    connection = begun(server, {**LONG, "stream": stream, "n": 3})
    server.until(lambda: server.backend.running == 3)
    connection.close()
    server.until(lambda: server.backend.running == 0, 10)
    assert server.metric('mlspec_answers_total{finish_reason="cancelled"}') == cancelled + 3


def test_who_goes_away_in_the_queue_never_gets_a_slot():
    with Running(slots=1) as server:
        first = begun(server, LONG)
        server.until(lambda: server.backend.running == 1)
        waiting = [begun(server, {**LONG, "stream": n % 2 == 0}) for n in range(4)]
        server.until(lambda: server.backend.waiting == 4)
        for one in waiting:
            one.close()
        assert b"200 OK" in first.recv(100)
        server.until(lambda: server.backend.running == server.backend.waiting == 0)
        assert server.metric('mlspec_answers_total{finish_reason="cancelled"}') == 4
        first.close()


def test_a_stream_that_is_left_in_its_middle_leaves_the_others_alone(server, alone):
    expected = alone.ids("def fib(n):", max_new_tokens=60, sequence_bias={(1,): -100.0})

    async def leaving(client) -> None:
        async with await client.completions.create(model="demo", stream=True, **LONG) as stream:
            async for _ in stream:
                return

    async def staying(client) -> list[int]:
        answer = await client.completions.create(model="demo", **{**LONG, "max_tokens": 60},
                                                 extra_body={"return_token_ids": True})
        return answer.choices[0].token_ids

    async def everyone() -> list:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
            return await asyncio.gather(*(leaving(client) if n % 2 else staying(client) for n in range(12)))

    got = asyncio.run(everyone())
    assert got[::2] == [expected] * 6
    server.until(lambda: server.backend.running == server.backend.waiting == 0)


def test_who_does_not_read_holds_nobody_up_and_is_let_go():
    with Running(seconds=2.0, new_tokens=400) as server:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", server.port))
        content = json.dumps({**LONG, "max_tokens": 200, "stream": True, "logprobs": 20, "n": 3}).encode()
        slow.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}"
                     "\r\n\r\n".encode() + content)
        server.until(lambda: server.backend.running > 0)
        begin = time.monotonic()
        status, found = server.ask(TEXT, {**LONG, "max_tokens": 5})
        assert (status, found["usage"]["completion_tokens"]) == (200, 5)
        assert time.monotonic() - begin < 5
        slow.settimeout(30)
        read = 0
        while piece := slow.recv(2048):  # the end: the server closed the connection
            read += len(piece)
            time.sleep(0.0005)
        assert read > 0
        slow.close()


def test_a_thousand_at_once_are_all_told_something():
    with Running(levels=[], queue=100) as server:
        async def one(number: int) -> bytes:
            await asyncio.sleep(number / 2000)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            content = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
            writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}"
                         "\r\n\r\n".encode() + content)
            status = (await reader.readline()).split()[1]
            await reader.read()
            writer.close()
            return status

        async def everyone() -> list[bytes]:
            return await asyncio.gather(*(one(n) for n in range(1000)))

        found = asyncio.run(everyone())
        assert set(found) <= {b"200", b"429"}
        assert found.count(b"200") >= 100
        assert server.ask("/health")[1] == {"status": "ok", "running": 0, "waiting": 0}
