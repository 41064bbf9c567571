"""What does a request of the harness ask of generate, by which key is it known, and which requests are finished?"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import StoppingCriteria

from .certificate_identity import hash_json
from .journal import Journal

logger = logging.getLogger(__name__)
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_KNOWN_TO_HARNESS = ("until", "seed", "do_sample", *_LENGTHS)


@dataclass(frozen=True)
class Generation:
    """How one continuation is written.

    until: the text ends before the first of these. max_new_tokens: at most so many. seed: None where nothing is drawn,
    or none was given. options: arguments of generate, do_sample among them.
    """

    until: list[str]
    max_new_tokens: int
    options: dict[str, Any]
    seed: int | None = None

    @property
    def do_sample(self) -> bool:
        return self.options["do_sample"]

    @classmethod
    def of(cls, gen_kwargs: dict[str, Any], max_new_tokens: int) -> Generation:
        """Read a task's generation_kwargs; `max_new_tokens` where they are silent. ValueError for what cannot be.

        Without do_sample, a temperature above 0 samples; a temperature of 0 is greedy whatever do_sample says.
        """
        if not isinstance(gen_kwargs, dict):
            raise ValueError(f"generation_kwargs is {gen_kwargs!r}, it must be a mapping such as {{'until': ['\\n']}}")
        temperature = gen_kwargs.get("temperature")
        if temperature is not None and (isinstance(temperature, bool) or not isinstance(temperature, (int, float))):
            raise ValueError(f"generation_kwargs: temperature is {temperature!r}, it must be a number of 0 or more")
        do_sample = gen_kwargs.get("do_sample")
        do_sample = bool(temperature) if do_sample is None else bool(do_sample) and temperature != 0
        dropped = _KNOWN_TO_HARNESS if do_sample else (*_KNOWN_TO_HARNESS, *_OF_SAMPLING)
        options = {name: value for name, value in gen_kwargs.items() if name not in dropped}
        if "max_length" in options:
            raise ValueError("generation_kwargs: max_length counts the prompt, too: say max_gen_toks")
        given = next((gen_kwargs[name] for name in _LENGTHS if gen_kwargs.get(name) is not None), max_new_tokens)
        if isinstance(given, bool) or not isinstance(given, (int, float)) or given != int(given) or given < 1:
            raise ValueError(f"generation_kwargs: max_gen_toks is {given!r}, it must be a positive integer")
        options["do_sample"] = do_sample
        return cls(_stops(gen_kwargs.get("until")), int(given), options, gen_kwargs.get("seed"))


def _stops(until: Any) -> list[str]:
    stops = [until] if isinstance(until, str) else until if until is not None else []
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"generation_kwargs: until is {until!r}, it must be a string or a list of strings")
    return [stop for stop in stops if stop]


class TextBefore(StoppingCriteria):
    """Ends a row when its new text holds one of the stops.

    Unlike transformers' stop strings it does not see the prompt: after a prompt that ends with a newline, one more
    newline is no empty line yet.
    """

    def __init__(self, tokenizer: Any, prompt_tokens: int, until: list[str]) -> None:
        self.tokenizer, self.prompt_tokens, self.until = tokenizer, prompt_tokens, until

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        """input_ids: int64 `[1, n]`, the prompt and what follows it."""
        text = self.tokenizer.decode(input_ids[0, self.prompt_tokens :], skip_special_tokens=True)
        return any(stop in text for stop in self.until)


def request_key(kind: str, arguments: Sequence[Any], repetition: int = 0) -> str:
    """The key of a request in journals and in `generations`; it is the same for every system under test.

    kind: lm-eval's request type, "generate_until", "loglikelihood" or "loglikelihood_rolling". arguments: its `args`.
    repetition: number of earlier requests with the same arguments, for sampled answers.
    """
    try:
        return hash_json([kind, *arguments, repetition])
    except (TypeError, ValueError) as error:
        raise ValueError(f"a {kind} request has no key: its arguments are no JSON ({error})") from error


def generation_keys(arguments: Iterable[tuple[str, dict[str, Any]]]) -> list[str]:
    """The keys of generate_until requests. Greedy ones that are asked the same share a key: they have one answer."""
    asked: Counter[str] = Counter()
    keys = []
    for context, gen_kwargs in arguments:
        key = request_key("generate_until", (context, gen_kwargs))
        if Generation.of(gen_kwargs, 1).do_sample:
            asked[key] += 1
            key = request_key("generate_until", (context, gen_kwargs), asked[key] - 1)
        keys.append(key)
    return keys


def seed_of(key: str, seed: int) -> int:
    """The seed of a sampled request that names none: a function of the run's seed and the request, not of its turn."""
    return int.from_bytes(hashlib.sha256(f"{seed} {key}".encode()).digest()[:8], "big") >> 1


def fit_rows(rows: list[list[int]], counts: list[int], max_length: int) -> list[list[int]]:
    """The rows, cut on the left where the model has too few positions; one warning says so.

    counts: the tokens that are scored at the end of each; ValueError where these alone are too many.
    """
    longest, most = max(counts, default=0), max_length + 1  # the last token is scored and not fed
    if longest > max_length:
        raise ValueError(f"a continuation has {longest} tokens, more than max_length={max_length}: one window cannot "
                         "score it")
    cut = [len(row) - most for row in rows if len(row) > most]
    if cut:
        logger.warning("%d of %d contexts do not fit max_length=%d with their continuations: %d tokens were cut off "
                       "on the left, at most %d of one", len(cut), len(rows), max_length, sum(cut), max(cut))
    return [row[-most:] for row in rows]


class Finished:
    """The requests that have an answer: those of the journal, where there is one, and those of this call."""

    def __init__(self, journal: Journal | None) -> None:
        self.journal, self.items = journal, journal.items if journal else {}

    def __contains__(self, key: str) -> bool:
        return key in self.items

    def __getitem__(self, key: str) -> Any:
        return self.items[key]

    def __enter__(self) -> Finished:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the journal."""
        if self.journal is not None:
            self.journal.close()

    def add(self, key: str, value: Any) -> None:
        """On the disk, where there is a journal, before this returns."""
        if self.journal is not None:
            self.journal.add(key, value)
        self.items[key] = value
