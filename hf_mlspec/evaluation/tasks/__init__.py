"""Where do the benchmark tasks for lm-eval lie? `lm_eval --include_path` (or `include_path=`) takes this folder."""

from pathlib import Path

TASKS = Path(__file__).resolve().parent
