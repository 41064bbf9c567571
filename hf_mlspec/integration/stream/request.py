"""What may one request of a stream ask for, what comes back, and how does stock generate prepare it?"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ...nn.shards import is_shared
from ...ops.integers import integers
from ...speculation.row_sampling import RowRule
from ...speculation.sampling import drawn_seed
from ...speculation.stats import LevelStats, SpeculationStats
from ..call import Call, check
from ..hook import prepare_call
from ..processing import Prompts, Stopping, split_processors, temperature_of
from .repeated import Repeated

_OWN = ("seed", "streamer", "id", "logprobs")
_LENGTHS = ("max_length", "max_new_tokens")
_COUNTS = (*_LENGTHS, "min_length", "min_new_tokens")
# Of generate's arguments those that bring a loop or a cache of their own, and those that ask for more than tokens.
_REFUSED = ("custom_generate", "past_key_values", "cache_implementation", "assistant_models")
_UNWRITTEN = ("output_scores", "output_logits")


class Request:
    """One prompt of `generate_stream` with its options.

    input_ids: the prompt: a list of token ids, an int64 tensor `[n]` or `[1, n]`, or a string if the stream has a
        tokenizer.
    seed: of a sampled request; None: a seed drawn from torch's global generator.
    streamer: receives the prompt, then every round's tokens, as in generate; its `end` is called however the request
        ends.
    id: any value, to identify the request.
    logprobs: how many of the likeliest tokens are told with the log probability of every new one, in the events of
        the stream; None: no log probabilities.
    options: arguments of generate for this request (max_new_tokens, do_sample, temperature, stop_strings,
        generation_config, logits_processor, ...); they override the stream's own.
    """

    def __init__(self, input_ids: Any, *, seed: int | None = None, streamer=None, id: Any = None,
                 logprobs: int | None = None, **options):
        self.input_ids, self.seed, self.streamer, self.id, self.options = input_ids, seed, streamer, id, options
        self.logprobs = logprobs
        self._cancelled = threading.Event()

    @classmethod
    def of(cls, item: Any) -> Request:
        """The request itself, or a new one from a mapping of its arguments or from a bare prompt."""
        if isinstance(item, cls):
            return item
        return cls(**item) if isinstance(item, Mapping) else cls(item)

    def cancel(self) -> None:
        """Cancel the request, from any thread: it completes with its tokens so far after the current round."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def end_stream(self) -> Exception | None:
        """Tell the streamer that no more tokens come; what the caller's own code raises then."""
        try:
            if self.streamer is not None:
                self.streamer.end()
        except Exception as error:  # whatever it is
            return error
        return None

    def __repr__(self) -> str:
        return f"Request(id={self.id!r}, {', '.join(self.options) or 'no options'})"


@dataclass
class Completion:
    """A request that ended.

    request: as submitted, or the Request made of it; for an invalid item the item itself.
    sequence: prompt and new tokens. finish_reason: "stop" (an end-of-sequence token, a stop string or criterion),
        "length", "cancelled" or "error". error: the exception of a failed request, otherwise None.
    speculation: the counts of this request: `target_passes` is its number of rounds, and of the levels it has those
        that drafted for the target; seconds from admission to end. speculation and sequence are None if it was never
        admitted.
    text: the new tokens without special ones, if the stream has a tokenizer.
    """

    request: Any
    sequence: list[int]
    new_tokens: list[int]
    finish_reason: str
    error: Exception | None = None
    speculation: SpeculationStats | None = None
    text: str | None = None

    @property
    def id(self) -> Any:
        """The request's id."""
        return getattr(self.request, "id", None)


