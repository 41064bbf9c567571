"""Is every answer right, is none lost, and does memory stay flat, while clients ask a server for minutes?"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .clients import Seen, Work, one_answer

_EVERY = 1.0  # seconds between two looks at the memory


@dataclass
class Soaked:
    """asked, answered, wrong: requests; memory: bytes that the server's processes hold, (seconds, bytes) each; waits:
    seconds to the first token of every answer. until: seconds when the first client asked no more: behind it rows
    leave, and give memory back."""

    seconds: float = 0.0
    until: float = math.inf
    asked: int = 0
    answered: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    waits: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """What is told of it; memory_moves: the largest distance from the median behind the first fifth, over that,
        while all clients ask."""
        late = sorted(held for at, held in self.memory if self.seconds / 5 < at < self.until) or [self.memory[-1][1]]
        step = max(len(self.memory) // 20, 1)
        middle, ranked = late[len(late) // 2], sorted(self.waits)
        return {"seconds": self.seconds, "asked": self.asked, "answered": self.answered, "wrong": self.wrong,
                "failed": len(self.failed), "errors": self.failed[:3], "tokens": self.tokens,
                "tokens_per_s": self.tokens / self.seconds,
                "first_p50_ms": 1e3 * ranked[len(ranked) // 2], "first_p99_ms": 1e3 * ranked[int(0.99 * len(ranked))],
                "memory_mib": middle / 2**20, "memory_moves": max(late[-1] - middle, middle - late[0]) / middle,
                "memory_at_mib": {round(at): held >> 20 for at, held in self.memory[::step]}}


def answers_alone(folder: str, work: Work, threads: int) -> list[str]:
    """What generate writes for each request alone, in this process."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for prompt, limit in work:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
                             assistant_models=[])
        found.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def soak(pid: int, port: int, model: str, work: Work, expected: list[str], clients: int, seconds: float) -> Soaked:
    """So many clients ask for answers of the work at random until the time is over, or SIGTERM ends it before."""
    found, over = Soaked(), threading.Event()

    def look() -> None:
        begin, first = time.perf_counter(), psutil.Process(pid)
        processes = [first, *first.children(recursive=True)]
        while True:
            held = sum(one.memory_info().rss for one in processes)
            found.memory.append((time.perf_counter() - begin, held))
            if over.wait(_EVERY):
                return

    watch = threading.Thread(target=look)
    watch.start()
    try:
        asyncio.run(_all(port, model, work, expected, clients, seconds, found))
    finally:
        over.set()
        watch.join()
    return found


async def _all(port: int, model: str, work: Work, expected: list[str], clients: int, seconds: float,
               found: Soaked) -> None:
    begin, over = time.perf_counter(), asyncio.Event()
    with contextlib.suppress(ValueError, RuntimeError):  # only the main thread hears of signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)

    async def client(number: int) -> None:
        rng = random.Random(number)
        while time.perf_counter() - begin < seconds and not over.is_set():
            at = rng.randrange(len(work))
            seen = Seen(0.0, 0.0, [0], [0.0], [""])
            found.asked += 1
            try:
                await one_answer(port, model, *work[at], seen, 0)
            except Exception as error:  # whatever happens to one answer is told
                found.failed.append(repr(error))
                continue
            found.answered += 1
            found.wrong += seen.texts[0] != expected[at]
            found.tokens += seen.tokens[0]
            found.waits.append(seen.first[0])
        found.until = min(found.until, time.perf_counter() - begin)

    await asyncio.gather(*(client(number) for number in range(clients)))
    found.seconds = time.perf_counter() - begin
