"""What does a model score with its levels, and can it be shown that they changed nothing?

Names are imported when they are asked for: lm-eval takes seconds to load. Public like the names of `hf_mlspec`
itself: `from hf_mlspec.evaluation import Journal`.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Certificate": "certificate",
    "Journal": "journal",
    "MLSpecLM": "harness",
    "TokenScores": ".integration.scoring",
    "score_rows": ".integration.scoring",
    "token_logprobs": ".integration.scoring",
    "certify": "certificate_run",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
