"""Which small tasks do the tests of the harness run, and how?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import lm_eval
from lm_eval.tasks import TaskManager

GENERATE = """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{y}}"
generation_kwargs: {until: ["\\n\\n", "z"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
SAMPLE = GENERATE.replace("do_sample: false", "do_sample: true, temperature: 0.9, top_p: 0.95")
TASKS = {
    "t_generate": GENERATE,
    "t_sample": SAMPLE + "repeats: 2\n",
    "t_choice": 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: c\ndoc_to_target: y\n',
    "t_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{t}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


def write_tasks(folder: Path, items: int = 10) -> Path:
    """The tasks and their data in a folder, for lm-eval's include_path."""
    docs = [{"q": f"def f{i}(x):\n", "c": [" return x", " pass", f" y{i}"], "y": i % 3,
             "t": f"hello {i} world " * (3 + 9 * i)} for i in range(items)]
    (folder / "docs.json").write_text(json.dumps(docs), encoding="utf-8")
    for name, text in TASKS.items():
        opening = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/docs.json}}}}\n"
        (folder / f"{name}.yaml").write_text(f"{opening}test_split: test\n{text.strip()}\n", encoding="utf-8")
    return folder


def evaluate(lm: Any, folder: Path, names: list[str], **options: Any) -> dict[str, Any]:
    """lm-eval's results, with samples."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with mock.patch("lm_eval.evaluator.add_env_info"):  # which asks pip and the machine for seconds
        return lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager, bootstrap_iters=0, **options)


def answers(results: dict[str, Any]) -> dict[str, list[Any]]:
    """By task what the model said of every document, in their order."""
    return {name: [sample["resps"] for sample in sorted(samples, key=lambda one: one["doc_id"])]
            for name, samples in results["samples"].items()}
