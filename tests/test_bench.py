"""Do the two benchmarks read their arguments, name what is missing, and write complete lines, on tiny shapes?"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def program(name: str):
    return importlib.import_module(f"eval.{name}")


def test_a_missing_peer_is_named(tmp_path, capsys):
    bench, out = program("bench_kernels"), tmp_path / "out.jsonl"
    if not program("bench_kernels_samples").has_schedstat():
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
    bench, made = program("bench_kernels"), program("bench_kernels_contenders").Contender
    assert bench.copies_of([made("a", 100, None), made("b", 60, None)], 2000) == 14
    assert bench.copies_of([made("a", 100, None)], 10) == 2
    taken = []
    call = bench.going_round(taken.append, 3)
    for _ in range(4):
        call()
    assert taken == [0, 1, 2, 0]


def test_a_product_with_another_weight_is_noticed():
    peers = program("bench_kernels_contenders")
    weights, x = peers.Weights(64, 128), torch.randn(2, 128)
    assert peers.error(x @ weights.slab.T, x, weights) < 1e-5
    assert peers.error(x @ weights.slab.flip(0).T, x, weights) > peers.LARGEST_ERROR


def test_levels_are_one_chain_and_chains_are_many():
    bench = program("bench_decode")
    asked = bench.parse(["--model", "x", "--level", "mxfp4", "--level", "y", "--chain", "mxfp4", "--chain", "mxfp4,y"])
    assert bench.chosen_chains(asked) == [["mxfp4", "y"], ["mxfp4"], ["mxfp4", "y"]]
    assert bench.chosen_chains(bench.parse(["--model", "x"])) == []
    with pytest.raises(SystemExit):
        bench.parse(["--shape", "tiny", "--level", "mxfp4"])


def test_prompts_of_every_kind_are_read(tmp_path):
    read, file = program("bench_decode").read_prompts, tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a"}\n{"question": "b"}\n{"turns": ["c", "d"]}\n{"answer": "e"}\n')
    assert read(file, 3) == ["a", "b", "c"]
    with pytest.raises(ValueError, match="none of prompt, question, text, turns; it has answer"):
        read(file, 4)


def test_every_contender_has_a_line(saved_model, tmp_path):
    prompts, out = tmp_path / "words.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "def f("}\n')
    asked = ["--model", str(saved_model), "--level", "mxfp4", "--chain", str(saved_model), "--prompts", str(prompts),
             "--dtype", "float32", "--quick", "--threads", "1", "--json", str(out)]
    assert program("bench_decode").main(asked) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [e["contender"] for e in found] == [
        "stock greedy", "stock assisted", "target alone, prepared", "[mxfp4]", f"[{saved_model.name}]"
    ]
    assert found[2]["over target alone, prepared"] == pytest.approx(1)
    assert found[3]["levels"][0]["acceptance"] > 0
    assert found[4]["tokens_per_target_pass"] > 1
    assert all(e["machine"] and e["memory"]["target_bytes"] and e["data"] == "words" for e in found)


def test_a_geometric_mean_weighs_halving_as_doubling():
    mean = program("bench_decode_report").geometric_mean
    assert mean([2.0, 0.5]) == pytest.approx(1)
    assert mean([]) is None
    assert math.isclose(mean([3.0]), 3.0)
