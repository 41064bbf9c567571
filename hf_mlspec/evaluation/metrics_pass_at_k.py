"""How likely does one of k generated programs pass its tests? Loads by class or by `evaluate.load(path)`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import datasets
import evaluate

from hf_mlspec.evaluation.sandbox import run_programs

_CITATION = """@article{chen2021codex, title={Evaluating Large Language Models Trained on Code},
  author={Chen, Mark and others}, journal={arXiv:2107.03374}, year={2021}}"""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k) from c passing of n samples (Chen et al. 2021, section 2.1).

    Raises ValueError unless 0 <= passed <= samples and 1 <= k <= samples.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passing among {samples} samples: 1 <= k <= samples is needed, "
                         f"and passed between 0 and samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


class PassAtK(evaluate.Metric):
    """pass@k of generated programs, each run with its tests in the sandbox of `run_program`.

    `PassAtK().compute(predictions=[[program, ...], ...], references=[tests, ...], k=[1])` gives {"pass@1": mean};
    tests are Python text that is appended to every program. Options: timeout (seconds), workers (processes at a time).
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Unbiased pass@k of programs run in a sandbox (HumanEval).", citation=_CITATION,
            inputs_description="predictions: a list of programs for each item; references: the tests of each item.",
            features=datasets.Features({"predictions": datasets.Sequence(text), "references": text}),
        )

    def _compute(self, predictions: list[list[str]], references: list[str], k: Sequence[int] | int = (1,),
                 timeout: float = 10.0, workers: int | None = None) -> dict[str, float]:
        if not predictions:
            raise ValueError("there are no programs to run; give a list of one or more for each item")
        fewest, k = min(map(len, predictions)), [k] if isinstance(k, int) else k
        if not k or any(not 1 <= count <= fewest for count in k):
            raise ValueError(f"k={list(k)}: give numbers from 1 to {fewest}, the fewest programs of an item")
        programs = [f"{program}\n{tests}\n" for item, tests in zip(predictions, references, strict=True)
                    for program in item]
        outcomes = iter(run_programs(programs, timeout=timeout, workers=workers))
        counts = [(len(item), sum(next(outcomes).passed for _ in item)) for item in predictions]
        return {f"pass@{count}": sum(pass_at_k(*of_item, count) for of_item in counts) / len(counts) for count in k}
