"""Do made targets write what they should, are made drafts right as often as asked, and do plans name both clearly?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from programs import needs_plans, program, run_plan

from eval.plans.places import Places

pytestmark = [needs_plans, pytest.mark.plans, pytest.mark.usefixtures("from_the_root")]
CONFIGS = Path(__file__).resolve().parents[2] / "eval" / "configs"
SEED = 3
PLAN = """
name = "toy"
model = "shape:tiny"
repeats = 2
lengths = [1, 2]
short = 8
long = 40
seed = 3
cells = [
  {chain = "draft", data = "random", new_tokens = 24},
  {chain = "both", data = "random", batch = 2, new_tokens = 12, prompt = "long"},
  {chain = "both", data = "random", new_tokens = 8, temperature = 1.0},
]

[[chains]]
name = "draft"
levels = ["shape:tiny?acceptance=0.7"]

[[chains]]
name = "both"
levels = ["mxfp4", "shape:tiny?acceptance=0.7"]

[[data]]
name = "random"
count = 4
tokens = 20
"""
CELLS = ["draft.random.b1.n24.greedy.short", "both.random.b2.n12.greedy.long", "both.random.b1.n8.t1.short"]


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the program on a plan: -> exit status, what it says on stderr, its lines."""
    def run(plan: str, *options: str):
        (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
        status, found = run_plan("bench_auto", tmp_path, tmp_path, "--device", "cpu", "--threads", "1", *options)
        return status, capsys.readouterr().err, found

    return run


@pytest.fixture(scope="module")
def shapes():
    return program("bench_auto.shapes")


def written(model, prompt: list[int], new_tokens: int, **options) -> tuple[list[int], object]:
    """The new ids after a prompt, and the counts of the call."""
    ids = torch.tensor([prompt])
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, pad_token_id=0,
                         **{"return_dict_in_generate": True, "do_sample": False, **options})
    return out.sequences[0, len(prompt) :].tolist(), getattr(out, "speculation", None)


def walk(following: torch.Tensor, token: int, steps: int) -> list[int]:
    """The tokens that follow one."""
    found = []
    for _ in range(steps):
        found.append(token := int(following[token]))
    return found


def test_the_successors_are_one_cycle(shapes):
    following = shapes.successors(500, SEED)
    assert sorted(walk(following, 7, 500)) == list(range(500))
    assert torch.equal(following, shapes.successors(500, SEED))
    assert not torch.equal(following, shapes.successors(500, SEED + 1))


@pytest.mark.parametrize(("acceptance", "wrong"), [(1.0, 0), (0.0, 500), (0.998, 2), (0.85, 75), (0.05, 475)])
def test_guesses_differ_after_the_share_that_was_asked(shapes, acceptance, wrong):
    following = shapes.successors(500, SEED)
    guessed = shapes.guesses(following, acceptance, SEED)
    assert int((guessed != following).sum()) == wrong
    assert sorted(guessed.tolist()) == list(range(500))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tiny", "moe-tiny"])
def test_a_target_writes_the_successors_whatever_stands_before(shapes, name, dtype):
    target = shapes.make_target(shapes.Shape(name), "cpu", dtype, SEED).model
    assert target.dtype == dtype
    asked = walk(shapes.successors(96, SEED), 5, 60)
    for prompt in ([5], [80, 2, 33, 5]):
        assert written(target, prompt, 60)[0] == asked  # transformers' own loop
        for levels in ([], ["mxfp4"], ["early_exit:1"]):
            assert written(target, prompt, 60, assistant_models=levels)[0] == asked
    sampled, _ = written(target, [5], 60, assistant_models=["mxfp4"], do_sample=True, temperature=1.0, top_k=0)
    assert sampled == asked


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", [0.85, 0.3])
@pytest.mark.parametrize("length", [1, 4])
def test_a_draft_is_accepted_as_often_as_asked_at_any_length(shapes, acceptance, length):
    target = shapes.make_target(shapes.Shape("tiny-2x512"), "cpu", torch.bfloat16, SEED).model
    draft = shapes.make_draft(shapes.Shape("tiny-2x512", acceptance), target, SEED)
    ids, counts = written(target, [1, 2, 3], 300, assistant_models=[draft],
                          speculation_config={"num_draft_tokens": length})
    assert ids == walk(shapes.successors(8192, SEED), 3, 300)
    (level,) = counts.levels
    assert level.name == f"tiny-2x512?acceptance={acceptance:g}"
    assert level.tested >= 100
    error = math.sqrt(acceptance * (1 - acceptance) / level.tested)
    assert level.acceptance == pytest.approx(acceptance, abs=4 * error)


def test_every_verdict_is_that_of_the_last_token(shapes):
    target = shapes.make_target(shapes.Shape("tiny"), "cpu", torch.bfloat16, SEED).model
    draft = shapes.make_draft(shapes.Shape("tiny", 0.75), target, SEED)
    tokens = torch.stack([torch.randperm(96), torch.arange(96)])
    with torch.inference_mode():
        its, own = (model(tokens).logits.argmax(-1) for model in (target, draft))
    following = shapes.successors(96, SEED)
    assert torch.equal(its, following[tokens])
    assert torch.equal(own, shapes.guesses(following, 0.75, SEED + 1)[tokens])
    assert int((own[1] == its[1]).sum()) == 72