@dataclass
class Admitted:
    """A request that is being decoded: its row, how its tokens are chosen, and how it ends.

    row: the prompt's unmasked tokens, then the committed ones. budget: tokens it may gain. by_caller: the error came
    from the caller's own code.
    """

    request: Request
    prompts: Prompts
    row: list[int]
    budget: int
    stop: Stopping
    rule: RowRule
    began: float
    stats: SpeculationStats
    finish_reason: str | None = None
    error: Exception | None = None
    by_caller: bool = False

    def __post_init__(self) -> None:
        self.stats.prompt_tokens = len(self.row)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens committed so far."""
        return self.row[self.prompts.lengths[0] :]

    @property
    def left(self) -> int:
        """Tokens that the row may still gain."""
        return self.budget - (len(self.row) - self.prompts.lengths[0])

    def counts_of(self, name: str) -> LevelStats:
        """What a level drafted for this request as the one below the target."""
        found = next((level for level in self.stats.levels if level.name == name), None)
        if found is None:
            found = LevelStats(name)
            self.stats.levels.append(found)
        return found

    def fail(self, error: Exception, by_caller: bool = False) -> None:
        """The request ends with this error, or the one that came before it; its tokens so far stay."""
        self.finish_reason, self.error = "error", self.error or error
        self.by_caller |= by_caller

    def raise_if_alone(self, model: PreTrainedModel) -> None:
        """Raise what the caller's code raised, where processes share the model: on others it may not have failed, and
        they would go on with a row that ended here."""
        if self.by_caller and is_shared(model):
            raise self.error

    def stream(self, tokens: Tensor) -> None:
        """Hand tokens to the request's streamer, whose failure ends this request only."""
        if self.request.streamer is not None:
            try:
                self.request.streamer.put(tokens)
            except Exception as error:  # the caller's own code, whatever it raises
                self.fail(error, by_caller=True)

    def end_stream(self) -> None:
        """Tell the request's streamer that no more tokens come."""
        if (error := self.request.end_stream()) is not None:
            self.fail(error)


