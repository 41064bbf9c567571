"""Phases of calls, streams and changes in threads, and what is left in the process behind each."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_mlspec

from .asked import PAD, Ask, Asked, everything

COUNTED = ("calls", "requests", "tokens", "cancelled", "changes")
_PAUSE = 0.02  # seconds between two changes
_NESTS = 4  # phases until one of the models is nested, and then plain again


class Phase:
    """What came of one, counted by all of its threads."""

    def __init__(self) -> None:
        self.lock, self.counts, self.wrong = threading.Lock(), Counter(), []

    def add(self, counts: dict[str, int], wrong: str = "") -> None:
        with self.lock:
            self.counts.update(counts)
            self.wrong += [wrong] if wrong else []


def traffic(seconds: float, threads: int, calls: int, seed: int, device: str,
            over: threading.Event) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A line for each phase until the time is over. seconds: of the line, since the first phase began."""
    chance, models = random.Random(seed), everything(seed, device)
    begin, number, nested = time.monotonic(), 0, None
    while time.monotonic() - begin < seconds and not over.is_set():
        phase, ended = Phase(), threading.Event()
        asking = [threading.Thread(target=_ask, args=(phase, models, calls, random.Random(chance.random()), over))
                  for _ in range(threads)]  # fmt: skip
        changing = threading.Thread(target=_change, args=(phase, models, ended, random.Random(chance.random())))
        for thread in (changing, *asking):
            thread.start()
        for thread in asking:
            thread.join()
        ended.set()
        changing.join()
        for asked in models:  # what is counted is then alike from phase to phase
            hf_mlspec.restore(asked.model)
            hf_mlspec.clear(asked.model)
        yield {"seconds": round(time.monotonic() - begin, 1), **{name: phase.counts[name] for name in COUNTED},
               "wrong": phase.wrong, "nested": sum(asked.nested for asked in models), "sizes": sizes(),
               "processor_seconds": round(time.process_time(), 1), "load": os.getloadavg()[0]}  # fmt: skip
        number += 1
        if number % _NESTS == 0:
            nested = chance.choice(models) if nested is None else nested
            _turn(nested)
            nested = nested if nested.nested else None


def _turn(asked: Asked) -> None:
    """Nest a model, or make it plain again; nobody reads it meanwhile."""
    (hf_mlspec.unnest if asked.nested else hf_mlspec.nest)(asked.model)
    asked.nested = not asked.nested


def _ask(phase: Phase, models: list[Asked], calls: int, chance: random.Random, over: threading.Event) -> None:
    for _ in range(calls):
        if over.is_set():
            return
        asked = chance.choice(models)
        engine, levels = chance.choice(asked.engines), _levels(asked, chance)
        how: dict[str, Any] = {"assistant_models": levels, "speculation_config": {
            "engine": engine, "num_draft_tokens": chance.choice([None, 1, 3, 5])}}  # fmt: skip
        try:
            counts, wrong = (_stream if chance.random() < 0.4 else _call)(asked, engine, how, chance)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            counts, wrong = {}, f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}"
        if wrong:
            words = [level if isinstance(level, str) else "draft" for level in levels]
            wrong = f"{asked.name} on {engine} with {words}, {how['speculation_config']}: {wrong}"
        phase.add({"calls": 1, **counts}, wrong)


def _levels(asked: Asked, chance: random.Random) -> list[Any]:
    found: list[Any] = []
    if chance.random() < 0.8:
        found.append(chance.choice([*asked.words[asked.nested], asked.draft]))
    if chance.random() < 0.4:
        found.append(chance.choice(["prompt_lookup", "ngram"]))
    return found


def _call(asked: Asked, engine: str, how: dict[str, Any], chance: random.Random) -> tuple[dict[str, int], str]:
    """One call of generate, of one row or of a few with the same limit."""
    first = chance.choice(asked.greedy)
    others = [ask for ask in asked.greedy if ask.new == first.new and ask is not first]
    asks = [first, *others][: chance.choice([1, 3])]
    width = max(len(ask.prompt) for ask in asks)
    ids = torch.tensor([[PAD] * (width - len(ask.prompt)) + [*ask.prompt] for ask in asks], device=asked.model.device)
    mask = torch.tensor([[0] * (width - len(ask.prompt)) + [1] * len(ask.prompt) for ask in asks])
    out = asked.model.generate(ids, attention_mask=mask.to(ids.device), **first.options, **how)
    written, right = out[:, width:].tolist(), [asked.right[engine, ask] for ask in asks]
    counts = {"requests": len(asks), "tokens": sum(map(len, written))}
    return counts, "" if written == right else f"{written} instead of {right}"