def test_a_draft_has_the_vocabulary_of_its_target_or_is_refused(shapes):
    target = shapes.make_target(shapes.Shape("tiny"), "cpu", torch.float32, SEED).model
    draft = shapes.make_draft(shapes.Shape("tiny-2x512", 0.5), target, SEED)
    assert (draft.config.vocab_size, draft.config.max_position_embeddings) == (96, 512)
    assert (draft.config.hidden_size, draft.dtype) == (512, torch.float32)
    wide = shapes.make_target(shapes.Shape("tiny-2x512"), "cpu", torch.float32, SEED).model
    with pytest.raises(ValueError, match="shape tiny is 64 wide, too narrow to tell 8192 tokens apart"):
        shapes.make_draft(shapes.Shape("tiny", 0.5), wide, SEED)


def test_cells_of_a_shape_are_decoded_in_every_way(bench):
    status, err, found = bench(PLAN)
    assert status == 0, err
    assert [row["cell"] for row in found] == CELLS
    alone, both, sampled = found
    name = "tiny?acceptance=0.7"
    assert alone["levels"] == [name]
    assert set(alone["takes"][0]) == {"alone", "auto", f"{name} 1", f"{name} 2", "stock"}
    assert [(row["rows"], row["rows_differing"]) for row in found] == [(2, 0), (4, 0), (2, None)]
    assert {take["tokens"] for row in found for takes in row["takes"] for take in takes.values()} == {24, 8}
    assert (alone["prompt_tokens"], both["prompt_tokens"]) == (2 * 8, 4 * 40)
    assert f"mxfp4 2 + {name} 2" in sampled["takes"][0]
    assert bench(PLAN)[2] == found  # a second run measures nothing


@pytest.mark.parametrize(("was", "now", "said"), [
    ('"shape:tiny"', '"shape:llama-8b"', "model: 'shape:llama-8b' names no shape, choose one of llama-0.5b, "),
    ('"shape:tiny"', '"shape:tiny?acceptance=1"', "is a target, which has no acceptance"),
    ('"shape:tiny"', '"shape:tiny"\nformat = "int4"', "format is 'int4', but a shape is not quantized"),
    ('"shape:tiny"', '"shape:tiny"\ndtype = "int8"', "dtype is 'int8', choose one of float32, "),
    ('["shape:tiny?acceptance=0.7"]', '["shape:no?acceptance=0.7"]', "chain 'draft': 'shape:no?acceptance=0.7' names"),
    ('["shape:tiny?acceptance=0.7"]', '["shape:tiny?acceptance=1.2"]', "must say how often it is right, from 0 to 1"),
    ('["shape:tiny?acceptance=0.7"]', '["shape:tiny?acceptance=nan"]', "must say how often it is right, from 0 to 1"),
    ('["shape:tiny?acceptance=0.7"]', '["shape:tiny?acceptance=x"]', "must say how often it is right, from 0 to 1"),
    ('["shape:tiny?acceptance=0.7"]', '["shape:tiny?rate=0.7"]', 'as in "shape:tiny?acceptance=0.8"'),
    ('["shape:tiny?acceptance=0.7"]', '["shape:tiny"]', 'as in "shape:tiny?acceptance=0.8"'),
    ('["shape:tiny?acceptance=0.7"]', '["random:{models}"]', "has a tokenizer, and a target that is a shape has none"),
    ('["shape:tiny?acceptance=0.7"]', '["mxfp5"]', "chain 'draft': "),
    ("tokens = 20", 'file = "{data}/words.jsonl"', "give tokens, the length of prompts of random ids"),
    ("tokens = 20", "tokens = 0", "count and tokens must be at least 1"),
    ('"shape:tiny"', '"{models}"', "drafts for a target that is a shape, and model is '{models}'"),
    ("long = 40", "long = 510", "exceed the target's 512 positions"),
])
def test_what_no_plan_can_say(bench, was, now, said):
    assert was in PLAN
    status, err, found = bench(PLAN.replace(was, now, 1), "--quick", *(["--only", "long"] if "long" in was else []))
    assert (status, found) == (2, [])
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_the_plan_of_8_billion_weights_has_every_value_of_every_axis(tmp_path):
    plans = program("bench_auto.plan")
    plan = plans.read_plan(path := CONFIGS / "auto_shape8b.toml")
    prompts = plans.check(plan, Places(tmp_path, tmp_path, "demo"), path)["random"]  # folders without anything
    values = {"batch": {1, 8, 32}, "new_tokens": {8, 32, 256}, "prompt": {"short", "long"},
              "chain": {chain.name for chain in plan.chains}}
    for axis, asked in values.items():
        assert {getattr(cell, axis) for cell in plan.cells} == asked
    assert len(prompts) >= (plan.repeats + 1) * max(cell.batch for cell in plan.cells)
    assert {len(prompt.split()) for prompt in prompts} == {plan.long}


def test_random_ids_are_for_shapes_only(bench, saved_model):
    plan = PLAN.replace('"shape:tiny"', json_of(saved_model)).replace('"shape:tiny?acceptance=0.7"', '"mxfp4"', 1)
    plan = plan.replace('["mxfp4", "shape:tiny?acceptance=0.7"]', '["prompt_lookup"]')
    status, err, _ = bench(plan)
    assert (status, err.count("\n")) == (2, 1)
    assert "tokens goes with a target that is a shape only" in err


def json_of(path) -> str:
    """A path as TOML writes strings."""
    return f'"{path.as_posix()}"'
