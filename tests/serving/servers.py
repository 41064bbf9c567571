"""How does a test start a server, ask it, and find out what generate alone would have said?"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import threading
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec
from hf_mlspec.serving.backend_end import BackendEnd
from hf_mlspec.serving.http_server import HttpServer
from hf_mlspec.serving.limits import Limits
from hf_mlspec.serving.server import Options, listen, serve_model

TARGET, DRAFT = map(str, hf_mlspec.demo_pair())
PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def loaded() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    tokenizer.chat_template = PLAIN
    return model, tokenizer


class Alone:
    """A second copy of the target, for generate of one request."""

    def __init__(self) -> None:
        self.model, self.tokenizer = loaded()

    def ids(self, prompt: str | list[int], seed: int | None = None, **options: Any) -> list[int]:
        """The new tokens of one request."""
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if seed is not None:
            torch.manual_seed(seed)
        found = self.model.generate(torch.tensor([ids]), assistant_models=[], tokenizer=self.tokenizer, **options)
        return found[0, len(ids) :].tolist()


class Running:
    """A server from `with` to its end: both ends of its connection in threads of this process, so that tests can look
    at the backend, and let its model fail."""

    def __init__(self, levels: list[Any] | None = None, slots: int = 4, keys: list[str] | None = None,
                 grace: float = 5.0, every: float = 0.04, **limits: Any) -> None:
        self.model, tokenizer = loaded()
        self.chat_tokenizer = tokenizer
        self.levels = ["mxfp4", DRAFT] if levels is None else levels
        self.options = Options("demo", slots, keys or [], Limits(**{"new_tokens": 200, **limits}), every=every,
                               grace=grace)
        own, other = multiprocessing.Pipe()
        self.end, self.listening = BackendEnd(own), listen("127.0.0.1", 0)
        self.port = self.listening.getsockname()[1]
        self.http = HttpServer(self.options.setup(self.model, tokenizer), other, log_level="error")
        self._thread = threading.Thread(target=self.http.run, kwargs={"sockets": [self.listening]})

    def __enter__(self) -> Running:
        backend_tokenizer = AutoTokenizer.from_pretrained(TARGET)  # a tokenizer is nothing for two threads
        self.backend = serve_model(self.model, backend_tokenizer, self.levels, self.options, self.end)
        self._thread.start()
        assert self.end.ready.wait(60)
        return self

    def __exit__(self, *_: Any) -> None:
        self.http.should_exit = True
        self._thread.join(30)
        self.backend.cancel()
        assert self.backend.join(30)
        assert not self._thread.is_alive()
        assert self.end.join(30)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON (or text) of one request; a body of bytes is sent as it is."""
        connection = self.connect()
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, body, headers)
        response = connection.getresponse()
        read = response.read().decode()
        connection.close()
        is_json = response.getheader("content-type", "").startswith("application/json")
        return response.status, json.loads(read) if is_json else read

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, without the last one if that is [DONE]."""
        status, text = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        found = [json.loads(event) for event in events if event != "[DONE]"]
        assert (events[-1] == "[DONE]") != ("error" in found[-1])
        return found

    def metric(self, line: str) -> float:
        """The number behind a name and its labels."""
        _, text = self.ask("/metrics")
        return next((float(found.split()[-1]) for found in text.splitlines() if found.startswith(line + " ")), 0.0)

    def until(self, done: Any, seconds: float = 20.0) -> None:
        """Wait for something to become true."""
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.01)
