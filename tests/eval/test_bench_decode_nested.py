"""Does a throughput plan compare a nested target with the plain one, and refuse what cannot be compared?"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PLAN = """
name = "toy"
max_new_tokens = 8
batch_sizes = [1]
batches = 2
repeats = 1
memory = false
over = ["cast"]
[[systems]]
name = "cast"
model = "{models}"
levels = ["mxfp4"]
num_draft_tokens = 3
[[systems]]
name = "own"
model = "{models}"
format = "nested-bf16"
levels = ["nested"]
num_draft_tokens = 3
[[data]]
name = "words"
file = "{data}/words.jsonl"
count = 2
"""


@pytest.fixture
def program(monkeypatch):
    pytest.importorskip("tomllib", reason="plans need Python 3.11 or later")
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    yield lambda name: importlib.import_module(f"eval.{name}")
    torch.set_num_threads(threads)


@pytest.fixture
def bench(program, tmp_path, saved_model, capsys):
    """Runs a plan on two prompts: -> exit status, what it says on stderr, its lines."""
    (tmp_path / "words.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("def f(", "class A:")))

    def run(plan: str = PLAN):
        (tmp_path / "plan.toml").write_text(plan)
        status = program("bench_decode").main([
            str(tmp_path / "plan.toml"), "--models", str(saved_model), "--data", str(tmp_path), "--results",
            str(tmp_path / "results"), "--threads", "1"])
        file = tmp_path / "results" / "toy.jsonl"
        return status, capsys.readouterr().err, [
            json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    return run


def test_both_targets_meet_in_every_unit(bench):
    status, _, found = bench()
    assert status == 0
    decode = {line["contender"]: line for line in found if line["kind"] == "decode"}
    assert set(decode) == {"stock greedy", "target alone", "nested target alone", "cast", "own"}
    assert decode["own"]["format"] == decode["nested target alone"]["format"] == "nested-bf16"
    for name in ("nested target alone", "cast", "own"):
        assert (decode[name]["rows_compared"], decode[name]["rows_differing"]) == (2, 0)
    assert set(decode["own"]["over"]) == {"stock greedy", "target alone", "cast"}
    assert decode["cast"]["over"]["cast"] == pytest.approx(1)


@pytest.mark.parametrize(("old", "new", "named"), [
    ('over = ["cast"]', 'over = ["casts"]', "over holds 'casts', the plan has cast, own"),
    ('format = "nested-bf16"', 'format = "int4"', "format is 'int4', that of 'cast' is None"),
    ('name = "cast"\nmodel', 'name = "cast"\nformat = "nested-bf16"\nmodel', None),
])
def test_what_cannot_be_compared_is_refused(old, new, named, bench):
    plan = PLAN.replace(old, new)
    if named is None:  # a plain system behind a nested one: which of them would be the target alone?
        plan = plan.replace('name = "own"\nmodel = "{models}"\nformat = "nested-bf16"\nlevels = ["nested"]',
                            'name = "own"\nmodel = "{models}"\nlevels = ["mxfp4"]')
        named = "'cast' comes first and has a format: begin with a system of the plain target"
    status, said, found = bench(plan)
    assert (status, found) == (2, [])
    assert named in said


def test_a_nested_draft_reads_its_share_of_the_bytes(program, saved_model):
    from transformers import AutoModelForCausalLM

    import hf_mlspec

    memory = program("bench_decode_memory")
    plain = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.bfloat16)
    weights = sum(module.weight.numel() for module in plain.modules() if isinstance(module, torch.nn.Linear))
    whole = memory.reads(None, plain)
    cast = memory.reads("mxfp4", plain)
    own = hf_mlspec.nest(AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.bfloat16))
    exact, draft = memory.reads(None, own), memory.reads("nested", own)
    codebooks = exact - whole - weights // 32
    assert 0 < codebooks < 8 * 64
    assert draft == exact - weights * 12 // 8 == cast + codebooks
    assert memory.adds("nested", own) == 0
