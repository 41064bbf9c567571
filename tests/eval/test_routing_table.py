"""Does eval.routing.table measure five systems, of which the last loads planes on demand?"""

from __future__ import annotations

import argparse
import json
import math

import pytest
import torch

from eval.routing.table import (
    System,
    accuracy,
    items_of,
    main,
    questions_of,
    right_numbers,
    tasks_of,
    windows_of,
    worked,
)


@pytest.mark.slow
def test_five_systems_are_measured(tmp_path):
    out, ptb = tmp_path / "found.json", tmp_path / "ptb.txt"
    ptb.write_text("the company said it expects N million shares \n" * 200)
    assert main(["--quick", "--windows", "2", "--new-tokens", "2", "--repeats", "1", "--json", str(out),
                 "--ptb", str(ptb)]) == 0  # fmt: skip
    _, *lines = json.loads(out.read_text())
    assert [line["name"] for line in lines] == [
        "BF16", "static 8", "static 4", "routed, all in memory", "routed, loaded on demand"
    ]  # fmt: skip
    held = {line["name"]: line["held_mb"] for line in lines}
    assert held["static 4"] < held["routed, loaded on demand"] < held["routed, all in memory"] == held["static 8"]
    assert all(1 < line["ptb"] != line["perplexity"] for line in lines)
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


def test_tasks_are_those_whose_files_are_there(tmp_path):
    (tmp_path / "piqa").mkdir()
    (tmp_path / "winogrande").mkdir()
    (tmp_path / "piqa" / "valid.jsonl").write_text(json.dumps({"goal": "a", "sol1": "b", "sol2": "c"}))
    (tmp_path / "piqa" / "valid-labels.lst").write_text("1\n")
    item = {"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"}
    (tmp_path / "winogrande" / "dev.jsonl").write_text(json.dumps(item))
    assert list(tasks_of(str(tmp_path), Words(), 1)) == ["piqa", "winogrande"]
    (tmp_path / "hellaswag").mkdir()
    item = {"activity_label": "Run", "ctx_a": "A man", "ctx_b": "then", "endings": ["a", "b", "c", "d"], "label": 2}
    (tmp_path / "hellaswag" / "hellaswag_val.jsonl").write_text(json.dumps(item))
    arc = tmp_path / "arc" / "ARC-Easy"
    arc.mkdir(parents=True)
    choices = [{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]
    item = {"question": {"stem": "s", "choices": choices}, "answerKey": "B"}
    (arc / "ARC-Easy-Test.jsonl").write_text(json.dumps(item))
    found = tasks_of(str(tmp_path), Words(), 1)
    assert list(found) == ["piqa", "winogrande", "arc_easy", "hellaswag"]
    assert [items[0].gold for items in found.values()] == [1, 0, 1, 2]
    assert len(found["hellaswag"][0].answers) == 4


class Writer:
    """Writes an answer of its own behind any question."""

    def __init__(self, answer):
        self.answer = torch.tensor([[ord(one) for one in answer]])

    def generate(self, ids, **how):
        return torch.cat([ids, self.answer[:, : how["max_new_tokens"]]], 1)


class Letters(Words):
    def decode(self, ids, **_):
        return "".join(map(chr, ids.tolist()))


def test_answers_to_questions_are_right_where_their_last_number_is(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    items = [{"question": f"{n} and 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(3)]
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, items)))
    assert questions_of(str(tmp_path), Letters(), 0) == []
    found = questions_of(str(tmp_path), Letters(), 2)
    assert [own.written for own in found] == ["It is 1.\n#### 1", "It is 2.\n#### 2"]
    assert found[0].ids == [ord(one) for one in "Question: 0 and 1?\nAnswer:"]
    assert found[0].answer[:4] == [ord(one) for one in " It "]
    args = argparse.Namespace(device=torch.device("cpu"), answer_tokens=16)
    for answer, share in ((" so 2", 0.5), (" no number", 0.0), (" 1 Question: 2", 0.5), (" 7", 0.0)):
        assert right_numbers(System("made up", Writer(answer)), found, Letters(), args) == share

    class Fixed(System):
        def nats(self, rows, query):
            return torch.tensor([float(rows.shape[1] - query) * 2.0])

    assert worked(Fixed("made up", None), found, torch.device("cpu")) == pytest.approx(math.exp(2))


def test_a_text_without_a_window_is_named():
    args = argparse.Namespace(windows=4, tokens=8, device=torch.device("cpu"))
    assert windows_of("a" * 33, Words(), args).shape == (4, 8)
    with pytest.raises(ValueError, match="a text of 7 tokens has no window of 8"):
        windows_of("a" * 7, Words(), args)
