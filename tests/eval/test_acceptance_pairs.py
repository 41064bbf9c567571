"""Does the comparison of two drafts count what it is given, bound the difference, and refuse what it cannot be?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from programs import needs_plans, program

pytestmark = needs_plans


@pytest.fixture
def pairs(from_the_root):
    return program("acceptance.pairs")


def test_shares_are_of_all_tokens(pairs):
    found = pairs.compared([[1, 1, 1, 0], [1]], [[1, 0, 0, 0], [1]])
    assert (found["prompts"], found["tokens"]) == (2, 5)
    assert found["acceptance"] == pytest.approx(4 / 5)
    assert found["acceptance_against"] == pytest.approx(2 / 5)
    assert found["difference"] == pytest.approx(2 / 5)
    assert 0 <= found["lower_bound"] <= found["difference"]


def test_prompts_on_which_both_fail_alike_do_not_widen_the_bound(pairs):
    """Unpaired, the spread between prompts would drown a difference of one token each."""
    mine = [[1] * 99 + [0] if number % 2 else [1] * 9 + [0] * 91 for number in range(50)]
    its = [[*row[:-2], 0, 0] if number % 2 else [*row[:8], *[0] * 92] for number, row in enumerate(mine)]
    found = pairs.compared(mine, its)
    assert found["difference"] == pytest.approx(0.01)
    assert found["lower_bound"] == pytest.approx(0.01)


def test_the_bound_is_that_of_a_normal_mean(pairs):
    """Of 400 prompts with a difference of +1 or -1 each in 10 tokens: mean 0, deviation of the mean 0.1 / 20."""
    mine = [[1] * 9 + [number % 2] for number in range(400)]
    its = [[1] * 9 + [1 - number % 2] for number in range(400)]
    assert pairs.compared(mine, its)["lower_bound"] == pytest.approx(-1.645 * 0.1 / 20, abs=0.0008)


@pytest.mark.parametrize(("mine", "its"), [([[1, 0]], [[1]]), ([[1]], [[1], [1]]), ([[]], [[]]), ([], [])])
def test_drafts_without_the_same_tokens_are_refused(mine, its, pairs):
    with pytest.raises(ValueError, match=r"a verdict for every token|zip\(\) argument"):
        pairs.compared(mine, its)


@pytest.mark.parametrize(("change", "words"), [
    ({"draft": "w4a8"}, "draft is 'w4a8', choose \"mxfp4\", \"nested4\""),
    ({"draft": "mxfp4"}, "draft and against are both 'mxfp4'"),
    ({"margin": 1.5}, "margin is 1.5, give a share"),
    ({"model": "{models}/nowhere"}, "nowhere holds no config.json"),
])
def test_a_pair_that_cannot_be_is_refused(change, words, pairs, saved_model, tmp_path):
    from eval.plans.places import Places
    from eval.plans.tables import PlanError

    asked = {"name": "one", "model": str(saved_model), "draft": "nested4a8", **change}
    with pytest.raises(PlanError, match=words):
        pairs.pair_units([pairs.Pair(**asked)], [], 8, Places(tmp_path, tmp_path, "demo"), Path("plan.toml"))


PLAN = """
name = "pairs"
max_new_tokens = 8
batch_size = 2
[[pairs]]
name = "one"
model = "{models}"
draft = "nested4"
codebook = "mxfp4"
margin = 0.9
[[pairs]]
name = "other"
model = "{models}"
draft = "nested4a8"
margin = 0.9
[[data]]
name = "Words"
file = "{data}/words.jsonl"
count = 3
"""


def test_a_plan_of_pairs_is_measured_once_and_kept(pairs, saved_model, tmp_path, capsys, monkeypatch):
    (tmp_path / "words.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("def f(", "a b", "x")))
    (tmp_path / "plan.toml").write_text(PLAN)
    asked = [str(tmp_path / "plan.toml"), "--models", str(saved_model), "--data", str(tmp_path), "--results",
             str(tmp_path / "results"), "--device", "cpu"]
    acceptance = program("acceptance")
    assert acceptance.main(asked) == 0
    assert "nested4 mxfp4" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "results" / "pairs.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["pair"], line["data"], line["prompts"]) for line in found] == [
        ("paired acceptance", "one", "Words", 3), ("paired acceptance", "other", "Words", 3)]
    texts = [file for file in (tmp_path / "results" / "pairs").iterdir() if file.name.startswith("text-")]
    casts = [file for file in (tmp_path / "results" / "pairs").iterdir() if file.name.startswith("mxfp4-")]
    assert (len(texts), len(casts)) == (1, 1)  # both pairs share them
    assert found[0]["acceptance_against"] == found[1]["acceptance_against"]
    monkeypatch.setattr(pairs, "score_rows", None)  # all is there: nothing is scored again
    assert acceptance.main(asked) == 0


def test_an_exact_draft_agrees_everywhere(pairs, saved_model, tmp_path):
    """The text is the target's own, and so is what a nested target says of it."""
    from transformers import AutoModelForCausalLM

    import hf_mlspec
    from hf_mlspec.evaluation import token_logprobs

    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.bfloat16).eval()
    ids = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, assistant_models=[],
                         pad_token_id=0)[0].tolist()
    (found,) = token_logprobs(hf_mlspec.nest(model), [ids], num_scored=[len(ids) - 3], precision="nested")
    assert found.greedy.all()


def test_a_missed_margin_is_an_exit_status(pairs, monkeypatch, capsys):
    acceptance = program("acceptance")
    line = {"kind": "paired acceptance", "target": "x", "data": "d", "draft": "nested4", "codebook": "fitted",
            "against": "mxfp4", "margin": 0.003, "met": False, **pairs.compared([[1, 0]], [[1, 1]])}
    monkeypatch.setattr(acceptance, "measured", lambda args: iter([line]))
    assert acceptance.main(["plan.toml"]) == 1
    assert "MISSED" in capsys.readouterr().out
