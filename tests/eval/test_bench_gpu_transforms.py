"""Does the GPU benchmark time outliers, ordered and rotated inputs as multiples of the same step in int4?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs import program

pytestmark = pytest.mark.usefixtures("from_the_root")


def test_every_kind_is_timed_and_held_against_int4(monkeypatch):
    transforms = program("bench_gpu.transforms")
    monkeypatch.setattr(transforms, "WORDS", ("w4a4",))
    monkeypatch.setattr(transforms, "CASES", transforms.CASES[:1])
    bench = program("bench_gpu.findings").Bench(torch.device("cpu"), Path("models"), Path("data"), quick=True)
    with torch.no_grad():
        found = {one.contender: one.value for one in transforms.transforms(bench)}
    kinds = ["int4-int8", "int4-int8, ordered", "int4, rotated", "int4, down rotated"]
    assert set(found) == {"int4", *kinds, *(f"{kind} / int4" for kind in kinds)}
    for kind in kinds:
        assert found[f"{kind} / int4"] == found[kind] / found["int4"]


def test_the_models_are_what_they_are_called():
    transforms = program("bench_gpu.transforms")
    sizes = transforms.WIDE_ENOUGH
    made = transforms.ordered(transforms.random_outlier_model("tiny", torch.device("cpu"), **sizes))
    mlp = made.model.layers[1].mlp
    assert torch.equal(mlp.up_proj.transform_order, mlp.gate_proj.transform_order)
    assert not torch.equal(mlp.up_proj.transform_order, torch.arange(256, dtype=torch.int32))
    turned = transforms.rotated(transforms.random_int4_model("tiny", torch.device("cpu"), **sizes)).model.layers[0]
    assert turned.self_attn.o_proj.transform_hadamard.tolist() == [4, 1, 64]
    assert turned.mlp.down_proj.transform_hadamard.tolist() == [384, 12, 1]
    less = transforms.rotated(transforms.random_int4_model("tiny", torch.device("cpu"), **sizes), across_heads=False)
    assert less.model.layers[0].mlp.down_proj.transform_hadamard.tolist() == [384, 12, 1]
    assert less.model.layers[0].self_attn.o_proj.transform.word == "none"