def _stream(asked: Asked, engine: str, how: dict[str, Any], chance: random.Random) -> tuple[dict[str, int], str]:
    """A stream whose requests come one by one; some are cancelled."""
    asks = [chance.choice(asked.asks) for _ in range(chance.randint(2, 6))]
    requests = [hf_mlspec.Request(list(ask.prompt), id=number, seed=ask.seed, **ask.options)
                for number, ask in enumerate(asks)]  # fmt: skip
    leaving = chance.choice(requests) if chance.random() < 0.3 else None

    def source() -> Iterator[Any]:
        for request in requests:
            yield request
            if chance.random() < 0.4:
                yield None
        if leaving is not None:
            leaving.cancel()

    options = {"max_batch": chance.choice([1, 2, 4]), "prefill_chunk": chance.choice([16, 64, None]),
               "prefix_cache": chance.choice([None, 40_000])}  # fmt: skip
    done = {one.id: one for one in hf_mlspec.generate_stream(asked.model, source(), **options, **how)}
    counts = {"requests": len(done), "tokens": sum(len(one.new_tokens) for one in done.values()),
              "cancelled": sum(one.finish_reason == "cancelled" for one in done.values())}  # fmt: skip
    if len(done) < len(asks):
        return counts, f"{len(asks) - len(done)} requests of a stream are lost"
    return counts, "; ".join(filter(None, (_differs(done[number], asked.right[engine, ask], ask)
                                           for number, ask in enumerate(asks))))  # fmt: skip


def _differs(done: hf_mlspec.Completion, right: list[int], ask: Ask) -> str:
    if done.error is not None:
        return f"{type(done.error).__name__}: {done.error}"
    new = done.new_tokens
    expected = right[: len(new)] if done.finish_reason == "cancelled" else right
    return "" if new == expected else f"{done.finish_reason}, seed {ask.seed}: {new} instead of {right}"


def _change(phase: Phase, models: list[Asked], ended: threading.Event, chance: random.Random) -> None:
    """Prepare, restore and clear models, and make levels of them, while others ask."""
    while not ended.wait(_PAUSE):
        asked, what = chance.choice(models), chance.choice(["prepare", "restore", "clear", "exit", "cast"])
        try:
            if what == "prepare":
                hf_mlspec.prepare(asked.model, chance.choice([None, *asked.engines]))
            elif what in ("restore", "clear"):
                getattr(hf_mlspec, what)(asked.model)
            elif what == "exit":
                hf_mlspec.early_exit(asked.model, 1)
            else:
                hf_mlspec.direct_cast(asked.model)
        except Exception as error:
            phase.add({}, f"{what} of {asked.name}: {type(error).__name__}: {error}")
        phase.add({"changes": 1})


def sizes() -> dict[str, int]:
    """What this process holds. memory: bytes that are resident; allocated: what malloc gave of them and nobody gave
    back; anonymous: resident and of no file, once malloc gave back to the system what it can. chains, programs,
    graphs: of captured rounds, whoever holds them. A joined thread may be there for a moment: the fewest of some
    looks."""
    gc.collect()
    tasks = []
    for _ in range(20):
        tasks.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.005)
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    held = gc.get_objects()
    kinds = Counter(type(one).__name__ for one in held)
    found = {"memory": pages * os.sysconf("SC_PAGE_SIZE"), "allocated": _allocated(),
             "anonymous": _anonymous(), "threads": min(tasks),
             "files": len(os.listdir("/proc/self/fd")), "objects": len(held),
             "tensors": sum(issubclass(type(one), torch.Tensor) for one in held),
             "modules": sum(issubclass(type(one), nn.Module) for one in held),
             "chains": kinds["CapturedChain"], "programs": kinds["RoundProgram"], "graphs": kinds["Recording"]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["device"] = torch.cuda.memory_allocated()
    return found


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def _allocated() -> int:
    """Bytes in use by malloc's word; 0 where it cannot tell."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not glibc, or one before 2.33
        return 0
    ask.restype = _Mallinfo
    said = ask()
    return said.uordblks + said.hblkhd


def _anonymous() -> int:
    """Threads leave free memory behind in heaps of their own, which the next ones may find or not; how much of a file
    is resident is the system's choice. Neither is growth."""
    with suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)
