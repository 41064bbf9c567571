"""What do clients of a server see that ask for one answer after another? Tokens a second, and waits for the first."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

Work = list[tuple[str, int]]  # prompt and limit of every request


@dataclass
class Seen:
    """What one run of clients saw. tokens: of each request, in the order of the work; first: seconds to the first.
    cpu_seconds: of the process that decodes, in all its threads: what a load beside it changes least; beside_seconds:
    of the processes that it started."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    beside_seconds: float = field(default=0.0, kw_only=True)
    tokens: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Tokens a second over all, and the median and 99th percentile of the waits, in milliseconds."""
        ranked = sorted(self.first)
        return {"tokens": sum(self.tokens), "seconds": self.seconds, "cpu_seconds": self.cpu_seconds,
                "beside_seconds": self.beside_seconds,
                "tokens_per_s": sum(self.tokens) / self.seconds,
                "first_p50_ms": 1e3 * statistics.median(ranked),
                "first_p99_ms": 1e3 * ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]}


def ask_all(port: int, model: str, work: Work, clients: int) -> Seen:
    """So many clients share the work: each takes the next request when its last one is answered."""
    return asyncio.run(_all(port, model, work, clients))


async def _all(port: int, model: str, work: Work, clients: int) -> Seen:
    seen = Seen(0.0, 0.0, [0] * len(work), [0.0] * len(work), [""] * len(work))
    left = iter(range(len(work)))

    async def client() -> None:
        for number in left:
            await one_answer(port, model, *work[number], seen, number)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seen.seconds = time.perf_counter() - begin
    return seen


async def one_answer(port: int, model: str, prompt: str, limit: int, seen: Seen, number: int) -> None:
    """Ask for one answer, and write down what came, under its number."""
    body = {"model": model, "prompt": prompt, "max_tokens": limit, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    begin, texts = time.perf_counter(), []
    async for event in _events(port, body):
        if "error" in event:
            raise RuntimeError(f"the server says: {event['error']}")
        if event.get("usage"):
            seen.tokens[number] = event["usage"]["completion_tokens"]
        text = "".join(choice.get("text") or "" for choice in event["choices"])
        if text and not texts:
            seen.first[number] = time.perf_counter() - begin
        texts.append(text)
    seen.texts[number] = "".join(texts)
    if not seen.first[number]:  # an answer without text
        seen.first[number] = time.perf_counter() - begin


async def _events(port: int, body: dict[str, Any]) -> Any:
    """Server-sent events, read without a client library: its time would be the server's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    content = json.dumps(body).encode()
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                 f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    status = await reader.readline()
    try:
        if status.split()[1] != b"200":
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read()).decode()[-300:]}")
        while line := await reader.readline():
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield json.loads(line.removeprefix(b"data: "))
    finally:
        writer.close()
