"""Is the number at the end of a worked answer right, as GSM8K asks? Loads by class or by `evaluate.load(path)`."""

from __future__ import annotations

import re
from fractions import Fraction

import datasets
import evaluate

# A minus sign behind a digit, a letter or a bracket subtracts.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\$ ?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_MOST_DIGITS = 300  # longer ones are no answers, and Python refuses to convert thousands of digits

_CITATION = """@article{cobbe2021gsm8k, title={Training Verifiers to Solve Math Word Problems},
  author={Cobbe, Karl and others}, journal={arXiv:2110.14168}, year={2021}}"""


def marked_number(text: str) -> Fraction | None:
    """The number right behind the first `####`, where GSM8K writes the answer; None where there is none."""
    _, marker, rest = text.partition("####")
    found = _NUMBER.match(rest.lstrip(" ")) if marker else None
    return _value(found.group()) if found else None


def last_number(text: str) -> Fraction | None:
    """The last number of a text, wherever it stands (flexible extraction); None where there is none."""
    found = _NUMBER.findall(text)
    return _value(found[-1]) if found else None


def _value(number: str) -> Fraction | None:
    plain = re.sub(r"[$, ]", "", number)
    return Fraction(plain) if len(plain) <= _MOST_DIGITS else None


class NumberMatch(evaluate.Metric):
    """Share of predictions whose number equals the reference's by value: 1,000 is 1000, 2.50 is 2.5.

    `NumberMatch().compute(predictions=[...], references=[...])` gives {"exact_match", "flexible_match"}: by the number
    after `####`, and by the last number of the prediction. References are GSM8K answers, with `####`.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Share of worked answers that end with the right number (GSM8K).", citation=_CITATION,
            inputs_description="predictions, references: worked answers; references end with `#### number`.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        if not predictions:
            raise ValueError("there are no predictions to score; give one or more")
        scores = [number_scores(*pair) for pair in zip(predictions, references, strict=True)]
        return {name: sum(score[name] for score in scores) / len(scores) for name in scores[0]}


def number_scores(prediction: str, reference: str) -> dict[str, float]:
    """Of one answer: {"exact_match", "flexible_match"}, each 0.0 or 1.0; ValueError for a reference without number."""
    right = marked_number(reference)
    if right is None:
        raise ValueError(f"the reference has no number after '####': {reference[-80:]!r}")
    return {"exact_match": float(marked_number(prediction) == right),
            "flexible_match": float(last_number(prediction) == right)}
