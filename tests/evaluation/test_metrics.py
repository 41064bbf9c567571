"""Do the metrics score what they say, also when they are loaded by path without a network?"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_mlspec import evaluation
from hf_mlspec.evaluation import MathMatch, NumberMatch, PassAtK
from hf_mlspec.evaluation.metrics_math import boxed_answer, canonical, math_equal
from hf_mlspec.evaluation.metrics_number import last_number, marked_number
from hf_mlspec.evaluation.metrics_pass_at_k import pass_at_k

FOLDER = Path(evaluation.__file__).parent


@pytest.mark.parametrize(("text", "marked", "last"), [
    ("so 3 + 4 = 7\n#### 7", 7, 7), ("#### $1,000.50", Fraction(2001, 2), Fraction(2001, 2)), ("####18.", 18, 18),
    ("#### -5 apples", -5, -5), ("#### .5", Fraction(1, 2), Fraction(1, 2)), ("####", None, None), ("", None, None),
    ("it is 12.", None, 12), ("#### 3 and then 4", 3, 4), ("####\n5", None, 5), ("#### x 5", None, 5),
    ("#### " + "9" * 5000, None, None), ("#### 007", 7, 7), ("10-5", None, 5), ("x = -5", None, -5), ("-$5", None, -5),
])  # fmt: skip
def test_numbers_of_answers(text, marked, last):
    assert marked_number(text) == marked
    assert last_number(text) == last


@given(st.integers(-(10**12), 10**12), st.integers(0, 99))
def test_numbers_as_they_are_written(whole, cents):
    assert marked_number(f"#### {whole:,}") == last_number(f"that is {whole}.") == whole
    sign = -1 if whole < 0 else 1
    assert marked_number(f"#### {whole:,}.{cents:02d}") == whole + sign * Fraction(cents, 100)


SAME = [
    (r"\frac12", "1/2"), ("0.5", r"\dfrac{1}{2}"), ("1,000", "1000"), (r"10\text{ cm}^2", "10"), ("x=5", "5"),
    (r"\left(1,2\right)", "(1, 2)"), (r"90^\circ", "90"), (r"90^{\circ}", "90"), (r"50\%", "50"), (r"\$5", "5"),
    (r"\text{blue}", "blue"), (r"\sqrt3", r"\sqrt{3}"), (r"1\frac{1}{2}", "1.5"), (r"-\frac{1}{2}", "-.5"),
    (r"\frac{-1}{2}", "-0.5"), ("x^{2}", "x^2"), (r"1{,}000", "1000"), (r"11,\!111", "11111"), ("5.", "5"),
    ("[0,1]", r"x \in [0,1]"), (r"\frac{1}{2}", r"\frac{2}{4}"), (r"2\pi", r"2\, \pi"), (r"\leq 3", r"\le 3"),
    (r"\text{(A)}", "(A)"), (r"3\ \mbox{inches}", "3"), ("$7$", "7"), (r"\frac{3}4", "3/4"), (r"-1\frac12", "-1.5"),
    (r"\frac ab", r"\frac{a}{b}"), (r"\tfrac{1}{3}", r"\frac{1}{3}"), ("7.0", "7"),
    (r"\dfrac12", "0.5"), (r"1,\quad2", "1,2"), (r"\dfrac ab", r"\frac{a}{b}"),
    (r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", r"\begin{pmatrix}1\\-2\end{pmatrix}"),
]  # fmt: skip
OTHER = [("(1,2)", "[1,2]"), ("1,2", "12"), ("1", "2"), ("x", "y"), ("1/0", "1"), (r"\leftarrow", "arrow"),
         ("-1", "1"), ("(-1,1)", "(1,1)"), (r"\frac{1}{2}", r"\frac{2}{1}"), ("x^{12}", "x^12"),
         (r"\sqrt{12}", r"\sqrt12"), ("1.5", "15"), ("a=b=c", "c"), ("2/3", "0.6667")]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_answers_that_mean_the_same(one, other):
    assert math_equal(one, other)
    assert math_equal(other, one)


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_answers_that_differ(one, other):
    assert not math_equal(one, other)
    assert not math_equal(other, one)


def test_no_answer_equals_nothing():
    assert not math_equal(None, None)
    assert not math_equal("", None)


@given(st.text(st.characters(codec="ascii"), max_size=40))
def test_any_text_equals_itself(text):
    assert math_equal(text, text)
    assert isinstance(canonical(text), str)


@pytest.mark.parametrize(("solution", "answer"), [
    (r"so \boxed{\frac{1}{2}}, done", r"\frac{1}{2}"), (r"$\boxed 5$", "5"), (r"\boxed{\{1\}}", r"\{1\}"),
    (r"\boxed{1} or \fbox{2}", "2"), (r"\boxed{1", None), ("none", None), (r"\boxed", None), (r"\boxedtext{1}", None),
    (r"\boxed {3}", "3"),
])  # fmt: skip
def test_boxed_answers(solution, answer):
    assert boxed_answer(solution) == answer


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_the_estimate_of_pass_at_k(counts):
    samples, passed, k = counts
    product = math.prod(1 - k / i for i in range(samples - passed + 1, samples + 1)) if samples - passed >= k else 0.0
    assert pass_at_k(samples, passed, k) == pytest.approx(1 - product)  # the paper's product, Figure 3


@pytest.mark.parametrize("counts", [(5, 6, 1), (5, -1, 1), (5, 2, 6), (5, 2, 0)])
def test_an_estimate_that_cannot_be(counts):
    with pytest.raises(ValueError, match="1 <= k <= samples"):
        pass_at_k(*counts)


def metric(name, loaded):
    if not loaded:
        return {"number": NumberMatch, "math": MathMatch, "pass_at_k": PassAtK}[name]()
    import evaluate

    return evaluate.load(str(FOLDER / f"metrics_{name}.py"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """Modules that evaluate copies go into this test's folder."""
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path))


