"""Does the benchmark of kernels read its arguments, name what is missing, and write complete lines?"""

from __future__ import annotations

import json

import pytest
import torch
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")


def test_a_missing_peer_is_named(tmp_path, capsys):
    bench, out = program("bench_kernels"), tmp_path / "out.jsonl"
    if not program("bench_kernels.samples").has_schedstat():
        pytest.skip("this system has no /proc/self/task/*/schedstat")
    asked = ["--op", "bf16_linear", "--m", "64", "--k", "128", "--n", "1,3", "--samples", "1", "--quick", "--threads",
             "1", "--rotate", "1", "--probe", "1", "--json", str(out)]
    with torch.inference_mode():
        assert bench.main(asked) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(e["contender"], e["n"]) for e in found] == [
        (name, n) for n in (1, 3) for name in ("bf16", "torch bf16", "ggml bf16")
    ]
    assert "--ggml" in found[2]["missing"]
    assert "missing: no --ggml" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    ours = found[0]
    assert ours["ms"] > 0
    assert ours["ratios"]["torch bf16"] == pytest.approx(ours["ms"] / found[1]["ms"])
    assert ours["machine"]["commit"] is None or ours["machine"]["commit"]


@pytest.mark.parametrize(("asked", "named"), [(["--m", "100"], "--m is 100"), (["--k", "96"], "--k is 96")])
def test_a_shape_no_format_holds_is_refused(asked, named, capsys):
    assert program("bench_kernels").main(["--quick", *asked]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1,x", "0", "-2"])
def test_n_is_a_list_of_positive_numbers(text, capsys):
    with pytest.raises(SystemExit):
        program("bench_kernels").parse([f"--n={text}"])
    assert "positive numbers" in capsys.readouterr().err


def test_weights_go_round_in_even_numbers():
    bench, made = program("bench_kernels"), program("bench_kernels.contenders").Contender
    assert bench.copies_of([made("a", 100, None), made("b", 60, None)], 2000) == 14
    assert bench.copies_of([made("a", 100, None)], 10) == 2
    taken = []
    call = bench.going_round(taken.append, 3)
    for _ in range(4):
        call()
    assert taken == [0, 1, 2, 0]


def test_a_product_with_another_weight_is_noticed():
    peers = program("bench_kernels.contenders")
    weights, x = peers.Weights(64, 128), torch.randn(2, 128)
    assert peers.error(x @ weights.slab.T, x, weights) < 1e-5
    assert peers.error(x @ weights.slab.flip(0).T, x, weights) > peers.LARGEST_ERROR
