"""Which prompts does the GPU benchmark decode, and as which rows of ids?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import hf_mlspec
from eval.bench_gpu.findings import Bench
from hf_mlspec.evaluation import read_prompts

FILES = {"HumanEval": ("humaneval/HumanEval.jsonl", 164), "GSM8K": ("gsm8k/test.jsonl", 300)}
TARGET, DRAFT = "code-21m", "code-4m"


def folders(bench: Bench) -> tuple[Path, Path]:
    """Folders of the target and of its draft: code-21m and code-4m, the demo pair where --quick asks for little."""
    if bench.quick:
        target, draft = hf_mlspec.demo_pair()
        return Path(target), Path(draft)
    return bench.models / TARGET, bench.models / DRAFT


def texts(bench: Bench) -> dict[str, list[str]]:
    """The prompts of each data set; ValueError for a missing file or one with too few."""
    if bench.quick:
        return {"demo prompts": read_prompts(Path(hf_mlspec.demo_pair()[0]).parent / "prompts.json", 4)}
    found = {}
    for name, (file, count) in FILES.items():
        path = bench.data / file
        if not path.is_file():
            raise ValueError(f"{path} does not exist: --data names the folder in which {file} lies")
        found[name] = read_prompts(path, count)
        if len(found[name]) < count:
            raise ValueError(f"{path} holds {len(found[name])} prompts, {count} are compared")
    return found


def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)
