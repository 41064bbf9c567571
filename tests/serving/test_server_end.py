"""How does the server end: by a signal, by a port that is taken, by a level or a target that fails?"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="the packages of the extra serve are not installed")

from servers import DRAFT, PLAIN, TARGET, Running

import hf_mlspec
from hf_mlspec import Draft
from hf_mlspec.speculation.checker import Checker

psutil = pytest.importorskip("psutil", reason="psutil is not installed")

TEXT = "/v1/completions"
LONG = {"prompt": "def fib(n):", "max_tokens": 200, "logit_bias": {"1": -100}, "return_token_ids": True}


class Failing:
    """A level that guesses badly for some rounds, and then raises."""

    name = "failing"

    def __init__(self, rounds: int) -> None:
        self.left, self.stats = rounds, hf_mlspec.LevelStats(self.name)

    def start(self, batch, device) -> None:
        self.device = device

    def select(self, keep) -> None: ...
    def admit(self, count) -> None: ...
    def replace(self, row) -> None: ...
    def rollback(self, lengths) -> None: ...

    def propose(self, rows, limits):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("this level is broken")
        return Draft.from_lists([[7] * min(limit, 2) for limit in limits], self.device)


@pytest.mark.parametrize("rounds", [0, 1, 9])
def test_a_level_that_fails_is_left_out_and_no_answer_shows_it(alone, rounds):
    expected = alone.ids("def fib(n):", max_new_tokens=120, sequence_bias={(1,): -100.0})
    text = alone.tokenizer.decode(expected)
    with Running(levels=[Failing(rounds)]) as server:
        body = {**LONG, "max_tokens": 120, "return_levels": True, "logprobs": 0}
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(server.ask, TEXT, body) for _ in range(3)]
            streams = [pool.submit(server.stream, TEXT, body) for _ in range(3)]
        for one in asked:
            choice = one.result()[1]["choices"][0]
            assert (choice["token_ids"], choice["text"]) == (expected, text)
            assert len(choice["logprobs"]["tokens"]) == 120
        for one in streams:
            chunks = [event["choices"][0] for event in one.result()]
            assert [token for chunk in chunks for token in chunk.get("token_ids", [])] == expected
            assert "".join(chunk["text"] for chunk in chunks) == text
            assert sum(len(chunk.get("levels", [])) for chunk in chunks) == 120
        assert server.metric("mlspec_level_failures_total") == 1
        assert server.ask("/health")[1]["levels"] == "left out: this level is broken"


def test_a_level_that_fails_when_nothing_more_is_taken_does_not_keep_the_server_from_its_end(alone):
    expected = alone.ids("def fib(n):", max_new_tokens=150, sequence_bias={(1,): -100.0})
    with Running(levels=[Failing(40)], slots=2) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.ask, TEXT, {**LONG, "max_tokens": 150})
        server.until(lambda: server.backend.running == 1)
        server.backend.close()
        assert asked.result()[1]["choices"][0]["token_ids"] == expected
        assert server.backend.levels_error is not None
        assert server.backend.join(10)


def fail_at(monkeypatch, number: int, counts: Callable[[Checker], bool]) -> None:
    """Let a check raise: the one with this number among those of the checkers that count."""
    check, left = Checker.check, [number]

    def failing(self, *words, **more):
        left[0] -= counts(self)
        if left[0] == 0:
            raise RuntimeError("out of luck")
        return check(self, *words, **more)

    monkeypatch.setattr(Checker, "check", failing)


def check_told(status: int, body: dict) -> None:
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "out of luck" in body["error"]["message"]


def test_a_target_that_fails_ends_what_runs_and_goes_on_with_the_next(monkeypatch):
    with Running(levels=[], slots=2) as server:
        assert server.ask(TEXT, {**LONG, "max_tokens": 3})[0] == 200
        fail_at(monkeypatch, 5, lambda checker: True)
        check_told(*server.ask(TEXT, LONG))
        assert server.ask(TEXT, {**LONG, "max_tokens": 3})[0] == 200
        # And now nothing is decoded in between: the next stream fails at once.
        monkeypatch.setattr(Checker, "check", lambda *_, **__: 1 / 0)
        assert server.ask(TEXT, LONG)[0] == 500
        assert server.ask(TEXT, LONG)[0] == 500
        server.until(lambda: not server.backend.alive)
        assert server.ask("/health")[0] == 503
        assert server.ask(TEXT, LONG)[0] == 503


def test_a_target_that_fails_costs_no_level(monkeypatch):
    """Its levels did nothing wrong: the next answer has them still."""
    with Running(slots=2) as server:
        assert server.ask(TEXT, {**LONG, "max_tokens": 3})[0] == 200  # else nothing was decoded, and there is no hope
        fail_at(monkeypatch, 4, lambda checker: checker.name == "the target")
        check_told(*server.ask(TEXT, LONG))
        chunks = [event["choices"][0] for event in server.stream(TEXT, {**LONG, "return_levels": True})]
        levels = {level for chunk in chunks for level in chunk.get("levels", [])}
        assert levels & {"mxfp4", "draft"}
        assert server.backend.levels_error is None
        assert "levels" not in server.ask("/health")[1]
        assert server.metric("mlspec_level_failures_total") == 0


@pytest.mark.parametrize(("grace", "tokens"), [(30.0, 200), (0.05, 1000)])
def test_at_the_end_running_answers_end_or_are_told(alone, grace, tokens):
    body = {**LONG, "max_tokens": tokens, "stream": True}
    with Running(slots=2, grace=grace, new_tokens=1000) as server, ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.ask, TEXT, {**body, "stream": n % 2 == 0}) for n in range(6)]
        server.until(lambda: server.backend.running == 2 and server.backend.waiting == 4)
        server.http.should_exit = True
        found = [one.result() for one in asked]
    statuses = [status for status, _ in found]
    if grace > 1:
        assert statuses == [200] * 6
        expected = alone.ids("def fib(n):", max_new_tokens=200, sequence_bias={(1,): -100.0})
        for _, answer in found[1::2]:
            assert answer["choices"][0]["token_ids"] == expected
        for _, text in found[::2]:
            assert text.endswith("data: [DONE]\n\n")
    else:
        assert statuses[::2] == [200] * 3
        assert statuses[1::2] == [503] * 3
        for _, text in found[::2]:
            assert json.loads(text.split("data: ")[-1])["error"]["code"] == "shutting_down"


@pytest.fixture
def command(tmp_path):
    """`mlspec serve` of the demo pair in a process of its own: (process, port)."""
    template, keys = tmp_path / "plain.jinja", tmp_path / "keys"
    template.write_text(PLAIN)
    keys.write_text("# of the tests\nsecret\n\n")
    words = [sys.executable, "-m", "mlspec_cli", "serve", TARGET, "--level", f"mxfp4+{DRAFT}", "--port", "0",
             "--grace", "20", "--chat-template", str(template), "--api-key-file", str(keys),
             "--served-model-name", "demo"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("mlspec serve: "):
            break
    assert process.poll() is None
    threading.Thread(target=process.stderr.read, daemon=True).start()
    yield process, int(line.rsplit(":", 1)[1])
    process.kill()
    process.wait()


def _listens(process: psutil.Process, port: int) -> bool:
    found = process.net_connections("tcp")
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found)


def test_the_command_serves_and_a_signal_ends_it(command):
    process, port = command
    first = psutil.Process(process.pid)
    assert not _listens(first, port)  # else who comes when HTTP takes no more would wait for the end of all answers
    assert any(_listens(one, port) for one in first.children())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": "Bearer secret"}
    chat = {"model": "demo", "messages": [{"role": "user", "content": "def f():"}], "max_tokens": 400, "stream": True,
            "logit_bias": {"1": -100}}
    connection.request("POST", "/v1/chat/completions", json.dumps(chat), headers)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    process.send_signal(signal.SIGTERM)
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason": "length"' in rest
    begin = time.monotonic()
    assert process.wait(20) in (0, -signal.SIGTERM)
    assert time.monotonic() - begin < 15


def test_a_folder_that_does_not_exist_is_said_before_anything_is_imported():
    code = ("import sys; from mlspec_cli.start import main\n"
            "try: main(['serve', 'no/such/folder'])\n"
            "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'hf_mlspec' in sys.modules)")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "2 False False\n"
    (line,) = found.stderr.splitlines()
    assert "model folder 'no/such/folder' does not exist" in line


def test_clients_are_told_when_the_process_that_decodes_is_gone():
    """Here its end of the connection is."""
    with Running(slots=2) as server, ThreadPoolExecutor(2) as pool:
        stream = pool.submit(server.ask, TEXT, {**LONG, "stream": True})
        whole = pool.submit(server.ask, TEXT, LONG)
        server.until(lambda: server.backend.running == 2)
        with socket.socket(fileno=os.dup(server.end.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        assert json.loads(stream.result()[1].split("data: ")[-1])["error"]["code"] == "decoding_failed"
        assert whole.result()[0] == 500
        server.until(lambda: server.http.should_exit)
        assert server.backend.join(20)


def http_process(process: subprocess.Popen) -> psutil.Process:
    """The child that speaks HTTP; multiprocessing has another one, which keeps its own house."""
    return next(one for one in psutil.Process(process.pid).children() if "spawn_main" in " ".join(one.cmdline()))


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(command, tmp_path):
    """The folder holds no model. And the server whose port it is ends with its process that speaks HTTP."""
    process, port = command
    words = [sys.executable, "-m", "mlspec_cli", "serve", str(tmp_path), "--port", str(port)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.splitlines() == [f"mlspec serve: cannot listen on 127.0.0.1 port {port}: Address already in "
                                         "use; choose another --port or --host"]
    http_process(process).kill()
    assert process.wait(20) == 2
