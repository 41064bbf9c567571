"""How are the prompts of a harness continued? As one stream through the chain, every request with its own stops."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import StoppingCriteriaList

from .. import Completion, Request, SpeculationStats, generate_stream, last_stats, precision_switch
from ..integration.compare import accumulate
from .harness_arguments import Arguments
from .harness_requests import Generation, TextBefore, seed_of

logger = logging.getLogger(__name__)
Prompts = dict[str, tuple[list[int], Generation]]  # by the key of the request


class Writer:
    """Continues prompts with the target and its levels, at the target's precision.

    speculation: the counts of everything written so far.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, asked: Arguments, max_length: int) -> None:
        """Raises TypeError or ValueError for levels that cannot serve this target."""
        self.model, self.tokenizer, self.asked, self.max_length = model, tokenizer, asked, max_length
        self.speculation = SpeculationStats()
        for _ in self.write({}):
            raise AssertionError("nothing was asked")

    def write(self, prompts: Prompts) -> Iterator[Completion]:
        """The completions, as they end; a Completion's `id` is the key. Raises what a request of them failed with."""
        precision = self.asked.precision
        with nullcontext() if precision is None else precision_switch(self.model).at(precision):
            stream = generate_stream(
                self.model,
                [self._request(key, *prompt) for key, prompt in prompts.items()],
                max_batch=self.asked.batch_size,
                assistant_models=self.asked.levels,
                speculation_config=self.asked.speculation,
                tokenizer=self.tokenizer,
            )
            try:
                with closing(stream):
                    for done in stream:
                        if done.error is not None:
                            raise _named(done.error, prompts[done.id][1])
                        yield done
            finally:
                if prompts:
                    accumulate(self.speculation, last_stats(self.model))

    def fit(self, prompts: Prompts) -> Prompts:
        """The prompts, cut on the left where they do not fit with their new tokens; one warning says so.

        Prompts with the same beginning come one after another, so that a slot keeps the examples of a few-shot prompt.
        ValueError if the new tokens alone exceed max_length.
        """
        fitting, cut = {}, []
        for key, (ids, how) in prompts.items():
            room = self.max_length - how.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"up to {how.max_new_tokens} new tokens leave no room for a prompt within max_length="
                    f"{self.max_length}: lower max_gen_toks, in the task or by --gen_kwargs max_gen_toks=N"
                )
            if len(ids) > room:
                cut.append(len(ids) - room)
            fitting[key] = ids[-room:], how
        if cut:
            logger.warning(
                "%d of %d prompts do not fit max_length=%d with their new tokens: %d tokens were cut off on the "
                "left, at most %d of one", len(cut), len(prompts), self.max_length, sum(cut), max(cut),
            )  # fmt: skip
        return dict(sorted(fitting.items(), key=lambda item: item[1][0]))

    def _request(self, key: str, ids: list[int], how: Generation) -> Request:
        seed = how.seed if how.seed is not None or not how.do_sample else seed_of(key, self.asked.seed)
        stops = [TextBefore(self.tokenizer, len(ids), how.until)] if how.until else []
        return Request(
            ids,
            id=key,
            seed=seed,
            max_new_tokens=how.max_new_tokens,
            stopping_criteria=StoppingCriteriaList(stops),
            **how.options,
        )


def _named(error: Exception, how: Generation) -> Exception:
    """The error with the settings it came of, where it is about them."""
    if isinstance(error, (ValueError, TypeError)):
        return ValueError(f"a request with {how.options} and max_gen_toks={how.max_new_tokens}: {error}")
    return error
