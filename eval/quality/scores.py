"""How probable are given tokens to a target? Perplexity of a text, and two precisions side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.plans.models import Loaded
from eval.plans.systems import System
from eval.plans.tables import PlanError
from eval.quality.plan import Text
from hf_mlspec.evaluation import Journal, score_rows

MOST_POINTS = 2000  # of a scatter plot: what a person can look at, and a line of JSON can hold


@dataclass(frozen=True)
class Window:
    """Ids a target sees at once; the last `scored` of them count, the others are their context."""

    ids: list[int]
    scored: int


def windows(ids: Sequence[int], begin: int, max_length: int, stride: int) -> Iterator[Window]:
    """Windows of at most `max_length` tokens that begin every `stride` and score what no earlier one did.

    So every token of `ids` is scored once, and after the first window with at least max_length - stride tokens before
    it. `begin`, a token that is not scored, stands before the first one.
    """
    row = [begin, *ids]
    scored = 1
    for start in range(0, len(row), stride):
        end = min(start + max_length, len(row))
        if end > scored:
            yield Window(row[start:end], end - scored)
        scored = max(scored, end)


def text_windows(system: System, loaded: Loaded, asked: Text, text: str) -> list[Window]:
    """The windows of a text; PlanError where the target has too few positions, or no token to begin with."""
    where = f"[[perplexity]] {asked.name!r}"
    if loaded.positions is not None and asked.max_length > loaded.positions:
        raise PlanError(f"{where}: max_length is {asked.max_length}, {system.name!r} has {loaded.positions} positions")
    tokenizer = loaded.tokenizer
    begin = next((id for id in (tokenizer.bos_token_id, tokenizer.eos_token_id) if id is not None), None)
    if begin is None:
        raise PlanError(f"{where}: the tokenizer of {system.name!r} has neither a beginning nor an end token, and the "
                        "first token of a text needs one before it")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return list(windows(ids, begin, asked.max_length, asked.stride))


def scored(loaded: Loaded, rows: Sequence[Window], *, batch_size: int, journal: Journal,
           done: Callable[[], None], keep: Callable[[Any], Any]) -> list[Any]:
    """`keep` of the log-probabilities (float32 `[scored]`) of every row; journal: one item a row, "0", "1" ..."""
    left = [number for number in range(len(rows)) if str(number) not in journal]
    for place, scores in score_rows(
        loaded.model, [rows[number].ids for number in left], num_scored=[rows[number].scored for number in left],
        batch_size=batch_size
    ):
        journal.add(str(left[place]), keep(scores.logprobs))
        done()
    return [journal[str(number)] for number in range(len(rows))]


def perplexity(negative_logs: Sequence[float], tokens: int, text: str) -> dict[str, Any]:
    """Token and word perplexity and bits per byte of a whole text, from the sums of its windows.

    A word is what white space separates, a byte one of the text in UTF-8: both compare models of different
    vocabularies. A perplexity that is no float64 any more is None.
    """
    total = math.fsum(negative_logs)
    words, size = len(text.split()), len(text.encode())
    return {"tokens": tokens, "words": words, "bytes": size, "token_perplexity": _exp(total / tokens),
            "word_perplexity": _exp(total / words), "bits_per_byte": total / math.log(2) / size}


def _exp(power: float) -> float | None:
    return math.exp(power) if power < 709 else None


def agreement(reference: Sequence[float], system: Sequence[float], seed: int) -> dict[str, Any]:
    """Pearson's r of two lists of log-probabilities of the same tokens, as probabilities, and a sample of the pairs.

    pearson_r is None where one of them does not vary. mean_difference: mean absolute difference of the probabilities.
    points: (reference, system), all, or MOST_POINTS drawn without putting back, in the order of the text.
    """
    pairs = np.exp(np.array([reference, system], dtype=np.float64)).T
    varies = len(pairs) > 1 and bool((pairs.std(axis=0) > 0).all())
    chosen = np.sort(np.random.default_rng(seed).permutation(len(pairs))[:MOST_POINTS])
    return {"tokens": len(pairs), "pearson_r": float(np.corrcoef(pairs.T)[0, 1]) if varies else None,
            "mean_difference": float(np.abs(pairs[:, 0] - pairs[:, 1]).mean()),
            "points": [[round(float(one), 6) for one in pair] for pair in pairs[chosen]]}
