"""In which ways is a cell decoded? The target alone, auto, every fixed plan of a small sweep, stock's own schedule."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from eval.bench_auto.plan import RANDOM, Cell, Chain
from eval.bench_auto.shapes import SHAPE, draft_shape, make_draft
from eval.plans.models import Loaded
from eval.plans.places import Places
from eval.records.fields import words
from eval.rows import ends_of, new_ids, padded

ALONE, AUTO, STOCK = "alone", "auto", "stock"


@dataclass(frozen=True)
class Contender:
    """A way to decode. levels: which of the chain's take part; length: tokens each of them drafts, in a fixed plan."""

    name: str
    levels: tuple[int, ...] = ()
    length: int | None = None


@dataclass(frozen=True)
class Level:
    """A level of a chain: its name in tables, what `generate` takes, and its tokenizer where it is another one.

    given: a word, a folder, or a model that was made.
    """

    name: str
    given: str | PreTrainedModel
    tokenizer: Any = None

    @property
    def is_made(self) -> bool:
        """Whether it is a model in memory."""
        return not isinstance(self.given, str)

    @property
    def is_model(self) -> bool:
        """Whether stock's assisted generation can take it."""
        return self.is_made or (Path(self.given) / "config.json").is_file()


class Levels:
    """Chains as `generate` takes them; models of random weights are saved in a folder, once, and shapes made, once.

    seed: of shapes, that of the target.
    """

    def __init__(self, places: Places, target: Loaded, folder: Path, seed: int = 0) -> None:
        self.places, self.target, self.folder, self.seed = places, target, folder, seed
        self._made: dict[str, PreTrainedModel] = {}

    def of(self, chain: Chain) -> list[Level]:
        """From the level below the target down."""
        return [self._level(word) for word in chain.levels]

    def _level(self, word: str) -> Level:
        if word.startswith(SHAPE):
            return self._shape(word)
        given = self.places.fill(word.removeprefix(RANDOM))
        if word.startswith(RANDOM):
            given = random_draft(Path(given), self.folder, self.target.model.dtype)
        model = Path(given.removesuffix("@mxfp4"))
        tokenizer = None
        if (model / "config.json").is_file():
            own = AutoTokenizer.from_pretrained(model)
            tokenizer = None if own.get_vocab() == self.target.tokenizer.get_vocab() else own
        return Level(words([given])[0], given, tokenizer)

    def _shape(self, word: str) -> Level:
        shape = draft_shape(word, "levels")
        name = str(shape)
        if name not in self._made:
            self._made[name] = make_draft(shape, self.target.model, self.seed)
        return Level(name, self._made[name])


def random_draft(source: Path, folder: Path, dtype: torch.dtype) -> str:
    """The folder of a model of the source's shape and tokenizer with random weights, always the same ones."""
    made = folder / f"random-{source.resolve().name}"
    if not made.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).to(dtype).save_pretrained(made)
        AutoTokenizer.from_pretrained(source).save_pretrained(made)
    return str(made)


def contenders(levels: list[Level], lengths: list[int], stock: bool) -> list[Contender]:
    """The target alone, auto, each length for each subset of the levels, and stock if asked for and it can decode."""
    found = [Contender(ALONE), Contender(AUTO, tuple(range(len(levels)))), *fixed(levels, lengths)]
    helper = next((at for at, level in enumerate(levels) if level.is_model), None)
    if stock and helper is not None:
        found.append(Contender(STOCK, (helper,)))
    return found


def fixed(levels: list[Level], lengths: list[int]) -> Iterator[Contender]:
    """Fixed plans, named as the controller names its own."""
    for count in range(1, len(levels) + 1):
        for subset in combinations(range(len(levels)), count):
            for length in lengths:
                name = " + ".join(f"{levels[at].name} {length}" for at in subset)
                yield Contender(name, subset, length)


class Decoder:
    """Decodes the batches of one cell in every contender's way."""

    def __init__(self, target: Loaded, cell: Cell, levels: list[Level]) -> None:
        self.target, self.cell, self.levels = target, cell, levels
        self.ends = ends_of(target.model)
        self._assistant: Any = None

    def take(self, one: Contender, rows: list[list[int]], seed: int, new_tokens: int) -> tuple[float, Any, list]:
        """Seconds of the whole call, its counts (None of stock), the new ids of every row up to its end."""
        options = self._stock(one) if one.name == STOCK else self._ours(one)
        inputs = {name: tensor.to(self.target.model.device) for name, tensor in padded(rows).items()}
        torch.manual_seed(seed)
        begin = time.perf_counter()
        out = self.target.model.generate(**inputs, **options, **self._settings(new_tokens))
        sequences = out.sequences.cpu()  # waits for a GPU
        seconds = time.perf_counter() - begin
        ids = new_ids(sequences, max(map(len, rows)), self.ends)
        return seconds, None if one.name == STOCK else out.speculation, ids

    def _settings(self, new_tokens: int) -> dict[str, Any]:
        settings = {"max_new_tokens": new_tokens, "return_dict_in_generate": True,
                    "pad_token_id": min(self.ends, default=0)}
        if not self.cell.temperature:
            return {**settings, "do_sample": False}
        return {**settings, "do_sample": True, "temperature": self.cell.temperature, "top_k": 0, "top_p": 1.0}

    def _ours(self, one: Contender) -> dict[str, Any]:
        taking_part = [self.levels[at] for at in one.levels]
        options: dict[str, Any] = {"assistant_models": [level.given for level in taking_part]}
        if any(level.tokenizer is not None for level in taking_part):
            options["tokenizer"] = self.target.tokenizer
            options["assistant_tokenizers"] = [level.tokenizer for level in taking_part]
        if one.length is not None:
            options["speculation_config"] = {"num_draft_tokens": one.length}
        return options

    def _stock(self, one: Contender) -> dict[str, Any]:
        """transformers' own assisted generation, whose draft lengths follow its heuristic schedule."""
        level, model = self.levels[one.levels[0]], self.target.model
        if self._assistant is None:
            draft = _again(level.given) if level.is_made else AutoModelForCausalLM.from_pretrained(
                level.given, dtype=model.dtype)
            draft.generation_config.num_assistant_tokens_schedule = "heuristic"
            self._assistant = draft.to(model.device).eval()
        options = {"assistant_model": self._assistant}
        if level.tokenizer is not None:
            options |= {"tokenizer": self.target.tokenizer, "assistant_tokenizer": level.tokenizer}
        return options


def _again(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with a generation config of their own, so that stock's settings are not those of a level."""
    found = copy.copy(model)
    found.generation_config = copy.deepcopy(model.generation_config)
    return found
