"""What does a system write after every prompt, and where does it part from its reference? Greedy, item by item."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import hf_mlspec
from eval.plans.models import Loaded
from eval.plans.systems import System
from eval.plans.tables import PlanError
from hf_mlspec.evaluation import Journal

RESAMPLES = 10_000


def check_lengths(system: System, loaded: Loaded, prompts: Sequence[str], max_new_tokens: int, data: str) -> None:
    """PlanError for a prompt that leaves the target no positions for the new tokens."""
    for number, prompt in enumerate(prompts, 1):
        length = len(loaded.encode(prompt))
        if not length or (loaded.positions is not None and length + max_new_tokens > loaded.positions):
            raise PlanError(f"[[fidelity]] {data!r}, prompt {number}: {length} tokens and max_new_tokens = "
                            f"{max_new_tokens}; {system.name!r} has {loaded.positions} positions and needs a token to "
                            "begin with")


def decode(system: System, loaded: Loaded, prompts: Sequence[str], *, max_new_tokens: int, batch_size: int,
           journal: Journal, done: Callable[[], None]) -> None:
    """Write after every prompt, as a stream of `batch_size` slots.

    journal: item "0", "1", ...: prompt_tokens, ids, and seconds, the wall time since the item before; what is in it is
    not decoded again. done: called after every item.
    """
    requests = (hf_mlspec.Request(loaded.encode(prompt), id=number)
                for number, prompt in enumerate(prompts) if str(number) not in journal)
    begin = time.perf_counter()
    for one in hf_mlspec.generate_stream(
        loaded.model, requests, max_batch=batch_size, assistant_models=loaded.levels, tokenizer=loaded.tokenizer,
        speculation_config=system.speculation, do_sample=False, max_new_tokens=max_new_tokens
    ):
        if one.error is not None:
            raise one.error
        now = time.perf_counter()
        journal.add(str(one.id), {"prompt_tokens": len(one.sequence) - len(one.new_tokens), "ids": one.new_tokens,
                                  "seconds": now - begin})
        begin = now
        done()


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs or that only one has; None where both are equal."""
    for position, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


def compared(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]], seed: int) -> dict[str, Any]:
    """How far two systems agree: one list of ids per prompt of each.

    equal_share and its 95 % bootstrap interval over prompts; mean_first_difference over the prompts that differ (None
    without any), mean_common_tokens over all, an equal prompt counting as its length; tokens: of the reference;
    differences: item and position of each.
    """
    places = [first_difference(one, other) for one, other in zip(expected, got, strict=True)]
    differing = [place for place in places if place is not None]
    common = [len(ids) if place is None else place for ids, place in zip(expected, places, strict=True)]
    equal = len(places) - len(differing)
    return {"prompts": len(places), "equal": equal, "equal_share": equal / len(places),
            "equal_share_interval": interval(equal, len(places), seed),
            "mean_first_difference": float(np.mean(differing)) if differing else None,
            "mean_common_tokens": float(np.mean(common)), "tokens": sum(map(len, expected)),
            "differences": [{"item": str(item), "position": place}
                            for item, place in enumerate(places) if place is not None]}


def interval(equal: int, prompts: int, seed: int) -> list[float]:
    """The 95 % percentile bootstrap interval of a share: 2.5 and 97.5 % of RESAMPLES draws of as many prompts.

    A resample of `prompts` items of which `equal` count is a binomial draw. Where all or none are equal the interval
    is that one number: the bootstrap knows nothing of what it did not see.
    """
    shares = np.random.default_rng(seed).binomial(prompts, equal / prompts, RESAMPLES) / prompts
    return [float(edge) for edge in np.quantile(shares, (0.025, 0.975))]
