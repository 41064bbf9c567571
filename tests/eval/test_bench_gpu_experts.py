"""Are mixtures of experts timed beside stock transformers, and are the bytes those of the experts that are reached?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")


def test_steps_and_prompts_are_timed_beside_stock(monkeypatch):
    experts, Bench = program("bench_gpu.experts"), program("bench_gpu.findings").Bench
    monkeypatch.setattr(experts, "BATCHES", (1, 4))
    bench = Bench(torch.device("cpu"), Path("models"), Path("data"), quick=True)
    found = {(line.what, line.contender): line for line in experts.experts(bench)}
    ours, stock = ("BF16", "MXFP4 cast, head too"), ("stock generate, batched_mm", "stock generate, grouped_mm")
    assert {name for _, name in found} == {*ours, *stock, "experts in MXFP4"}
    assert not bench.missing
    for batch in (1, 4):
        for name in (*ours, *stock):
            assert found[f"moe-tiny, 2 layers, batch {batch}", name].value > 0
        dense, cast = (found[f"moe-tiny, 2 layers, batch {batch}", name].more["bytes"] for name in ours)
        assert cast < dense / 2
    one, four = (found[f"moe-tiny, 2 layers, batch {batch}", "BF16"].more["bytes"] for batch in (1, 4))
    assert one < four
    assert found["moe-tiny, 2 layers, prompt of 64", "BF16"].value > 0
    tiny = {name: line for (what, name), line in found.items() if what == "gpt-oss-tiny, 2 layers, batch 1"}
    assert tiny["experts in MXFP4"].more["bytes"] < tiny["BF16"].more["bytes"]


def test_of_experts_those_count_that_uniform_routing_reaches():
    experts = program("bench_gpu.experts")
    model = experts.random_model("moe-tiny")
    held = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    assert experts.active_bytes(model, held + 1000, 1) == pytest.approx(held / 4 + 1000)  # 2 of 8
    assert experts.active_bytes(model, held + 1000, 2) == pytest.approx(held * (1 - 0.75**2) + 1000)
