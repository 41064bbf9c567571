"""Does eval.bench_planes time streamed planes beside resident ones, and find the same ids?"""

from __future__ import annotations

import json

import pytest
import torch

from eval.bench_planes.__main__ import main
from eval.bench_planes.offload import offload
from eval.random_packed import random_planes_model


def test_rounds_and_prompts_are_timed(tmp_path):
    out = tmp_path / "found.json"
    small = ["--tokens", "12", "--rows", "2", "--repeats", "1", "--json", str(out)]
    assert main(["--quick", "--part", "rounds", "prompts", *small]) == 0
    found = {line.get("name"): line for line in json.loads(out.read_text())}
    for engine in ("modules", "compiled"):
        streamed = found[f"streamed, {engine}"]
        assert streamed["tokens_s"] > 0
        assert streamed["fetched_bytes"] > 0
    assert found["streamed, modules"]["tokens_a_round"] == found["resident, modules"]["tokens_a_round"]


def test_a_file_holds_what_memory_does_not(tmp_path):
    out = tmp_path / "found.json"
    assert main(["--part", "disk", "--budget", "6200KB", "--tokens", "12", "--json", str(out)]) == 0
    resident, streamed, ids = json.loads(out.read_text())
    assert ids["ids_equal"]
    assert streamed["drafts_fetched_bytes"] > 0
    assert resident["name"] == "resident"


def test_five_systems_stand_in_a_table_and_write_the_same_ids_on_demand(tmp_path):
    out = tmp_path / "found.json"
    assert main(["--quick", "--part", "table", "--repeats", "1", "--json", str(out)]) == 0
    *lines, ids = json.loads(out.read_text())
    names = ["BF16", "static 8", "static 4", "routed, all in memory", "routed, loaded on demand"]
    assert [line["name"] for line in lines] == names
    assert all(line["first_16_ms"] > 0 and line["pass_s"] > 0 for line in lines)
    bf16, static, four, routed, demand = (line["held"] for line in lines)
    assert bf16 > static == routed > demand > four
    assert (ids["ids_compared"], ids["ids_that_differ"]) == (96, 0)


def test_choices_alone_are_timed_beside_a_prompt(tmp_path):
    out = tmp_path / "found.json"
    assert main(["--quick", "--part", "choosing", "--repeats", "1", "--json", str(out)]) == 0
    lines = json.loads(out.read_text())
    assert [(line["tokens"], line["blocks"]) for line in lines] == [(16, 4), (64, 4)]
    if not torch.cuda.is_available():
        assert all(line["share"] == line["choosing_cpu_ms"] / line["prompt_cpu_ms"] > 0 for line in lines)


@pytest.mark.slow
def test_captured_rounds_and_kernels_are_timed(tmp_path):
    out = tmp_path / "found.json"
    small = ["--tokens", "12", "--rows", "1", "--repeats", "1", "--json", str(out)]
    assert main(["--quick", "--part", "captured", "kernels", *small]) == 0
    lines = json.loads(out.read_text())
    rounds = [line for line in lines if "rounds" in line]
    assert {line["name"].partition(",")[0] for line in rounds} == {"resident", "streamed"}
    assert all(line["round_ms"] > 0 and line["drafting_ms"] > 0 for line in rounds)
    assert {line["planes"] for line in lines if "kernels" in line} == {"resident", "streamed"}


def test_planes_are_offloaded_by_accelerate_in_the_tiles_that_kernels_read():
    model, ids = random_planes_model("tiny", torch.device("cpu")), torch.arange(16)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        offload(model, {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu"}, torch.device("cpu"))
        assert {own.device.type for own in model.model.layers[1].parameters()} == {"meta"}
        for _ in range(2):
            assert model(ids).logits.equal(wanted)
    assert {own.device.type for own in model.model.layers[1].parameters()} == {"meta"}
    assert {own.device.type for own in model.model.layers[0].parameters()} == {"cpu"}
