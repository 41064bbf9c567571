"""Do the ops of a captured round keep the books that plain Python keeps, and refuse what does not fit?"""

from __future__ import annotations

import pytest
import round_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from round_cases import ints, state

from hf_mlspec import ops


@pytest.mark.parametrize("op", ["open", "window", "push", "lookup", "settle"])
@settings(deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(1, 5), judged=st.integers(1, 6))
def test_books_are_those_of_plain_python(op, seed, batch, judged):
    getattr(round_cases, f"check_{op}")(seed, batch, judged)


def test_base_and_lengths_may_be_one_tensor():
    """A target without levels settles its own token behind no guesses."""
    tokens, base = ints([[3, 4, 0, 0], [5, 0, 0, 0]]), ints([2, 1])
    active, record = ints([1, 1]), ints([[9] * 3] * 2)
    ops.round_settle(tokens, base, base, active, ints([3, 4]), ints([6, 7]), torch.ones(2), 0.0, None, None, record,
                     ints([0, 0]), 1)  # fmt: skip
    assert tokens.tolist() == [[3, 4, 6, 0], [5, 7, 0, 0]]
    assert (base.tolist(), active.tolist(), record.tolist()) == ([3, 2], [0, 1], [[0, 0, 6], [0, 0, 7]])


GOOD = {
    "tokens": ints([[1, 2, 3]]), "base": ints([1]), "lengths": ints([1]), "active": ints([1]), "ends": ints([3]),
    "chosen": ints([2]), "confidence": torch.ones(1), "threshold": 0.5, "script": None, "cursor": None,
    "record": ints([[0, 0]]), "failed": ints([0]), "level": 1,
}  # fmt: skip
WRONG = {
    "tokens of int64": ({"tokens": torch.ones(1, 3, dtype=torch.int64)}, TypeError, "tokens is torch.int64"),
    "another batch": ({"tokens": ints([[1, 2], [3, 4]])}, ValueError, r"tokens has shape \[2, 2\]"),
    "columns apart": ({"tokens": ints([[1, 2], [3, 4], [5, 6]]).T[:1]}, ValueError, "dense in its rows"),
    "no rows": ({"base": ints([])}, ValueError, "at least one row"),
    "active of two": ({"active": ints([1, 1])}, ValueError, r"active has shape \[2\], expected \[1\]"),
    "sure of two": ({"confidence": torch.ones(2)}, ValueError, r"confidence has shape \[2\]"),
    "sure in bfloat16": ({"confidence": torch.ones(1).bfloat16()}, TypeError, "confidence is torch.bfloat16"),
    "threshold": ({"threshold": 1.0}, ValueError, "threshold is 1.0"),
    "script alone": ({"script": ints([[[1, 1]]])}, ValueError, "script was given without cursor"),
    "triples": ({"script": ints([[[1, 1, 1]]]), "cursor": ints([0])}, ValueError, r"\[1, rounds, 2\]"),
    "record": ({"record": ints([[0, 0, 0, 0]])}, ValueError, r"record has shape \[1, 4\]"),
    "level": ({"level": 0}, ValueError, "level is 0"),
}


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(wrong, error, words):
    operands = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in GOOD.items()}
    with pytest.raises(error, match=words):
        ops.round_settle(*{**operands, **wrong}.values())
    for name, value in operands.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, GOOD[name])


def test_fakes_have_the_shapes_of_results():
    s = state(3, 4)
    tokens, lengths, active = ints(s["tokens"]), ints(s["lengths"]), ints(s["active"])
    base, ends, chosen = ints(s["base"]), ints(s["ends"]), ints(s["chosen"][:4])
    vectors = [ints([0] * 4) for _ in range(3)]
    confidence, failed = torch.ones(4), ints([0] * 4)
    calls = {
        "round_open": (base, active, ends, 3, None, None, *vectors),
        "round_window": (tokens, base, lengths, active, 2, 5),
        "round_push": (tokens, lengths, active, ends, chosen, confidence, 0.5, failed, 1),
        "round_lookup": (tokens, lengths, active, ends, 1, 3),
        "round_settle": (tokens, base, lengths, active, ends, chosen, confidence, 0.5, None, None, ints([[0, 0]] * 4),
                         failed, 1),
    }  # fmt: skip
    for name, operands in calls.items():
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        assert set(torch.library.opcheck(getattr(torch.ops.mlspec, name).default, operands, test_utils=tests)
                   .values()) == {"SUCCESS"}  # fmt: skip
