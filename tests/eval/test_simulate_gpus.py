"""Does the simulator of several GPUs add up what it was given, and does it say what it cannot read?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.simulate_gpus.__main__ import main
from eval.simulate_gpus.model import Chain, Node, Shape, at, chained, fits, most_users, step, summing

COSTS = Path(__file__).resolve().parents[2] / "eval" / "configs" / "gpus_h200.toml"
NODE = Node(bandwidth=1e9, flops=1e12, memory=1e9, fixed={"bf16": [(1, 1e-3)], "mxfp4": [(1, 2e-3)]},
            sums=[(1, 1e-5), (3, 3e-5)], head=1e-4, gpus=2)  # fmt: skip
SHAPE = Shape(hidden=4096, inner=8192, layers=2, heads=32, kv_heads=8, vocab=1000)


def test_a_step_is_what_is_read_and_what_does_not_shrink():
    weights = 2 * (4096 * 128 * 80 + 3 * 4096 * 8192) + 1000 * 4096
    assert SHAPE.weights == weights
    read = (2 * weights + 4 * 512 * 2 * 8 * 128) / 1e9
    assert step(NODE, SHAPE, "bf16", 1, 1) == pytest.approx(read + 2e-3)
    assert step(NODE, SHAPE, "bf16", 2, 1) == pytest.approx(read / 2 + 2e-3 + 4 * 1e-5 + 1e-4)
    assert step(NODE, SHAPE, "mxfp4", 1, 1, 4, 0) == pytest.approx(weights * 4.25 / 8 / 1e9 + 4e-3)
    assert step(NODE, SHAPE, "bf16", 1, 4000, 1, 0) == pytest.approx(2 * weights * 4000 / 1e12 + 2e-3)  # arithmetic


def test_links_are_read_between_and_beyond_what_was_measured():
    assert [at([(1, 1.0), (3, 3.0)], x) for x in (0, 2, 9)] == [1.0, 2.0, 3.0]
    assert summing(NODE, SHAPE, 1, 8) == 0
    assert summing(NODE, SHAPE, 2, 2) == pytest.approx(4 * 2e-5 + 1e-4)
    assert summing(NODE, SHAPE, 4, 2) == pytest.approx(4 * 3e-5 * 2 + 1e-4)  # parts of three others


def test_a_chain_and_its_users():
    chain = Chain(casts=2, drafted=3, gained=6, tiny=1e-4)
    expected = step(NODE, SHAPE, "bf16", 1, 1, 9) + 2 * (step(NODE, SHAPE, "mxfp4", 1, 1, 4) + 3e-4)
    assert chained(NODE, SHAPE, chain, 1, 1) == pytest.approx(expected)
    assert chained(NODE, SHAPE, chain, 1, 1, nested=True) > expected
    users = most_users(NODE, SHAPE, None, 1, 512, 1.0, "alone")
    assert fits(NODE, SHAPE, 1, users, 512, "alone")
    assert not (fits(NODE, SHAPE, 1, users + 1, 512, "alone") and step(NODE, SHAPE, "bf16", 1, users + 1) <= 1)
    assert most_users(NODE, SHAPE, None, 1, 512, 1e6, "alone") == 0
    assert most_users(NODE, SHAPE, chain, 1, 512, 1.0, "cast") <= users


def test_it_answers_for_shapes_and_stands_beside_what_was_measured(capsys):
    assert main([str(COSTS)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    compared = [line for line in lines if line["kind"] == "compared"]
    assert max(abs(line["off"]) for line in compared if line["gpus"] == 1) < 0.01  # what its costs were made of
    assert max(abs(line["off_from_part"]) for line in compared if "part_ms" in line) < 0.1
    plans = {(line["shape"], line["gpus"]): line for line in lines if line["kind"] == "plan"}
    assert plans["llama-3-70b", 1]["held"] is None
    assert plans["llama-3-405b", 8]["held"] == "nested"  # a cast beside it has no room
    assert plans["llama-3-8b", 1]["gain"] > plans["llama-3-8b", 8]["gain"] > 1


@pytest.mark.parametrize(("text", "said"), [
    ("", "has no 'gpu'"),
    ("[gpu", "Expected"),
    ("[gpu]\nspeed = 1\n[gpu.fixed.bf16]\n1 = 1\n[links]\n[links.sums]\n1 = 1\n[shapes]\n[chain]\n", "speed"),
])  # fmt: skip
def test_costs_that_cannot_be_read_are_one_error(tmp_path, capsys, text, said):
    (tmp_path / "costs.toml").write_text(text)
    assert main([str(tmp_path / "costs.toml")]) == 2
    assert said in capsys.readouterr().err
    assert main([str(tmp_path / "none.toml")]) == 2
