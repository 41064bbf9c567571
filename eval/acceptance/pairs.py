"""Does one draft agree with a target as often as another? Token by token, on the target's own greedy text.

Both drafts are scored on the very same tokens, so what prompts have in common cancels. The compiled decoder gives each
draft's own choice at every new token, every token before it being the target's (teacher-forced): the acceptance of a
chain without what draft lengths and the places of rejections do to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import TaskID
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mlspec
from eval.plans import fidelity
from eval.plans.identity import arithmetic, digest, fingerprint
from eval.plans.models import Models, check_levels
from eval.plans.places import Places
from eval.plans.systems import Prompts, System, check_systems
from eval.plans.tables import PlanError
from eval.records.progress import Bars
from eval.records.writer import OTHER_RESULTS
from hf_mlspec.evaluation import Journal, score_rows

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 0
CAST = "mxfp4"


@dataclass(frozen=True)
class Pair:
    """Two drafts of one target: `draft` is to agree with it as often as `against`, but for `margin` at the bound.

    draft, against: "mxfp4", the target's direct cast with its head; or how a nested target is called: "nested4",
    "nested4a8", with the codebook that it is nested with.
    """

    name: str
    model: str
    draft: str
    against: str = CAST
    codebook: str = "lloyd_max"
    dtype: str = "bfloat16"
    margin: float = 0.003


@dataclass(frozen=True)
class PairUnit:
    """A pair on one data set. material: fingerprints of weights and prompts."""

    pair: Pair
    data: Prompts
    prompts: list[str]
    batch_size: int
    max_new_tokens: int
    material: dict[str, Any]

    @property
    def writer(self) -> System:
        """Who writes the text: the target, exactly, behind a draft that only makes it faster."""
        return System(self.pair.name, self.pair.model, self.pair.dtype, levels=[CAST])

    @property
    def of_text(self) -> dict[str, Any]:
        """What the target's text depends on."""
        return {"model": self.pair.model, "dtype": self.pair.dtype, "data": self.data.name, "file": self.data.file,
                "count": self.data.count, "max_new_tokens": self.max_new_tokens, **self.material}

    def of_draft(self, word: str) -> dict[str, Any]:
        """What a draft's choices on it depend on."""
        return {**self.of_text, "draft": word, **({} if word == CAST else {"codebook": self.pair.codebook})}

    @property
    def identity(self) -> dict[str, Any]:
        """What the result depends on."""
        return {**self.of_text, **asdict(self.pair), "resamples": RESAMPLES, "seed": SEED}


def pair_units(pairs: list[Pair], data: list[tuple[Prompts, list[str], int]], max_new_tokens: int, places: Places,
               path: Path) -> list[PairUnit]:
    """Every pair on every data set (its prompts and batch size beside it), those of one target behind each other.

    PlanError for a folder that is not there, a word that is no draft, and a margin that is none.
    """
    check_systems([System(pair.name, pair.model, pair.dtype) for pair in pairs], places, path)
    for pair in pairs:
        _check(pair, f"{path}: [[pairs]] {pair.name!r}")
    hashes = {one.name: digest(prompts) for one, prompts, _ in data}
    found = []
    for pair in sorted(pairs, key=lambda pair: [other.model for other in pairs].index(pair.model)):
        weights = fingerprint(Path(places.fill(pair.model)))
        found += [PairUnit(pair, one, prompts, size, max_new_tokens, {"weights": weights, "prompts": hashes[one.name]})
                  for one, prompts, size in data]
    return found


def _check(pair: Pair, where: str) -> None:
    for key in ("draft", "against"):
        word = getattr(pair, key)
        if word != CAST and not word.startswith("nested4"):
            raise PlanError(f'{where}: {key} is {word!r}, choose "mxfp4", "nested4" or "nested4a8"')
    if pair.draft == pair.against:
        raise PlanError(f"{where}: draft and against are both {pair.draft!r}: nothing is compared")
    if not 0 <= pair.margin < 1:
        raise PlanError(f"{where}: margin is {pair.margin}, give a share of the tokens: 0 or more and below 1")


def compare_drafts(todo: list[PairUnit], places: Places, *, device: str, folder: Path,
                   progress: Bars) -> Iterator[tuple[PairUnit, dict[str, Any]]]:
    """The result of every unit in turn; finished prompts are kept under `folder` and not computed again.

    PlanError, before anything is computed, for prompts that a target has no positions for.
    """
    run = _Pairs(places, device, folder)
    for unit in todo:
        run.check(unit)
    for unit in todo:
        bar = progress.add_task(f"{unit.pair.name} on {unit.data.name}", total=3 * unit.data.count)
        yield unit, run.result(unit, progress, bar)


