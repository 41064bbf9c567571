"""Which arguments of generate does stock transformers misread or accept, that mean nothing?"""

from __future__ import annotations

from typing import Any

_LISTS = {"logits_processor": "LogitsProcessorList", "stopping_criteria": "StoppingCriteriaList"}


def check_arguments(kwargs: dict[str, Any], top_p: Any) -> None:
    """TypeError or ValueError, naming the argument and the remedy.

    kwargs: as generate was given them. top_p: of the call, wherever it was said; None for none.
    """
    if kwargs.get("is_assistant"):
        raise ValueError(
            "is_assistant=True is what transformers tells a model that drafts in its own assisted generation: leave "
            "it out, levels are told by assistant_models"
        )
    for name, kind in _LISTS.items():
        given = kwargs.get(name)
        if given is None:
            continue
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{name} is a {type(given).__name__}, it takes a list: {kind}([...])")
        odd = next((place for place, one in enumerate(given) if not callable(one)), None)
        if odd is not None:
            raise TypeError(f"{name}[{odd}] is {given[odd]!r}, which cannot be called with input_ids and scores")
    if isinstance(top_p, (int, float)) and not 0 <= top_p <= 1:
        raise ValueError(f"top_p is {top_p}, it must be from 0 to 1: a share of all probability")
