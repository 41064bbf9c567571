"""What is the smallest case that still goes wrong? One thing after another is left out, as long as it does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

Case = dict[str, Any]
_OF_ASKS = ("sample", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size", "suppress_tokens",
            "eos", "stop")  # fmt: skip


def shrunk(case: Case, fails: Callable[[Case], bool], most: int = 200) -> Case:
    """The smallest that was found among `most` tries."""
    tried = 0
    while True:
        for smaller in _smaller(case):
            tried += 1
            if tried > most:
                return case
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""
    yield from _of_form(case)
    for index in range(len(case["levels"])):
        yield _changed(case, lambda c, i=index: (c["levels"].pop(i), c["config"].pop("num_draft_tokens", None)))
    for index in range(len(case["ask"]["lengths"])):
        if len(case["ask"]["lengths"]) > 1:
            yield _changed(case, lambda c, i=index: c["ask"]["lengths"].pop(i))
    for index, length in enumerate(case["ask"]["lengths"]):
        for less in sorted({1, length // 2, length - 1} - {0, length}):
            if less < length:
                yield _changed(case, lambda c, i=index, n=less: c["ask"]["lengths"].__setitem__(i, n))
    for less in sorted({1, case["ask"]["new"] // 2, case["ask"]["new"] - 1}):
        if 0 < less < case["ask"]["new"]:
            yield _changed(case, lambda c, n=less: c["ask"].update(new=n))
    for word in _OF_ASKS:
        if word in case["ask"]:
            yield _changed(case, lambda c, w=word: c["ask"].pop(w))
    for word in case["config"]:
        if word != "engine":
            yield _changed(case, lambda c, w=word: c["config"].pop(w))
    for word in list(case["world"]["shape"]):
        if word != "vocab_size":
            yield _changed(case, lambda c, w=word: c["world"]["shape"].pop(w))
    if case["world"]["weights"] != "dense":
        yield _changed(case, lambda c: c["world"].update(weights="dense"))
    if case["world"]["name"] != "llama":
        yield _changed(case, lambda c: c["world"].update(name="llama"))


def _of_form(case: Case) -> Iterator[Case]:
    if case["form"].endswith("interrupted"):
        plain = case["form"].removesuffix("interrupted").strip() or "generate"
        yield _changed(case, lambda c: c.update(form=plain))
        if case["bomb"]:
            yield _changed(case, lambda c: c.update(bomb=case["bomb"] - 1))
    if case["form"].startswith("stream"):
        for word, plain in (("pauses", False), ("cancels", False), ("prefix_cache", None), ("prefill_chunk", None),
                            ("max_batch", 1)):  # fmt: skip
            if case["stream"][word] != plain:
                yield _changed(case, lambda c, w=word, p=plain: c["stream"].update({w: p}))
        yield _changed(case, lambda c: c.update(form="generate"))


def _changed(case: Case, change: Callable[[Case], Any]) -> Case:
    other = copy.deepcopy(case)
    change(other)
    return other
