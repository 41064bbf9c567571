"""Does the simulator of several GPUs add up what it was given, and does it say what it cannot read?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.simulate_gpus.__main__ import main
from eval.simulate_gpus.model import Chain, Node, Shape, at, chained, fits, most_users, step, summing, told_apart

COSTS = Path(__file__).resolve().parents[2] / "eval" / "configs" / "gpus_h200.toml"
NODE = Node(flops=1e12, memory=1e9, fixed={"bf16": [(1, 1e-3)], "mxfp4": [(1, 2e-3)]},
            paces={"bf16": [(1, 1e-9)], "mxfp4": [(1, 1e-9)]}, sums=[(1, 1e-5), (3, 3e-5)], head=1e-4,
            gpus=2)  # fmt: skip
SHAPE = Shape(hidden=4096, inner=8192, layers=2, heads=32, kv_heads=8, vocab=1000)


def test_a_step_is_what_is_read_and_what_does_not_shrink():
    weights = 2 * (4096 * 128 * 80 + 3 * 4096 * 8192) + 1000 * 4096
    assert SHAPE.weights == weights
    read = (2 * weights + 4 * 512 * 2 * 8 * 128) / 1e9
    assert step(NODE, SHAPE, "bf16", 1, 1) == pytest.approx(read + 2e-3)
    assert step(NODE, SHAPE, "bf16", 2, 1) == pytest.approx(read / 2 + 2e-3 + 4 * 1e-5 + 1e-4)
    assert step(NODE, SHAPE, "mxfp4", 1, 1, 4, 0) == pytest.approx(weights * 4.25 / 8 / 1e9 + 4e-3)
    assert step(NODE, SHAPE, "bf16", 1, 4000, 1, 0) == pytest.approx(2 * weights * 4000 / 1e12 + 2e-3)  # arithmetic


def test_one_gpu_tells_bytes_and_the_rest_apart():
    assert told_apart([4e9, 2e9, 1e9], [5e-3, 3e-3, 2e-3], 10) == pytest.approx((1e-4, 1e-12))
    for seconds in ([1e-3, 2e-3, 3e-3], [8e-3, 3e-3, 1e-3]):
        with pytest.raises(ValueError, match=r"steps of 4e\+09, 2e\+09, 1e\+09 bytes took"):
            told_apart([4e9, 2e9, 1e9], seconds, 10)


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
    assert len(compared) >= 8
    assert max(abs(line["off"]) for line in compared) < 0.1
    assert max(abs(line["off_from_part"]) for line in compared if "part_ms" in line) < 0.1
    plans = {(line["shape"], line["gpus"]): line for line in lines if line["kind"] == "plan"}
    assert plans["llama-3-70b", 1]["held"] is None
    assert plans["llama-3-405b", 8]["held"] == "nested"  # a cast beside it has no room
    assert plans["llama-3-8b", 1]["gain"] > plans["llama-3-8b", 8]["gain"] > 1


GOOD = """
[gpu]
flops = 1e12
memory = 1e9
[steps]
shape = "small"
shares = [1, 2]
cached = 0
bf16 = {"1x1" = [3.0, 2.0]}
[links]
head = 1e-5
sums = {1 = 1e-6}
[chain]
casts = 2
drafted = 3
gained = 6
tiny = 1e-4
[shapes.small]
hidden = 512
inner = 1024
layers = 2
heads = 4
kv_heads = 2
vocab = 100
"""
MEASURED = '[[measured]]\nwhat = "alone"\nshape = "small"\ngpus = 1\nrows = 1\nms = 3.0\n'


@pytest.mark.parametrize(("text", "said"), [
    ("", "has no 'shapes'"),
    ("[gpu", "Expected"),
    (GOOD.replace("flops", "speed"), "speed"),
    (GOOD.replace("[3.0, 2.0]", "[2.0, 3.0]"), "no bytes beside a fixed time"),
    (GOOD.replace("[1, 2]", "[1, 1]"), "shares has to name two or more"),
    (GOOD.replace('"1x1"', '"1"'), "1"),
    (GOOD + MEASURED.replace('"small"', '"large"'), "shape of a measurement is 'large', known are small"),
    (GOOD + MEASURED.replace("alone", "both"), "what of a measurement is 'both', known are alone, chain"),
    (GOOD + MEASURED.replace("rows = 1", ""), "rows of a measurement of small is None"),
    (GOOD + MEASURED + "part_ms = 0\n", "part_ms of a measurement of small is 0"),
])  # fmt: skip
def test_costs_that_cannot_be_read_are_one_error(tmp_path, capsys, text, said):
    (tmp_path / "costs.toml").write_text(text)
    assert main([str(tmp_path / "costs.toml")]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert main([str(tmp_path / "none.toml")]) == 2


def test_costs_that_can_be_read_are_compared(tmp_path, capsys):
    (tmp_path / "costs.toml").write_text(GOOD + MEASURED)
    assert main([str(tmp_path / "costs.toml")]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (first["kind"], first["predicted_ms"]) == ("compared", pytest.approx(3.0, rel=0.01))
