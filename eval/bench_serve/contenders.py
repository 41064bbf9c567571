"""Who answers the same requests? A server of this package, transformers' own, and the stream without a server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mlspec

from .clients import Seen, Work, ask_all

Ask = Callable[[], Seen]  # one run of all requests


@contextlib.contextmanager
def stream_alone(folder: str, levels: list[str], work: Work, clients: int, threads: int,
                 cpus: str | None = None) -> Iterator[Ask]:
    """generate_stream in this process, a slot for each client. cpus: cores to run on, as taskset names them."""
    torch.set_num_threads(threads)
    with _on(cpus):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)

    def ask() -> Seen:
        with _on(cpus):
            return _streamed(model, tokenizer, levels, work, clients)

    yield ask


@contextlib.contextmanager
def _on(cpus: str | None) -> Iterator[None]:
    """This thread, and those that it starts, on these cores."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _cores(cpus) if cpus else own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


def _cores(cpus: str) -> set[int]:
    """Those of "0-7,9"."""
    ends = [part.split("-") for part in cpus.split(",")]
    return {core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)}


def _streamed(model: Any, tokenizer: Any, levels: list[str], work: Work, clients: int) -> Seen:
    seen, asked = Seen(0.0, 0.0, [0] * len(work), [0.0] * len(work), [""] * len(work)), [0.0] * len(work)

    def requests() -> Iterator[hf_mlspec.Request]:
        for number, (prompt, limit) in enumerate(work):
            asked[number] = time.perf_counter()  # a client asks when its last answer is there: a slot is free
            yield hf_mlspec.Request(prompt, max_new_tokens=limit, id=number, do_sample=False)

    begin, cpu = time.perf_counter(), time.process_time()
    for event in hf_mlspec.generate_stream(model, requests(), max_batch=clients, assistant_models=levels,
                                           tokenizer=tokenizer, events=True):
        now, number = time.perf_counter(), event.id
        if isinstance(event, hf_mlspec.Completion):
            if event.error is not None:
                raise event.error
            seen.tokens[number], seen.texts[number] = len(event.new_tokens), event.text
        elif not seen.first[number]:
            seen.first[number] = now - asked[number]
    seen.seconds, seen.cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    return seen


@contextlib.contextmanager
def served(words: list[str], port: int, model: str, work: Work, clients: int, threads: int,
           cpus: str | None = None, http_cpus: str | None = None) -> Iterator[Ask]:
    """A server in a process of its own, which may take its time until it is asked."""
    with serving(words, port, threads, cpus, http_cpus) as pid:
        yield lambda: _asked(pid(), port, model, work, clients)


@contextlib.contextmanager
def serving(words: list[str], port: int, threads: int, cpus: str | None = None,
            http_cpus: str | None = None) -> Iterator[Callable[[], int]]:
    """A server in a process of its own, whose number is given as soon as it answers. cpus: as of `stream_alone`.
    http_cpus: of the processes that it started, where these have cores of their own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pinned = ["taskset", "-c", cpus, *words] if cpus else words
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(pinned, env=environment, stderr=said, stdout=subprocess.DEVNULL)
        answers: list[int] = []

        def pid() -> int:
            if not answers:
                _wait(process, port, said)
                for child in psutil.Process(process.pid).children(recursive=True) if http_cpus else ():
                    _move(child.pid, http_cpus)
                answers.append(process.pid)
            return process.pid

        try:
            yield pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


def _move(pid: int, cpus: str) -> None:
    """All threads of a process to these cores."""
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, _cores(cpus))


def _asked(pid: int, port: int, model: str, work: Work, clients: int) -> Seen:
    before = _seconds(pid)
    seen = ask_all(port, model, work, clients)
    own, beside = (after - first for after, first in zip(_seconds(pid), before, strict=True))
    seen.cpu_seconds, seen.beside_seconds = own, beside
    return seen


def _seconds(pid: int) -> tuple[float, float]:
    """Processor time of a server: of its first process, and of those that it started."""
    first = psutil.Process(pid)
    spent = [one.cpu_times() for one in (first, *first.children(recursive=True))]
    own, *beside = (one.user + one.system for one in spent)
    return own, sum(beside)


def our_server(folder: str, levels: list[str], clients: int, port: int) -> list[str]:
    """The command of `mlspec serve`."""
    chain = [word for level in levels for word in ("--level", level)]
    where = ["--port", str(port), "--device", "cpu"]  # as the stream beside it
    return [sys.executable, "-m", "mlspec_cli", "serve", folder, *chain, *where, "--slots", str(clients)]


def their_server(folder: str, port: int, python: str | None = None) -> list[str]:
    """The command of `transformers serve --continuous-batching`. python: of another environment that has it."""
    return [python or sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", folder,
            "--continuous-batching", "--device", "cpu", "--dtype", "float32", "--port", str(port)]


def their_server_with_levels(folder: str, levels: list[str], clients: int, port: int) -> list[str]:
    """The same with this package's streams behind it."""
    stock = their_server(folder, port)
    line = f"import hf_mlspec.serving.stock as chain; chain.enable({levels!r}, slots={clients}); "
    return [*stock[:2], line + stock[2], *stock[3:]]


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait(process: subprocess.Popen, port: int, said: TextIO) -> None:
    for _ in range(600):
        if process.poll() is not None:
            said.seek(0)
            last = "\n".join(said.read().strip().splitlines()[-3:])
            raise RuntimeError(f"the server ended with status {process.returncode}: {last}")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).read()
            return
        time.sleep(0.5)
    raise RuntimeError("the server did not come up in five minutes")
