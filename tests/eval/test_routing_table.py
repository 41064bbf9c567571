"""Does eval.routing.table measure five systems, of which the last loads planes on demand?"""

from __future__ import annotations

import json

import pytest
import torch

from eval.routing.table import System, accuracy, items_of, main


@pytest.mark.slow
def test_five_systems_are_measured(tmp_path):
    out = tmp_path / "found.json"
    assert main(["--quick", "--windows", "2", "--new-tokens", "2", "--repeats", "1", "--json", str(out)]) == 0
    _, *lines = json.loads(out.read_text())
    assert [line["name"] for line in lines] == [
        "BF16", "static 8", "static 4", "routed, all in memory", "routed, loaded on demand"
    ]  # fmt: skip
    held = {line["name"]: line["held_mb"] for line in lines}
    assert held["static 4"] < held["routed, loaded on demand"] < held["routed, all in memory"] == held["static 8"]
    assert lines[3]["perplexity"] == pytest.approx(lines[4]["perplexity"], rel=1e-4)


class Words:
    """One id a letter."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(one) for one in text]}


def test_the_right_answer_is_the_one_whose_tokens_are_likeliest():
    class Fixed(System):
        def nats(self, rows, query):
            return torch.tensor([float(rows[0, query:].sum())])

    found = [
        {"prompt": "ab", "choices": ["z", "a"], "gold": 1},
        {"choices": ["a", "b"], "continuation": "c", "gold": 1},
        {"prompt": "", "choices": ["a", "b"], "gold": 0},
    ]
    items = items_of(found, Words(), 3)
    assert [item.gold for item in items] == [1, 1]  # one without a query is left out
    assert items[0].answers == [([97, 98], [32, 122]), ([97, 98], [32, 97])]
    assert items[1].answers[0] == ([97], [32, 99])
    assert accuracy(Fixed("made up", None), items, torch.device("cpu")) == 0.5
