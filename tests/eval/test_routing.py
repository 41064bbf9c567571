"""Are fixed widths, oracles and tests of chance what the program says they are?"""

from __future__ import annotations

import json

import pytest
import torch
from programs import program


@pytest.fixture
def routing(from_the_root):
    return program("routing")


def test_everything_is_measured_once(routing, tmp_path, capsys):
    out, picture = tmp_path / "out.jsonl", tmp_path / "kinds.png"
    words = ["--quick", "--threads", "1", "--repeats", "1", "--json", str(out), "--plot", str(picture)]
    assert routing.main(words) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    texts = {line["name"]: line for line in lines if line["part"] == "perplexity"}
    assert texts["dense"]["perplexity"] > 1
    assert texts["all planes"]["distance"] < texts["6 planes in every block"]["distance"]
    assert texts["6 planes in every block"]["distance"] < texts["3 planes in every block"]["distance"]
    routed, fixed = texts["routed"], texts["fixed widths, blended"]
    assert routed["bits"] == pytest.approx(fixed["bits"], abs=1e-4)
    oracle, its = texts["oracle, a choice for each query"], texts["fixed widths, of the oracle's queries"]
    assert oracle["bits"] == pytest.approx(its["bits"], abs=1e-4)
    assert oracle["distance"] < its["distance"]
    (choices,) = [line for line in lines if line["part"] == "choices"]
    assert 0 < choices["kinds_p"] <= 1
    assert choices["queries"] == 8
    for name in ("routed - fixed", "oracle - fixed", "all planes - dense"):
        (found,) = [line for line in lines if line.get("name") == name]
        assert found["nats_low"] <= found["nats"] <= found["nats_high"]
    assert [line["part"] for line in lines if line["part"] in ("prefill", "speed")] == ["prefill", "speed"]
    assert "kinds_p" in capsys.readouterr().out


class Model:
    """A scorer of two blocks of one weight each, whose distance is a sum over blocks and known for every width."""

    COSTS = ({2: 9.0, 4: 1.0, 8: 0.0}, {2: 3.0, 4: 2.0, 8: 0.0})

    def __init__(self, queries: int, found):
        self.rows, self.Found = torch.zeros(queries, 1), found
        self.blocks = [type("Block", (), {"weights": 1})() for _ in range(2)]

    def fixed(self, widths):
        return self.each([list(widths)] * len(self.rows))

    def each(self, widths):
        costs = [sum(cost[w] for cost, w in zip(self.COSTS, row, strict=True)) * (1 + number)
                 for number, row in enumerate(widths)]  # fmt: skip
        distance = torch.tensor(costs)
        return self.Found(distance, distance, torch.tensor([sum(row) / 2 for row in widths]), widths)


@pytest.fixture
def allocations(routing):
    return program("routing.allocations")


@pytest.fixture
def model(routing):
    return lambda queries: Model(queries, program("routing.scoring").Found)


def test_the_greedy_search_lowers_what_costs_least_a_bit(allocations, model):
    path = allocations.greedy(model(1), (2, 4, 8), 2.0, lambda: None)
    assert path == [[8, 8], [4, 8], [4, 4], [4, 2], [2, 2]]
    assert allocations.greedy(model(1), (2, 4, 8), 6.0, lambda: None) == [[8, 8], [4, 8]]


def test_fixed_widths_around_an_average_meet_it(allocations, model):
    scorer = model(1)
    path = allocations.greedy(scorer, (2, 4, 8), 2.0, lambda: None)
    above, below, share = allocations.around(path, scorer, 5.0)
    assert (above, below, share) == ([4, 8], [4, 4], 0.5)
    blended = allocations.blend(scorer.fixed(above), scorer.fixed(below), share)
    assert blended.bits.tolist() == [5.0]
    assert blended.distance.tolist() == [2.0]
    assert allocations.around(path, scorer, 9.0)[2] == 0.0


def test_the_oracle_finds_the_best_widths_of_each_query(allocations, model):
    # A bit of an average is worth 1.5: the first query pays 2 x 1 at [4, 4], the second twice as much.
    found = allocations.oracle(model(2), [4, 4], (2, 4, 8), 1.5, 2, lambda: None)
    every = [[a, b] for a in (2, 4, 8) for b in (2, 4, 8)]
    for number, widths in enumerate(found.widths):
        scored = {tuple(own): (1 + number) * sum(c[w] for c, w in zip(Model.COSTS, own, strict=True))
                  + 1.5 * sum(own) / 2 for own in every}  # fmt: skip
        assert scored[tuple(widths)] == min(scored.values())


def test_entropy_and_permutations(routing):
    choices = program("routing.choices")
    assert choices.entropy([4, 4, 4]) == 0
    assert choices.entropy([2, 4, 2, 4]) == 1
    kinds = torch.tensor([0] * 10 + [1] * 10)
    widths = torch.stack([kinds * 4.0 + 2, torch.full((20,), 3.0)], 1)
    assert choices.between_kinds(widths, kinds, 500, 0) == (4.0, pytest.approx(1 / 501))
    alike = torch.tensor([[2.0, 3.0], [4.0, 3.0]] * 10)
    assert choices.between_kinds(alike, kinds, 200, 0)[1] > 0.5
    assert choices.between_blocks(torch.tensor([[2.0, 8.0]] * 20), 500, 0) == (9.0, pytest.approx(1 / 501))
    assert choices.between_blocks(torch.full((20, 2), 3.0), 100, 0)[1] == 1.0
    mean, low, high = choices.interval(torch.tensor([1.0, 2.0, 3.0, 4.0]), 2000, 0)
    assert low < mean == 2.5 < high
    assert choices.interval(torch.ones(5), 100, 0) == (1.0, 1.0, 1.0)


def test_rows_are_of_every_kind_and_short_texts_are_refused(routing):
    def encode(text, **_):
        return {"input_ids": [ord(letter) for letter in text]}

    rows, kinds = routing.rows_of({"a": ["x" * 40], "b": ["y" * 90]}, encode, 10, 3)
    assert rows.shape == (6, 10)
    assert kinds.tolist() == [0, 0, 0, 1, 1, 1]
    assert set(rows[:3].flatten().tolist()) == {ord("x")}
    with pytest.raises(ValueError, match="text of a has 4 rows of 10 tokens, 5 were asked for"):
        routing.rows_of({"a": ["x" * 40]}, encode, 10, 5)


def test_calls_without_texts_are_refused(routing):
    with pytest.raises(SystemExit, match="give --model, --tune and --held, or --quick"):
        routing.main([])
