"""What need not be prepared anew for a request whose options were prepared before? Everything but its length.

Stock preparation takes milliseconds, in which a GPU decodes hundreds of tokens.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..call import Call
from ..processing import WARPERS, calls_like

_ANY_PROMPT = EosTokenCriteria, StopStringCriteria  # which keep nothing of a call
_PLAIN = str, int, float, bool, type(None)
_MOST = 64  # sets of options
_TOKENS = "_pad_token_tensor", "_eos_token_tensor", "eos_token_id"


class Repeated:
    """Calls by their options, those of which all but the length holds for any prompt."""

    def __init__(self) -> None:
        self._kept: dict[tuple, Call] = {}

    def call(self, input_ids: Tensor, options: dict[str, Any]) -> Call | None:
        """The call of a prompt ``[1, n]`` with these options; None where it has to be prepared."""
        found = self._kept.get(_key(options))
        if found is None:
            return None
        settings, width = copy.copy(found.settings), input_ids.shape[1]
        padding = getattr(settings, "_pad_token_tensor", None)
        if padding is not None and bool((input_ids == int(padding.flatten()[0])).any()):
            return None  # stock preparation may hide it
        settings._mask_length, settings.max_new_tokens = None, int(options["max_new_tokens"])
        settings.max_length = width + settings.max_new_tokens
        return replace(found, input_ids=input_ids, settings=settings)

    def keep(self, options: dict[str, Any], call: Call) -> None:
        """Remember a prepared call, if nothing of it depends on its prompt."""
        key = _key(options)
        if key is None or not all(calls_like(one, WARPERS) for one in call.processors):
            return
        if not all(calls_like(one, (*_ANY_PROMPT, MaxLengthCriteria)) for one in call.criteria):
            return
        if len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        criteria = [_on_host(one, _TOKENS) for one in call.criteria if calls_like(one, _ANY_PROMPT)]
        kept = {"criteria": StoppingCriteriaList(criteria), "processors": LogitsProcessorList(call.processors)}
        self._kept[key] = replace(call, settings=_on_host(call.settings, _TOKENS), model_kwargs={}, **kept)


def _on_host(kept: Any, names: tuple[str, ...]) -> Any:
    """A copy that has these tensors on the host, which reads them for every request."""
    made = copy.copy(kept)
    for name in names:
        if isinstance(tensor := getattr(kept, name, None), Tensor):
            setattr(made, name, tensor.cpu())
    return made


def _key(options: dict[str, Any]) -> tuple | None:
    """Options that are plain values, the number of new tokens apart; None for others."""
    new = options.get("max_new_tokens")
    if isinstance(new, bool) or not isinstance(new, int) or new < 1 or options.get("max_length") is not None:
        return None
    found = []
    for name, value in options.items():
        if isinstance(value, (list, tuple)) and all(isinstance(one, _PLAIN) for one in value):
            value = tuple(value)
        elif not isinstance(value, _PLAIN):
            return None
        if name != "max_new_tokens":
            found.append((name, type(value).__name__, value))
    return tuple(sorted(found, key=lambda one: one[0]))
