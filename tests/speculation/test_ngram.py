"""Does the n-gram table count what is settled, once, within its bound, and survive being saved?"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_rounds import CPU, Plan, play, proposals
from safetensors.torch import save_file

from hf_mlspec.speculation.draft import Drafter
from hf_mlspec.speculation.drafters.ngram import NGram, NGramFileError
from hf_mlspec.speculation.drafters.ngram_table import NGramTable


def learned(*texts: list[int], **options) -> NGram:
    ngram = NGram(**options)
    for text in texts:
        ngram.learn(text)
    ngram.start(1, CPU)
    return ngram


def contents(ngram: NGram) -> dict:
    return {context: dict(successors.counts) for context, successors in ngram.table.contexts.items()}


def by_definition(rows: list[list[int]], order: int) -> dict:
    table: dict[tuple[int, ...], Counter] = {}
    for row in rows:
        for i in range(1, len(row)):
            for n in range(1, min(order - 1, i) + 1):
                table.setdefault(tuple(row[i - n:i]), Counter())[row[i]] += 1
    return {context: dict(counts) for context, counts in table.items()}


class Words:
    """A tokenizer of words that are numbers."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        assert not add_special_tokens
        return {"input_ids": [int(word) for word in text.split()]}


def test_longest_context_first_then_shorter_ones():
    ngram = learned([1, 2, 3, 10], [9, 2, 3, 20], [8, 2, 3, 20], order=4)
    assert proposals(ngram, [[1, 2, 3]], [1]) == [[10]]
    ngram.start(1, CPU)
    assert proposals(ngram, [[50, 2, 3]], [1]) == [[20]]


def test_stops_before_a_token_below_the_threshold():
    texts = [[1, 2], [1, 2], [1, 3], [2, 5]]
    assert proposals(learned(*texts, threshold=0.6), [[1]], [4]) == [[2, 5]]
    assert proposals(learned(*texts, threshold=0.7), [[1]], [4]) == [[]]


def test_ties_go_to_the_lowest_id_whatever_came_first():
    assert proposals(learned([1, 9], [1, 4]), [[1]], [1]) == [[4]]
    assert proposals(learned([1, 4], [1, 9]), [[1]], [1]) == [[4]]


def test_settled_tokens_of_a_row_are_counted_once():
    ngram = NGram(order=3)
    ngram.start(2, CPU)
    rows = [[1, 2, 3], [5]]
    for token in (4, 5, 6):
        proposals(ngram, rows, [2, 0])
        ngram.rollback([len(row) for row in rows])
        rows = [[*row, token] for row in rows]
    proposals(ngram, rows, [0, 0])
    assert contents(ngram) == by_definition(rows, 3)


@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(2, 5), st.integers(2, 4), st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_rollbacks_leave_what_a_fresh_drafter_has(seed, batch, vocab, order, tentative):
    ngram, dropped = NGram(order, threshold=0.3), []

    def check(rows, limits, proposed):
        if len(rows) < batch:  # finished rows stay counted: a fresh drafter has not seen them
            return
        fresh = NGram(order, threshold=0.3)
        fresh.start(len(rows), CPU)
        assert proposed == proposals(fresh, rows, limits)
        assert contents(ngram) == contents(fresh) == by_definition(rows, order)
        assert ngram.table.entries == sum(map(len, contents(ngram).values()))
        dropped.append(rows)

    play(ngram, Plan(seed, batch, 6, vocab, tentative), check)
    assert dropped


def test_rollback_uncounts_at_once():
    ngram = NGram(order=3)
    ngram.start(2, CPU)
    rows = [[1, 2, 3, 1, 2], [2, 3, 2, 3]]
    proposals(ngram, rows, [1, 1])
    ngram.rollback([2, 9])
    assert contents(ngram) == by_definition([[1, 2], [2, 3, 2, 3]], 3)


def test_select_keeps_the_rows_asked_for_and_all_counts():
    ngram = NGram(order=2)
    ngram.start(3, CPU)
    proposals(ngram, [[1, 2], [3, 4], [5, 6]], [0, 0, 0])
    ngram.rollback([2, 2, 2])
    ngram.select([2])
    assert proposals(ngram, [[5, 6, 1]], [1]) == [[2]]
    assert contents(ngram) == {(1,): {2: 1}, (3,): {4: 1}, (5,): {6: 1}, (6,): {1: 1}}


