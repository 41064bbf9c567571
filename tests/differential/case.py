"""How is one case drawn, and what must hold of it?

A case is a world, an ask, an engine and a chain, as plain values. What the target alone writes by an engine is judged
in float64 (reference.py); what a chain writes by the same engine must be the same ids exactly, where results do not
depend on the number of tokens in a call (the compiled engines, and modules in float64), and else is judged as well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch
from transformers import StoppingCriteriaList

import hf_mlspec
from hf_mlspec import Request, generate_stream
from hf_mlspec.ops import KernelError
from hf_mlspec.speculation.sampling import drawn_seed
from tests.fuzz.harness import foreign

from .asks import draw_ask, ends_at, options_of, padded, prompts_of
from .chains import draw_chain, level_of, tokenizers_of
from .interrupts import Bomb, interrupted
from .reference import judge
from .worlds import draw_world, world_of

ENGINES = (*["cpu"] * 9, "cuda", "modules", "own modules")
FORMS = (*["generate"] * 7, "stream", "stream", "interrupted", "stream interrupted")
A_QUESTION, A_WORLD = 20, 100  # cases with one ask and engine, and with one world


@dataclass
class Outcome:
    """word: "right", "wrong" or "refused", by whom it is. what: of the latter two. ties: proven ones."""

    word: str
    what: str = ""
    tokens: int = 0
    ties: int = 0


class Refused(Exception):
    """A call was refused in our own words, or a model cannot be built."""


def draw(seed: int, number: int) -> dict[str, Any]:
    """Case `number` of a run. The first of a question is the target alone."""
    world = _drawn_world(f"{seed} world {number // A_WORLD}")
    chance = random.Random(f"{seed} ask {number // A_QUESTION}")
    ask, engine = draw_ask(chance, world["shape"]["vocab_size"]), chance.choice(ENGINES)
    chance = random.Random(f"{seed} case {number}")
    chain = draw_chain(chance, dict(world, weights="float64") if engine == "modules" else world, engine)
    if number % A_QUESTION == 0:
        chain["levels"] = []
    form = chance.choice(FORMS)
    case = {"world": world, "ask": ask, "engine": engine, "form": form, **chain}
    if form.startswith("stream"):
        case["stream"] = {"max_batch": chance.randint(1, 4), "prefill_chunk": chance.choice([None, 1, 4, 16]),
                          "prefix_cache": chance.choice([None, None, "1MiB"]), "pauses": chance.random() < 0.3,
                          "cancels": chance.random() < 0.2}  # fmt: skip
    if form.endswith("interrupted"):
        case["bomb"] = chance.randint(0, 5)
    return case


@lru_cache(maxsize=2)
def _drawn_world(seed: str) -> dict[str, Any]:
    """The first one drawn that can be built: not all sizes go together."""
    chance = random.Random(seed)
    while True:
        said = draw_world(chance)
        with suppress(Exception):
            world_of(said)
            return said


def run(case: dict[str, Any]) -> Outcome:
    """What came of a case. Errors that are not refusals come through."""
    try:
        return CaseRun(case).outcome()
    except Refused as error:
        return Outcome("refused", str(error))


class CaseRun:
    def __init__(self, case: dict[str, Any]):
        self.case, self.ask = case, case["ask"]
        self.wide = case["engine"] == "modules"
        try:
            self.world = world_of(case["world"])
        except Exception as error:
            raise Refused(f"no such model: {type(error).__name__}") from error
        self.target = self.world.wide if self.wide else self.world.target
        self.prompts = prompts_of(self.ask, case["world"]["shape"]["vocab_size"])
        self.options = options_of(self.ask, self.world.tokenizer)

    def outcome(self) -> Outcome:
        case = self.case
        alone = self.alone()
        if alone.word != "right" or not case["levels"]:
            return alone
        levels = self.levels()
        streams = case["form"].startswith("stream")
        if case["form"].endswith("interrupted"):
            interrupted(self._stream if streams else self._generate, levels, case["bomb"])
        written = self._stream(levels) if streams else self._generate(levels)
        expected = self._kept("written")
        cut = streams and case["stream"]["cancels"]
        if case["engine"] == "own modules":
            return self.judged(written, cut)
        if cut:
            same = all(own == row[: len(own)] for own, row in zip(written, expected, strict=True))
        else:
            same = written == expected
        said = "" if same else f"written {written}, alone {expected}"
        return Outcome("right" if same else "wrong", said, sum(map(len, written)))

    def levels(self) -> list:
        try:
            return [level_of(self.world, level, self.wide) for level in self.case["levels"]]
        except Exception as error:
            raise Refused(f"no such level: {type(error).__name__}: {error}"[:90]) from error

    def _key(self) -> str:
        stream = "stream" if self.case["form"].startswith("stream") else "generate"
        return json.dumps([stream, self.ask, self.case["engine"]])

    def _kept(self, what: str) -> Any:
        return self.world.kept[self._key()][what]

    def alone(self) -> Outcome:
        """What the target alone writes, judged once."""
        if self._key() not in self.world.kept:
            stream = self.case["form"].startswith("stream")
            plain = {"max_batch": 1, "prefill_chunk": None, "prefix_cache": None, "pauses": False, "cancels": False}
            written = self._stream([], plain) if stream else self._generate([])
            self.world.kept[self._key()] = {"written": written, "outcome": self.judged(written)}
        return self._kept("outcome")

    def judged(self, written: list[list[int]], cut: bool = False) -> Outcome:
        """Rows against float64. cut: they may end anywhere."""
        streams, sampled = self.case["form"].startswith("stream"), "sample" in self.ask
        width, tokens, ties = max(map(len, self.prompts)), 0, 0
        one = drawn_seed(torch.Generator().manual_seed(self.ask["sample"])) if sampled else None
        for number, (prompt, new) in enumerate(zip(self.prompts, written, strict=True)):
            shown = prompt if streams else [0] * (width - len(prompt)) + prompt
            seed = self.ask["sample"] + number if sampled and streams else one
            verdict = judge(self.world, self.ask, prompt, new, seed=seed, stream=0 if streams else number,
                            shown=shown, exact=self.wide, cut=cut)  # fmt: skip
            if verdict.wrong:
                return Outcome("wrong", f"row {number}: {verdict.wrong}; wrote {new}", tokens)
            tokens, ties = tokens + verdict.tokens, ties + verdict.ties
        return Outcome("right", "", tokens, ties)

    def _words(self, levels: list) -> dict[str, Any]:
        engine = self.case["engine"]
        config = dict(self.case["config"], engine="modules" if engine == "own modules" else engine)
        if not levels:
            config = {"engine": config["engine"]}
        words = {"assistant_models": levels, "speculation_config": config}
        if "stop" in self.ask:
            words["tokenizer"] = self.world.tokenizer
        return words | (tokenizers_of(self.world, self.case["levels"]) if levels else {})

    def _generate(self, levels: list, bomb: Bomb | None = None) -> list[list[int]]:
        if "sample" in self.ask:
            torch.manual_seed(self.ask["sample"])
        batch = padded(self.prompts)
        width = batch["input_ids"].shape[1]
        more = {} if bomb is None else {"stopping_criteria": StoppingCriteriaList([bomb])}
        with _our_refusals():
            out = self.target.generate(**batch, **self.options, **self._words(levels), **more)
        if not torch.equal(out[:, :width], batch["input_ids"]):
            return [["the prompts changed"]]
        return [self._cut(row, shown) for row, shown in zip(out[:, width:].tolist(), batch["input_ids"].tolist(),
                                                            strict=True)]  # fmt: skip

    def _cut(self, row: list[int], shown: list[int]) -> list[int]:
        """New tokens without the filling; filling that is none stays, and is wrong."""
        end = ends_at(self.ask, self.world.tokenizer, shown, row)
        return row[:end] if not any(row[end:]) else row

    def _stream(self, levels: list, how: dict[str, Any] | None = None, bomb: Bomb | None = None) -> list[list[int]]:
        how = how or self.case["stream"]
        seeds = [self.ask["sample"] + r if "sample" in self.ask else None for r in range(len(self.prompts))]
        requests = [Request(row, id=r, seed=seed, **self.options)
                    for r, (row, seed) in enumerate(zip(self.prompts, seeds, strict=True))]  # fmt: skip

        def coming():
            for request in requests:
                if how["pauses"]:
                    yield None
                yield request

        words = self._words(levels)
        own = {word: how[word] for word in ("max_batch", "prefill_chunk", "prefix_cache")}
        written: list[list[int]] = [[] for _ in requests]
        with _our_refusals(), closing(generate_stream(self.target, coming(), events=True, **own, **words)) as made:
            for count, event in enumerate(made):
                if bomb is not None and bomb.goes_off():
                    break
                if how["cancels"] and count == 1:
                    requests[-1].cancel()
                if isinstance(event, hf_mlspec.Completion):
                    if event.error is not None:
                        raise event.error
                    written[event.id] = event.new_tokens
        return written


@contextmanager
def _our_refusals() -> Iterator[None]:
    """Inside, a ValueError, TypeError or KernelError that this project raised is a refusal."""
    try:
        yield
    except (ValueError, TypeError, KernelError) as error:
        _refuse(error)


def _refuse(error: Exception) -> NoReturn:
    if foreign(error, (ValueError, TypeError, KernelError)):
        raise error
    raise Refused(str(error)[:90]) from error

