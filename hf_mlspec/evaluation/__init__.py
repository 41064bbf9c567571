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
    "LineFile": "line_file",
    "what_changed": "changed",
    "whole_lines": "line_file",
    "MathMatch": "metrics_math",
    "LevelAcceptance": "traces_counts",
    "MLSpecLM": "harness",
    "ReplayResult": "traces_replay",
    "NumberMatch": "metrics_number",
    "PassAtK": "metrics_pass_at_k",
    "ProgramOutcome": "sandbox",
    "TASKS": "tasks",
    "TokenScores": ".integration.scoring",
    "Trace": ".speculation.traces.trace",
    "certify": "certificate_run",
    "check_words": ".integration.levels.resolve",
    "level_acceptance": "traces_counts",
    "levels_of_options": ".integration.levels.chain_text",
    "parse_levels": ".integration.levels.chain_text",
    "read_prompts": "prompts",
    "read_trace": ".speculation.traces.file",
    "record_trace": "traces",
    "replay": "traces_replay",
    "replay_captured": "traces_replay_captured",
    "request_key": "harness_requests",
    "reschedule": "traces_schedule",
    "score_rows": ".integration.scoring",
    "run_program": "sandbox",
    "run_programs": "sandbox",
    "token_logprobs": ".integration.scoring",
    "write_trace": ".speculation.traces.file",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
