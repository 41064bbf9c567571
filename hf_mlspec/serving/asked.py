"""What does the body of a request ask for, and can it be? The fields that both endpoints share."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from ..integration.processing import COLDEST
from ..speculation.sampling import drawn_seed
from .errors import invalid
from .limits import Limits

# Of OpenAI's fields those that would change an answer, and are not built; a value that changes nothing passes.
_UNBUILT: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "response_format": ({"type": "text"},), "suffix": ("",),
    "echo": (False,), "best_of": (1,), "tool_choice": ("auto", "none"), "functions": ([],), "function_call": ("none",),
    "modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": (), "moderation": (),
}  # fmt: skip
# Fields that say something about the asker, or about services that are not here, and change no answer.
_IDLE = {
    "metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "parallel_tool_calls", "verbosity", "reasoning_effort",
}  # fmt: skip
_SHARED = {
    "model", "stream", "stream_options", "n", "seed", "temperature", "top_p", "top_k", "stop", "max_tokens",
    "logit_bias", "logprobs", "return_token_ids", "return_levels",
}  # fmt: skip
_MAX_STOPS, _MAX_TOP_LOGPROBS = 4, 20
_LARGEST = sys.float_info.max  # JSON has larger integers


@dataclass(frozen=True)
class Asked:
    """The settings of a request.

    n: answers to each prompt; seeds: of each, None where nothing is drawn. new_tokens: of each at most; None: as many
    as the limit and the model's positions leave. top_logprobs: None: no log probabilities. options: of generate.
    """

    stream: bool
    n: int
    seeds: list[int | None]
    new_tokens: int | None
    stops: list[str]
    top_logprobs: int | None
    include_usage: bool
    return_token_ids: bool
    return_levels: bool
    options: dict[str, Any] = field(default_factory=dict)


def read_asked(body: dict[str, Any], limits: Limits, own: set[str], *, samples: bool) -> Asked:
    """The settings of a body; ApiError 400 for those that cannot be.

    own: fields that only this endpoint has. samples: whether the model's own settings sample.
    """
    _refuse_unknown(body, own)
    n = _integer(body, "n", 1, limits.choices) or 1
    options = _sampling(body, samples)
    stream = _flag(body, "stream")
    usage = body.get("stream_options")
    if usage is not None and not isinstance(usage, dict):
        raise invalid("stream_options", "stream_options must be an object")
    stops = _stops(body.get("stop"))
    if stops:
        options["stop_strings"] = stops
    seed = _integer(body, "seed", -(2**63), 2**63 - 1)
    return Asked(stream=stream, n=n, seeds=_seeds(seed, n) if options["do_sample"] else [None] * n,
                 new_tokens=_new_tokens(body, limits), stops=stops, top_logprobs=_top_logprobs(body),
                 include_usage=bool((usage or {}).get("include_usage")),
                 return_token_ids=_flag(body, "return_token_ids"), return_levels=_flag(body, "return_levels"),
                 options=options)


def known_fields(own: set[str]) -> set[str]:
    """All fields that a body may have. own: those that only its endpoint has."""
    return _SHARED | _IDLE | set(_UNBUILT) | own


def _refuse_unknown(body: dict[str, Any], own: set[str]) -> None:
    unknown = sorted(set(body) - known_fields(own))
    if unknown:
        raise invalid(unknown[0], f"Unrecognized request argument supplied: {', '.join(unknown)}")
    for name, harmless in _UNBUILT.items():
        if name not in own and body.get(name) is not None and body[name] not in harmless:
            raise invalid(name, f"{name} is {_shown(body[name])}, which this server cannot do; leave it out",
                          "unsupported_parameter")


def _sampling(body: dict[str, Any], samples: bool) -> dict[str, Any]:
    """Arguments of generate; a temperature or top_p samples, a temperature of 0 does not, else the model decides."""
    temperature = _number(body, "temperature", 0.0, 2.0)
    if temperature is not None and 0.0 < temperature < COLDEST:
        raise invalid("temperature", f"temperature is {temperature}, it must be 0 or at least {COLDEST}: logits "
                                     "divided by less are beyond numbers")
    top_p = _number(body, "top_p", 0.0, 1.0)
    top_k = _integer(body, "top_k", 0, 2**31 - 1)
    if top_p == 0.0:
        raise invalid("top_p", "top_p is 0, it must be above 0 and at most 1")
    given = temperature is not None or top_p is not None
    drawn = temperature != 0.0 and (given or samples)
    options: dict[str, Any] = {"do_sample": drawn}
    if drawn:
        own = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        options |= {name: value for name, value in own.items() if value is not None}
        if given and top_k is None:
            options["top_k"] = 0  # transformers' own default of 50 is none of OpenAI's
    bias = body.get("logit_bias")
    if bias:
        options["sequence_bias"] = _bias(bias)
    return options


def _bias(bias: Any) -> dict[tuple[int, ...], float]:
    try:
        found = {(int(token),): float(value) for token, value in bias.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise invalid("logit_bias", "logit_bias must be an object of token ids and numbers") from None
    if not all(token[0] >= 0 and -100 <= value <= 100 for token, value in found.items()):
        raise invalid("logit_bias", "logit_bias must have token ids of 0 or more, and numbers of -100 to 100")
    return found


def _seeds(seed: int | None, n: int) -> list[int | None]:
    """Of answer i that of `torch.manual_seed(seed + i)` before generate alone."""
    first = secrets.randbits(62) if seed is None else seed
    return [drawn_seed(torch.Generator().manual_seed((first + i) % 2**64)) for i in range(n)]


def _new_tokens(body: dict[str, Any], limits: Limits) -> int | None:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return _integer(body, name, 1, limits.new_tokens)


def _top_logprobs(body: dict[str, Any]) -> int | None:
    """Chat has a flag and `top_logprobs`; completions have the number itself."""
    asked = body.get("logprobs")
    if asked is None or asked is False:
        if body.get("top_logprobs") is not None:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        return None
    if asked is True:
        return _integer(body, "top_logprobs", 0, _MAX_TOP_LOGPROBS) or 0
    return _integer(body, "logprobs", 0, _MAX_TOP_LOGPROBS)


def _stops(given: Any) -> list[str]:
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid("stop", "stop must be a text, or a list of texts, none of them empty")
    if len(stops) > _MAX_STOPS:
        raise invalid("stop", f"stop has {len(stops)} texts, at most {_MAX_STOPS} are taken")
    return stops


def _integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"{name} is {_shown(value)}, it must be an integer")
    return _between(name, value, low, high)


def _number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise invalid(name, f"{name} is {_shown(value)}, it must be a number")
    return float(_between(name, value, low, high))


def _between(name: str, value: Any, low: Any, high: Any) -> Any:
    if not low <= value <= high:
        raise invalid(name, f"{name} is {_shown(value)}, it must be between {low} and {high}")
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(name, f"{name} is {_shown(value)}, it must be true or false")
    return bool(value)


def _shown(value: Any) -> str:
    """As in an error message, where a long value is cut."""
    said = repr(value)
    return said if len(said) <= 80 else said[:77] + "..."