@pytest.mark.parametrize("loaded", [False, True], ids=["class", "path"])
def test_metrics_by_class_and_by_path(loaded):
    numbers = metric("number", loaded).compute(predictions=["#### 5", "it is 5"], references=["#### 5", "x\n#### 5"])
    assert numbers == {"exact_match": 0.5, "flexible_match": 1.0}
    pairs = {"predictions": [r"\boxed{1/2}", "0.5"], "references": [r"\boxed{0.5}"] * 2}
    assert metric("math", loaded).compute(**pairs) == {"exact_match": 0.5}


@pytest.mark.parametrize("loaded", [False, True], ids=["class", "path"])
def test_pass_at_k_runs_programs(loaded):
    programs = [["x = 1", "x = 2"], ["x = 3", "x = 4"]]
    scores = metric("pass_at_k", loaded).compute(predictions=programs, references=["assert x == 1"] * 2, k=[1, 2])
    assert scores == {"pass@1": 0.25, "pass@2": 0.5}
    with pytest.raises(ValueError, match=r"k=\[3\]: give numbers from 1 to 2"):
        metric("pass_at_k", loaded).compute(predictions=programs, references=["pass"] * 2, k=[3])


@pytest.mark.parametrize("k", [2, [2], []])
def test_a_k_that_is_a_number_or_none(k):
    options = {"predictions": [["pass", "pass"]], "references": ["assert True"], "k": k}
    if k:
        assert PassAtK().compute(**options) == {"pass@2": 1.0}
    else:
        with pytest.raises(ValueError, match=r"k=\[\]: give numbers from 1 to 2"):
            PassAtK().compute(**options)


@pytest.mark.parametrize("kind", [NumberMatch, MathMatch, PassAtK])
def test_nothing_to_score(kind):
    with pytest.raises(ValueError, match=r"there are no .* give .*one or more"):
        kind().compute(predictions=[], references=[])


def test_references_without_an_answer():
    with pytest.raises(ValueError, match=r"the reference has no \\boxed\{...\}: 'five'"):
        MathMatch().compute(predictions=[r"\boxed{5}"], references=["five"])
    with pytest.raises(ValueError, match="the reference has no number after '####': 'five'"):
        NumberMatch().compute(predictions=["#### 5"], references=["five"])
