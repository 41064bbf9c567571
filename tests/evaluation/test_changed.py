"""Is it said in one short line in what the request of an earlier run differs?"""

from __future__ import annotations

import pytest

from hf_mlspec.evaluation import what_changed


@pytest.mark.parametrize(("was", "now", "told"), [
    ({"a": 1}, {"a": 1}, ""), ({"a": 1, "b": 2}, {"a": 1, "b": 3}, "b: 2 -> 3"),
    ({"machine": {"commit": "abc", "torch": "2"}}, {"machine": {"commit": "def", "torch": "2"}},
     'machine.commit: "abc" -> "def"'),
    ({"systems": [{"levels": ["mxfp4"]}]}, {"systems": [{"levels": ["ngram"]}]},
     'systems[0].levels[0]: "mxfp4" -> "ngram"'),
    ({"levels": ["a"]}, {"levels": ["a", "b"]}, 'levels: ["a"] -> ["a", "b"]'),
    ({"a": None}, {"b": 1}, "a: null -> not said; b: not said -> 1"), ({"a": 1}, {"a": 1.5}, "a: 1 -> 1.5")])
def test_only_what_differs_is_said(was, now, told):
    assert what_changed(was, now) == told


def test_a_line_stays_short():
    told = what_changed({str(n): "x" * 500 for n in range(9)}, {str(n): "y" * 500 for n in range(9)})
    assert told.endswith("; and 3 more")
    assert len(told) < 700
    assert "\n" not in told


@pytest.mark.parametrize(("was", "now"), [("folder/" * 20 + "one", "folder/" * 20 + "two"),
                                          (["code-4m"] * 9, ["code-4m"] * 10), ("a" * 39, "a" * 3)])
def test_long_values_that_begin_alike_are_told_apart(was, now):
    before, after = what_changed({"a": was}, {"a": now}).removeprefix("a: ").split(" -> ")
    assert before != after
    assert max(len(before), len(after)) <= 40