def test_start_forgets_rows_and_keeps_what_was_learned():
    ngram = NGram(order=2)
    ngram.start(1, CPU)
    proposals(ngram, [[1, 2, 3]], [0])
    ngram.start(2, CPU)
    assert proposals(ngram, [[1], [7]], [2, 2]) == [[2, 3], []]
    assert isinstance(ngram, Drafter)


def test_from_text_with_its_arguments_swapped_says_so():
    with pytest.raises(TypeError, match="a text, then its tokenizer: got Words, then str"):
        NGram.from_text(Words(), "1 2 3")


def test_from_text_counts_each_text_on_its_own():
    one = NGram.from_text("1 2 3", Words(), order=3)
    assert contents(one) == by_definition([[1, 2, 3]], 3)
    two = NGram.from_text(iter(["1 2", "3 4"]), Words(), order=3)
    assert contents(two) == by_definition([[1, 2], [3, 4]], 3)
    assert two.largest_token == 4
    assert NGram().largest_token == -1


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 40))
def test_the_bound_always_holds(tokens, bound):
    table = NGramTable(bound)
    for context, token in pairwise(tokens):
        table.add((context,), token)
        assert table.entries == sum(len(successors.counts) for successors in table.contexts.values()) <= bound


def test_the_context_counted_longest_ago_is_evicted():
    table = NGramTable(3)
    for context, token in [(1, 5), (2, 5), (3, 5), (1, 5), (4, 5)]:
        table.add((context,), token)
    assert list(table.contexts) == [(3,), (1,), (4,)]
    table.remove((2,), 5)  # evicted: nothing to take back
    assert table.entries == 3
    assert table.best((1,)) == (5, 1.0)


def test_saved_and_loaded_is_the_same_table(tmp_path):
    ngram = learned([1, 2, 3, 1, 2, 4, 1, 2, 4], [7, 1, 2], order=3, threshold=0.25, max_entries=50, name="mine")
    ngram.save(tmp_path / "table.safetensors")
    again = NGram.load(tmp_path / "table.safetensors")
    assert (again.order, again.threshold, again.table.max_entries, again.name) == (3, 0.25, 50, "mine")
    assert contents(again) == contents(ngram)
    assert list(again.table.contexts) == list(ngram.table.contexts)
    assert again.table.entries == ngram.table.entries
    assert [path.name for path in tmp_path.iterdir()] == ["table.safetensors"]


def test_an_empty_table_can_be_saved(tmp_path):
    NGram().save(tmp_path / "empty")
    assert contents(NGram.load(tmp_path / "empty")) == {}


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table"
    learned([1, 2]).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("hf_mlspec.speculation.drafters.ngram.os.replace", fail)
    with pytest.raises(OSError, match="no space left"):
        learned([3, 4]).save(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["table"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        NGram.load(tmp_path / "nowhere")


@pytest.mark.parametrize("damage", ["text", "truncated", "other", "followers", "counts", "dtype", "negative", "bound"])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    path = tmp_path / "damaged"
    ngram = learned([1, 2, 3, 4], order=3)
    ngram.save(path)
    meta = {"format": "hf_mlspec.ngram.1",
            "ngram": json.dumps({"order": 3, "max_entries": 2 if damage == "bound" else 99})}
    tensors = ngram.table.to_tensors(2)
    if damage == "text":
        path.write_text("not a table")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "other":
        save_file({"weight": torch.zeros(2)}, path)
    else:
        change = {"followers": lambda: {"followers": tensors["followers"][:-1]},
                  "counts": lambda: {"counts": tensors["counts"] * 0},
                  "dtype": lambda: {"tokens": tensors["tokens"].int()},
                  "negative": lambda: {"tokens": -tensors["tokens"]},
                  "bound": dict}[damage]()
        save_file(tensors | change, path, meta)
    with pytest.raises(NGramFileError, match=f"{path}.*NGram.from_text"):
        NGram.load(path)


@pytest.mark.parametrize(("options", "message"), [({"order": 1}, "not 1"), ({"threshold": 1.5}, "not 1.5"),
                                                  ({"max_entries": 0}, "max_entries=0")])
def test_bad_options_are_refused_with_the_number(options, message):
    with pytest.raises(ValueError, match=message):
        NGram(**options)
