"""Which plan, which data and which arguments do the tests of eval/quality share?"""

from __future__ import annotations

import json
from pathlib import Path

from eval.records.writer import read_results

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = """
name = "toy"
seed = 3
batch_size = 2
max_new_tokens = 12

[[systems]]
name = "wide"
model = "{models}"
dtype = "float32"

[[systems]]
name = "chain"
model = "{models}"
dtype = "float32"
levels = ["mxfp4", "prompt_lookup"]
num_draft_tokens = [4, 2]
reference = "wide"

[[systems]]
name = "W4A16"
model = "{models}"
dtype = "float32"
format = "int4"
group_size = 32

[[systems]]
name = "W4A4"
model = "{models}"
dtype = "float32"
format = "int4"
group_size = 32
precision = "w4a4"
reference = "W4A16"
"""
FIDELITY = """
[[fidelity]]
name = "words"
file = "{data}/words.jsonl"
count = 5
batch_sizes = [2, 1]
"""
PERPLEXITY = """
[[perplexity]]
name = "text"
file = "{data}/text.txt"
lines = 3
max_length = 24
stride = 16
"""
PROBABILITIES = """
[[probabilities]]
system = "W4A4"
reference = "W4A16"
data = "words"
"""
PLAN = SYSTEMS + FIDELITY + PERPLEXITY + PROBABILITIES
TASKS = """
[[tasks]]
task = "mlspec_gsm8k"
num_fewshot = 1
limit = 3
max_gen_toks = 10

[[tasks]]
task = "mlspec_piqa"
num_fewshot = 0
limit = 2

[[tasks]]
task = "mlspec_wikitext2"
"""
PROMPTS = [{"prompt": "def f("}, {"question": "How many?"}, {"turns": ["one", "two"]}, {"text": "a"},
           {"prompt": "import os\n"}, {"prompt": "not asked for"}]
TEXT = "The first line is here.\n\nAn é and a ü, then words.\nleft out\n"


def lay_out(folder: Path) -> None:
    """The plan and its data."""
    (folder / "plan.toml").write_text(PLAN, encoding="utf-8")
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)), encoding="utf-8")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    sums = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(5)]
    choices = [{"goal": goal, "sol1": "Use it.", "sol2": "Do not use it."} for goal in ("A tool?", "A hat?", "A cup?")]
    for name, text in {
        "gsm8k/test.jsonl": "\n".join(map(json.dumps, sums)), "gsm8k/train.jsonl": json.dumps(sums[0]),
        "piqa/valid.jsonl": "\n".join(map(json.dumps, choices)), "piqa/valid-labels.lst": "0\n1\n1\n",
        "wikitext2/test.txt": " = One = \n\n Some words . \n = Two = \n\n Other words , and more . \n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def arguments(folder: Path, saved_model: Path, *more: str) -> list[str]:
    return [str(folder / "plan.toml"), "--models", str(saved_model), "--data", str(folder),
            "--results", str(folder / "results"), "--device", "cpu", *more]


def lines(folder: Path, kind: str) -> list[dict]:
    """The results of this kind, without what two runs differ in."""
    return [{key: value for key, value in row.items() if key not in ("machine", "seconds")}
            for row in read_results(folder / "results" / "toy.jsonl") if row["kind"] == kind]
