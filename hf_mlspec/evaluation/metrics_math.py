"""Do two answers in LaTeX mean the same, as MATH asks? Loads by class or by `evaluate.load(path)`."""

from __future__ import annotations

import re
from fractions import Fraction

import datasets
import evaluate

_CITATION = """@article{hendrycks2021math, title={Measuring Mathematical Problem Solving With the MATH Dataset},
  author={Hendrycks, Dan and others}, journal={NeurIPS}, year={2021}}"""

# Applied in this order to the text of an answer, without its outer dollar signs.
_REWRITES = tuple((re.compile(pattern), new) for pattern, new in (
    (r"(?<!\\)\\(?:[!,;:>\s]|q?quad(?![a-zA-Z]))|~", ""),  # space; a second backslash ends a row of a matrix
    (r"\\(?:left|right|big|Big|bigg|Bigg)(?![a-zA-Z])", ""),  # the size of brackets
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(leq|geq|neq)(?![a-zA-Z])", lambda found: "\\" + found[1][:2]),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)|\\degree\b|\\?%|\\?\$", ""),  # degrees, percent, dollars
    (r"(?<=[^\s])\s*\\(?:text|mbox|mathrm|textrm)\s*\{[^{}]*\}(?:\^\{?[0-9]\}?)?\s*$", ""),  # a unit at the end
    (r"\\(?:text|mbox|mathrm|textrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1"),
    (r"\{,\}", ","),
    (r"\s+", ""),
    (r"\.$", ""),
    (r"^[a-zA-Z](?:\\in|=)(?=[^=]+$)", ""),  # x = 5, x in [0, 1]
    (r"\\frac([0-9a-zA-Z])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})([0-9a-zA-Z])", r"\1{\2}"),
    (r"\\sqrt([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2"),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
    (r"^(-?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}"),
))
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"[-+]?[0-9]{1,300}(?:\.[0-9]{1,300})?")
_FRACTION = re.compile(r"([-+]?)([0-9]{0,300})\\frac\{(-?[0-9]{1,300})\}\{(-?[0-9]{1,300})\}")


def boxed_answer(solution: str) -> str | None:
    r"""What stands in the last `\boxed{...}` (or `\fbox`, or `\boxed 5`); None where there is none, or no end."""
    starts = [found.end() for found in re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])", solution)]
    rest = solution[starts[-1]:].lstrip() if starts else ""
    if not rest.startswith("{"):
        return re.split(r"[$\n]", rest, maxsplit=1)[0].strip() or None
    depth = 0
    for found in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # an escaped brace is no brace
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return rest[1:found.start()].strip()
    return None


def canonical(answer: str) -> str:
    """An answer in one spelling: no spaces, units, sizes of brackets or dollar signs; fractions as `\\frac{a}{b}`."""
    text = answer.strip().strip("$")
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def rational(text: str) -> Fraction | None:
    """The value of a canonical integer, decimal, fraction or mixed number; None for everything else."""
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    found = _FRACTION.fullmatch(text)
    if found is None or not int(found[4]):
        return None
    value = int(found[2] or 0) + Fraction(int(found[3]), int(found[4]))
    return -value if found[1] == "-" else value


def math_equal(one: str | None, other: str | None) -> bool:
    """Are the spellings the same, or the numbers? None (no answer) equals nothing."""
    if one is None or other is None:
        return False
    first, second = canonical(one), canonical(other)
    value = rational(first)
    return first == second or (value is not None and value == rational(second))


class MathMatch(evaluate.Metric):
    r"""Share of solutions whose boxed answer is equivalent to the reference's.

    `MathMatch().compute(predictions=[...], references=[...])` gives {"exact_match"}; both are solutions with a
    `\boxed{...}`. Compares spellings, and rational numbers by value; there is no algebra, so x+1 is not 1+x.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Share of solutions with the right boxed answer (MATH).", citation=_CITATION,
            inputs_description="predictions, references: solutions with their answer in \\boxed{...}.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        if not predictions:
            raise ValueError("there are no predictions to score; give one or more")
        answers = [boxed_answer(reference) for reference in references]
        if None in answers:
            raise ValueError(f"the reference has no \\boxed{{...}}: {references[answers.index(None)][-80:]!r}")
        pairs = zip(predictions, answers, strict=True)
        return {"exact_match": sum(math_equal(boxed_answer(one), other) for one, other in pairs) / len(predictions)}
