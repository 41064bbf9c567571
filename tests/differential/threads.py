"""Do eight threads that generate on one model get right ids while it is prepared and cleared, and changed in between?

Phases: in each, every thread makes some calls with levels of its own choice, and the ninth prepares, restores and
clears the model and makes levels of it. Between two phases, when no call runs, weights change: nested, unnested,
edited. Memory, threads and file handles are looked at behind every phase.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from models import near

import hf_mlspec
from hf_mlspec import Request, generate_stream

from .asks import options_of, prompts_of
from .twins import ASKS, EDITS, SHAPE, Weights, answer, call, edit, plain

GREEDY = [number for number, ask in enumerate(ASKS) if "sample" not in ask]
_KINDS = (0, 1, 2)


@dataclass
class Traffic:
    """What ran. wrong: what must not be. sizes: of every phase, threads, file handles and bytes in memory."""

    calls: int = 0
    changes: int = 0
    wrong: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int, int]] = field(default_factory=list)


def traffic(seconds: float, *, threads: int = 8, seed: int = 0, calls: int = 6) -> Traffic:
    """Phases until the time is over, at least three. calls: of every thread in a phase."""
    chance, found, end, lock = random.Random(seed), Traffic(), time.monotonic() + seconds, threading.Lock()
    while time.monotonic() < end or len(found.sizes) < 3:
        if len(found.sizes) % 6 == 0:  # another model, which must not be held by the last one's threads
            weights = Weights(chance.choice(_KINDS))
            model, other = plain(weights.kind), near(plain(weights.kind), 0.05)
        weights = _between(chance, model, weights)
        over, seeds = threading.Event(), [chance.random() for _ in range(threads + 1)]
        expected = {(ask, engine): answer(weights, ask, engine) for ask in GREEDY for engine in ("cpu", "cuda")}
        working = [threading.Thread(target=_work, args=(found, lock, model, other, expected, random.Random(s), calls,
                                                        weights.form)) for s in seeds[1:]]  # fmt: skip
        changing = threading.Thread(target=_change, args=(found, lock, model, over, random.Random(seeds[0])))
        for thread in (changing, *working):
            thread.start()
        for thread in working:
            thread.join()
        over.set()
        changing.join()
        found.sizes.append(_sizes())
        if found.wrong:
            break
    return found


def _between(chance: random.Random, model: Any, weights: Weights) -> Weights:
    """Change the weights while nobody reads them."""
    if weights.form:
        hf_mlspec.unnest(model)
        return weights._replace(form=())
    if chance.random() < 0.5:
        hf_mlspec.nest(model)
        return weights._replace(form=("nested", "lloyd_max"))
    if len(weights.edits) < 2:
        number = chance.randrange(EDITS)
        edit(model, number)
        return weights._replace(edits=(*weights.edits, number))
    return weights


def _work(found: Traffic, lock: threading.Lock, model: Any, other: Any, expected: dict, chance: random.Random,
          calls: int, form: tuple) -> None:  # fmt: skip
    for _ in range(calls):
        ask, engine = chance.choice(GREEDY), chance.choice(["cpu", "cpu", "cuda"])
        words = ["nested", "nested4a8"] if form else ["mxfp4", "int3"]
        levels = [chance.choice([*words, other, "early_exit:1"])] if chance.random() < 0.8 else []
        levels += [chance.choice(["prompt_lookup", "ngram"])] if chance.random() < 0.5 else []
        config = {"engine": engine, "num_draft_tokens": chance.choice([1, 3, 5])}
        how = {"assistant_models": levels, "speculation_config": config}
        try:
            written = _streamed(model, ask, how) if chance.random() < 0.3 else call(model, ask, **how)
            wrong = "" if written == expected[ask, engine] else f"ask {ask} on {engine} with {levels}: {written}"
        except Exception as error:
            wrong = f"ask {ask} on {engine} with {levels}: {type(error).__name__}: {error}"
        with lock:
            found.calls += 1
            found.wrong += [wrong] if wrong else []


def _streamed(model: Any, ask: int, how: dict[str, Any]) -> list[list[int]]:
    """As `call`, by a stream."""
    rows = prompts_of(ASKS[ask], SHAPE["vocab_size"])
    requests = [Request(row, id=number, **options_of(ASKS[ask], None)) for number, row in enumerate(rows)]
    done = {one.id: one for one in generate_stream(model, requests, max_batch=2, **how)}
    for one in done.values():
        if one.error is not None:
            raise one.error
    new = [done[number].new_tokens for number in range(len(rows))]
    return [row + [0] * (max(map(len, new)) - len(row)) for row in new]


def _change(found: Traffic, lock: threading.Lock, model: Any, over: threading.Event, chance: random.Random) -> None:
    while not over.wait(0.003):
        try:
            what = chance.choice(["prepare", "restore", "clear", "exit", "cast"])
            if what == "prepare":
                hf_mlspec.prepare(model, chance.choice([None, "cpu", "cuda"]))
            elif what in ("restore", "clear"):
                {"restore": hf_mlspec.restore, "clear": hf_mlspec.clear}[what](model)
            else:
                hf_mlspec.early_exit(model, 1) if what == "exit" else hf_mlspec.direct_cast(model)
        except Exception as error:
            with lock:
                found.wrong.append(f"{what}: {type(error).__name__}: {error}")
        with lock:
            found.changes += 1


def _sizes() -> tuple[int, int, int]:
    """Threads of this process, its open files, and its bytes in memory. A thread that was joined may be there for a
    moment: the fewest of some looks count."""
    gc.collect()
    tasks = []
    for _ in range(20):
        tasks.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    return min(tasks), len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")