class _Pairs:
    """The models under way; every text and every draft of it has its journal."""

    def __init__(self, places: Places, device: str, folder: Path) -> None:
        self.places, self.device, self.folder = places, device, folder
        self.models = Models(places, device)
        self._key: tuple[str, ...] | None = None
        self._draft: PreTrainedModel | None = None

    def check(self, unit: PairUnit) -> None:
        loaded = self.models.load(unit.writer)
        check_levels(unit.writer, loaded)
        fidelity.check_lengths(unit.writer, loaded, unit.prompts, unit.max_new_tokens, unit.data.name)

    def result(self, unit: PairUnit, progress: Bars, bar: TaskID) -> dict[str, Any]:
        texts = self._texts(unit, progress, bar)
        draft, against = (self._agreements(unit, word, texts, progress, bar)
                          for word in (unit.pair.draft, unit.pair.against))
        return {"target": Path(unit.pair.model).name, "draft": unit.pair.draft, "against": unit.pair.against,
                "codebook": unit.pair.codebook, "margin": unit.pair.margin, **compared(draft, against),
                "max_new_tokens": unit.max_new_tokens}

    def _texts(self, unit: PairUnit, progress: Bars, bar: TaskID) -> list[tuple[list[int], list[int]]]:
        """(ids of the prompt, new ids) of every prompt."""
        loaded = self.models.load(unit.writer)
        with self._journal("text", unit.of_text) as journal:
            progress.update(bar, completed=len(journal))
            fidelity.decode(unit.writer, loaded, unit.prompts, max_new_tokens=unit.max_new_tokens,
                            batch_size=unit.batch_size, journal=journal, done=lambda: progress.advance(bar))
            return [(loaded.encode(prompt), journal[str(number)]["ids"]) for number, prompt in
                    enumerate(unit.prompts)]

    def _agreements(self, unit: PairUnit, word: str, texts: Sequence[tuple[list[int], list[int]]],
                    progress: Bars, bar: TaskID) -> list[list[int]]:
        """Per prompt 1 for every new token that the draft would have chosen, 0 for the others."""
        with self._journal(word, unit.of_draft(word)) as journal:
            progress.advance(bar, len(journal))
            left = [number for number in range(len(texts)) if str(number) not in journal]
            if left:
                rows = [[*texts[number][0], *texts[number][1]] for number in left]
                for place, scores in score_rows(
                    self._model(unit, word), rows, num_scored=[len(texts[number][1]) for number in left],
                    precision=None if word == CAST else word, batch_size=unit.batch_size
                ):
                    journal.add(str(left[place]), scores.greedy.to(torch.int64).tolist())
                    progress.advance(bar)
            return [journal[str(number)] for number in range(len(texts))]

    def _model(self, unit: PairUnit, word: str) -> PreTrainedModel:
        """The draft; the last one stays, as its other data sets and its other activation bits come next."""
        pair = unit.pair
        key = (pair.model, pair.dtype, CAST if word == CAST else pair.codebook)
        if key != self._key:
            self._key = self._draft = None
            folder, dtype = self.places.fill(pair.model), getattr(torch, pair.dtype)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            model = model.to(self.device).eval()
            if word == CAST:
                self._draft = hf_mlspec.direct_cast(model, CAST, cast_head=True)
            else:
                hf_mlspec.nest(model, codebook=pair.codebook)
                self._draft = model
            self._key = key
        return self._draft

    def _journal(self, what: str, asked: dict[str, Any]) -> Journal:
        """Named by what it holds, so that pairs of one target share its text and the draft both compare with."""
        asked = {**asked, "arithmetic": arithmetic(self.device)}
        name = f"{what}-{Path(asked['model']).name}-{asked['data']}-{digest(asked)}".lower()
        return Journal(self.folder / f"{name}.jsonl", asked, elsewhere=OTHER_RESULTS)


def compared(draft: Sequence[Sequence[int]], against: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Shares of all tokens that each draft agrees on, their difference, and its lower bound over prompts.

    lower_bound: one-sided, by a percentile bootstrap that draws whole prompts, each with both of its counts; so
    prompts on which both fail alike do not widen it.
    """
    if any(len(one) != len(other) for one, other in zip(draft, against, strict=True)) or not any(map(len, draft)):
        raise ValueError("both drafts need a verdict for every token of every prompt, and a token at least")
    tokens, mine, its = (np.array([count(row) for row in rows], dtype=np.int64) for count, rows in (
        (len, draft), (sum, draft), (sum, against)))
    drawn = np.random.default_rng(SEED).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    differences = (mine - its)[drawn].sum(1) / np.maximum(tokens[drawn].sum(1), 1)
    return {"prompts": len(tokens), "tokens": int(tokens.sum()), "acceptance": float(mine.sum() / tokens.sum()),
            "acceptance_against": float(its.sum() / tokens.sum()),
            "difference": float((mine - its).sum() / tokens.sum()),
            "lower_bound": float(np.quantile(differences, 1 - CONFIDENCE)), "confidence": CONFIDENCE}