class Preparation:
    """Turns requests into rows: the stream's defaults, stock generate's own preparation, and our checks.

    defaults: arguments of generate for requests that do not override them.
    """

    def __init__(self, model: PreTrainedModel, tokenizer, vocab_size: int, defaults: dict):
        self.model, self.tokenizer, self.vocab_size, self.defaults = model, tokenizer, vocab_size, defaults
        self._repeated = Repeated()

    def checked(self) -> Preparation:
        """Itself; TypeError or ValueError for arguments of the stream that are invalid for every request."""
        misplaced = sorted(name for name in (*_OWN, "input_ids", "inputs", "attention_mask") if name in self.defaults)
        if misplaced:
            raise TypeError(f"generate_stream got {', '.join(misplaced)}: these belong to each Request")
        _check_counts("generate_stream", self.defaults)
        options = self._merged({})
        if not any(getattr(options.get("generation_config"), n, None) or options.get(n) for n in _LENGTHS):
            options["max_new_tokens"] = 1  # transformers says its default once per call: leave that to the requests
        one = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        check(self.model, self._call(one, {**options, "attention_mask": torch.ones_like(one)}))
        return self

    def __call__(self, request: Request, began: float) -> Admitted:
        """The request as a row. Raises TypeError or ValueError for invalid requests, before anything is computed."""
        _check_seed(request.seed)
        _check_logprobs(request.logprobs, self.vocab_size)
        _check_counts(repr(request), request.options)
        options, ids = self._merged(request.options), self._input_ids(request.input_ids)
        if options.get("attention_mask") is not None:
            mask = options["attention_mask"] = _as_row(options["attention_mask"]).to(self.model.device)
            if mask.shape != ids.shape:  # stock generate would make one that fits
                raise ValueError(
                    f"attention_mask has shape {list(mask.shape)} and input_ids {list(ids.shape)}: one flag per token "
                    "is needed"
                )
        call = self._repeated.call(ids, options)
        if call is None:
            call = self._call(ids.to(self.model.device), options)
            self._repeated.keep(options, call)
        prompts = check(self.model, call)
        stop = Stopping(call.criteria, prompts)
        row = list(prompts.rows[0])
        rule = self._rule(call, prompts, frozenset(stop.eos), request.seed)
        return Admitted(request, prompts, row, call.new_tokens, stop, rule, began, SpeculationStats())

    def _call(self, input_ids: Tensor, options: dict) -> Call:
        refused = sorted(name for name in _REFUSED if options.get(name) not in (None, False))
        if refused:
            raise ValueError(f"{', '.join(refused)}: generate_stream has a loop and caches of its own; leave it out")
        call = prepare_call(self.model, {"input_ids": input_ids, "tokenizer": self.tokenizer, **options})
        asked = [name for name in _UNWRITTEN if getattr(call.settings, name, None)]
        if asked:
            raise ValueError(f"{', '.join(asked)}: generate_stream hands back tokens only; leave it out")
        return call

    def _rule(self, call: Call, prompts: Prompts, ends: frozenset[int], seed: int | None) -> RowRule:
        warp, process = split_processors(call.processors, prompts)
        length = prompts.lengths[0]
        if not call.settings.do_sample:
            seed = None
        elif seed is None:
            seed = drawn_seed()
        return RowRule(self.vocab_size, prompt_length=length, seed=seed, warp=warp, process=process, ends=ends,
                       temperature=temperature_of(call.processors))

    def _input_ids(self, prompt: Any) -> Tensor:
        """int64 `[1, n]`, where the user has them."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise TypeError("a request is a string: pass generate_stream the target's tokenizer, or token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = _as_row(prompt)
        if ids.numel() == 0:
            raise ValueError("a request has no tokens: a prompt needs at least one")
        if ids.ndim != 2 or len(ids) != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(
                f"a request's input_ids are {ids.dtype} of shape {list(ids.shape)}: one prompt of integer token ids "
                "is expected, [n] or [1, n]; make a request of every row of a batch"
            )
        return ids.long()

    def _merged(self, options: dict) -> dict:
        """The stream's defaults beneath a request's options; a generation_config of the request is above defaults."""
        defaults = dict(self.defaults)
        if any(options.get(name) is not None for name in _LENGTHS):
            defaults = {name: value for name, value in defaults.items() if name not in _LENGTHS}
        config, base = options.get("generation_config"), defaults.pop("generation_config", None)
        settings = copy.deepcopy(config if config is not None else base)
        if settings is None:
            return defaults | options
        if not isinstance(settings, GenerationConfig):
            raise TypeError(f"generation_config is a {type(settings).__name__}, not a GenerationConfig")
        if config is not None and any(getattr(config, name, None) is not None for name in _LENGTHS):
            defaults = {name: value for name, value in defaults.items() if name not in _LENGTHS}
        above = {name: value for name, value in defaults.items() if getattr(config, name, None) is None}
        keywords = above | {name: value for name, value in options.items() if name != "generation_config"}
        return {**settings.update(**keywords), "generation_config": settings}


def _check_counts(whose: str, options: Mapping[str, Any]) -> None:
    """TypeError, naming whose option it is, for a number of tokens that is none; transformers would compare it."""
    config = options.get("generation_config")
    for name in _COUNTS:
        for place, value in ((name, options.get(name)), (f"generation_config.{name}", getattr(config, name, None))):
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
                raise TypeError(f"{whose}: {place} is {value!r}, it must be an integer, a number of tokens")


def _check_seed(seed: Any) -> None:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed is {seed!r}, it must be an integer or None")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}, noise takes integers from -2**63 to 2**64 - 1")


def _check_logprobs(count: Any, vocab_size: int) -> None:
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise TypeError(f"logprobs is {count!r}, it must be an integer or None")
    if count is not None and not 0 <= count <= vocab_size:
        raise ValueError(f"logprobs is {count}, it must be between 0 and the vocabulary's {vocab_size} tokens")


def _as_row(prompt: Any) -> Tensor:
    """What a user gave for one prompt as a tensor; `[n]` becomes `[1, n]`."""
    try:
        ids = isinstance(prompt, list) and set(map(type, prompt)) == {int}
        given = integers(prompt, torch.int64) if ids else torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(
            f"a request's input is a {type(prompt).__name__}, not token ids (a list or a tensor) or a string: {error}"
        ) from error
    return given[None] if given.ndim == 1 else given
