"""What is a model's answer to one item worth: lm-eval's `process_results`, and the filter that runs programs?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..metrics_math import boxed_answer, math_equal
from ..metrics_number import number_scores
from ..metrics_pass_at_k import pass_at_k
from ..sandbox import run_programs

Document = dict[str, Any]


def number(doc: Document, results: list[str]) -> dict[str, float]:
    """GSM8K: the number behind `####`, and the last number."""
    return number_scores(results[0], doc["target"])


def boxed(doc: Document, results: list[str]) -> dict[str, float]:
    """MATH: the boxed answer."""
    return {"exact_match": float(math_equal(boxed_answer(results[0]), boxed_answer(doc["target"])))}


def run(responses: list[list[str]], docs: list[Document]) -> list[list[dict[str, Any]]]:
    """How the program of every response ends, in the sandbox: the fields of a ProgramOutcome, which logs show."""
    programs = [f"{doc['before']}{response}\n{doc['target']}" for item, doc in zip(responses, docs, strict=True)
                for response in item]
    outcomes = iter(run_programs(programs))
    return [[asdict(next(outcomes)) for _ in item] for item in responses]


def passed(_: Document, results: list[list[dict[str, Any]]]) -> dict[str, float]:
    """HumanEval and MBPP: pass@1 from all outcomes of the item, one unless the task repeats."""
    outcomes = results[0]
    return {"pass@1": pass_at_k(len(outcomes), sum(outcome["passed"] for outcome in outcomes), 1)}


def rolling(doc: Document, results: list[float]) -> dict[str, tuple[float, int]]:
    """WikiText-2: (log-likelihood, words or bytes) of an article; the aggregations weigh them."""
    words, size = len(doc["text"].split()), len(doc["text"].encode())
    return {"word_perplexity": (results[0], words), "byte_perplexity": (results[0], size),
            "bits_per_byte": (results[0], size)}
