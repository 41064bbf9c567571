"""Does a throughput plan compare a nested target with the plain one, and refuse what cannot be compared?"""

from __future__ import annotations

import pytest
import torch
from programs import needs_plans, program, run_plan, system, words, write_words

pytestmark = [needs_plans, pytest.mark.usefixtures("from_the_root")]
PLAN = """
name = "toy"
max_new_tokens = 8
batch_sizes = [1]
batches = 2
repeats = 1
memory = false
over = ["cast"]
"""
PLAN += system("cast", levels=["mxfp4"], num_draft_tokens=3)
PLAN += system("own", format="nested-bf16", levels=["nested"], num_draft_tokens=3) + words(2)


@pytest.fixture
def bench(tmp_path, saved_model, capsys):
    """Runs a plan on two prompts: -> exit status, what it says on stderr, its lines."""
    write_words(tmp_path, ({"prompt": text} for text in ("def f(", "class A:")))

    def run(plan: str = PLAN):
        (tmp_path / "plan.toml").write_text(plan)
        status, found = run_plan("bench_decode", tmp_path, saved_model, "--threads", "1")
        return status, capsys.readouterr().err, found

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


def test_a_nested_draft_reads_its_share_of_the_bytes(saved_model):
    from transformers import AutoModelForCausalLM

    import hf_mlspec

    memory = program("bench_decode.memory")
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
