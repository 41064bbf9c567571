"""Does eval/quality keep results of another plan, model or version apart from those of this one?"""

from __future__ import annotations

import re
import shutil
import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

from quality_toy import FIDELITY, PLAN, SYSTEMS, arguments

from eval.plans import identity as plan_identity
from eval.quality import __main__ as quality
from eval.quality import run as quality_run
from eval.quality import tasks as quality_tasks
from eval.quality import units as quality_units
from eval.quality.plan import Task
from eval.records.writer import Results, ResultsError, read_results


def test_results_of_another_plan_are_not_mixed_in(toy, saved_model, capsys):
    quality.main(arguments(toy, saved_model, "--only", "perplexity"))
    (toy / "plan.toml").write_text(PLAN.replace("stride = 16", "stride = 8"), encoding="utf-8")
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity")) == 2
    assert "(stride: 16 -> 8): pass another folder as --results, or remove this file" in capsys.readouterr().err


def test_another_draft_under_the_same_name_is_noticed(toy, saved_model, capsys):
    draft = shutil.copytree(saved_model, toy / "draft")
    plan = SYSTEMS.replace('"prompt_lookup"', '"{data}/draft"') + FIDELITY
    (toy / "plan.toml").write_text(plan, encoding="utf-8")
    assert quality.main(arguments(toy, saved_model)) == 0
    (weights,) = draft.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model)) == 2
    assert "level_weights.{data}/draft: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_a_fingerprint_knows_what_decides_the_ids(name, saved_model, tmp_path):
    model = shutil.copytree(saved_model, tmp_path / "model")
    before = plan_identity.fingerprint(model)
    assert before == plan_identity.fingerprint(saved_model)
    (model / name).write_bytes((model / name).read_bytes() + b" ")
    assert plan_identity.fingerprint(model) != before


def test_items_of_two_versions_do_not_meet(toy, saved_model, capsys, monkeypatch):
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity")) == 0
    (toy / "results" / "toy.jsonl").unlink()  # as if killed behind the last item
    other = {**plan_identity.arithmetic("cpu"), "torch": "1.0"}
    monkeypatch.setattr(quality_run, "arithmetic", lambda device: other)
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity")) == 2
    assert "(arithmetic.torch: " in capsys.readouterr().err


def test_finished_results_of_other_versions_are_not_this_run(toy, saved_model, capsys, monkeypatch):
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity")) == 0
    other = {**plan_identity.arithmetic("cpu"), "torch": "1.0"}
    monkeypatch.setattr(quality_units, "arithmetic", lambda device: other)
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity", "--report")) == 2
    assert re.search(r'toy.jsonl holds .* \(arithmetic.torch: "2.*" -> "1.0"\): pass', capsys.readouterr().err)


def test_answers_to_other_questions_are_not_kept(toy, saved_model, capsys):
    plan = SYSTEMS.partition("[[systems]]\nname = \"chain\"")[0]
    plan += '[[tasks]]\ntask = "mlspec_piqa"\nnum_fewshot = 0\nlimit = 2\n'
    (toy / "plan.toml").write_text(plan, encoding="utf-8")
    assert quality.main(arguments(toy, saved_model)) == 0
    (toy / "results" / "toy.jsonl").unlink()
    assert quality.main(arguments(toy, saved_model)) == 0
    (toy / "results" / "toy.jsonl").unlink()
    questions = toy / "piqa" / "valid.jsonl"
    asked = questions.read_text()
    questions.write_text(asked.replace("A tool?", "A wheel?"))
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model)) == 2
    assert re.search("answers-wide-mlspec_piqa.jsonl holds .*documents: .* -> .*", capsys.readouterr().err)
    questions.write_text(asked)
    assert quality.main(arguments(toy, saved_model)) == 0  # every line is finished
    for changed, status in ((asked.replace("A cup?", "A pan?"), 0), (asked.replace("A hat?", "A pan?"), 2)):
        questions.write_text(changed)  # item 2 lies behind the limit, item 1 does not
        capsys.readouterr()
        assert quality.main(arguments(toy, saved_model, "--report")) == status
    assert re.search("toy.jsonl holds .*documents: .* -> .*", capsys.readouterr().err)


def test_other_examples_are_other_questions(toy):
    task = [Task("mlspec_gsm8k", num_fewshot=1, limit=2), Task("mlspec_wikitext2")]
    before = quality_tasks.documents(task, toy)
    assert quality_tasks.documents(task, toy) == before
    train = toy / "gsm8k" / "train.jsonl"
    train.write_text(train.read_text().replace("It is", "That is"))
    after = quality_tasks.documents(task, toy)
    assert (after["mlspec_gsm8k"] != before["mlspec_gsm8k"], after["mlspec_wikitext2"]) == (
        True, before["mlspec_wikitext2"])
    none = [Task("mlspec_gsm8k", num_fewshot=0, limit=2)]
    of_none = quality_tasks.documents(none, toy)
    train.write_text(train.read_text().replace("That is", "It is"))
    assert quality_tasks.documents(none, toy) == of_none


def test_a_folder_that_cannot_hold_results_is_named(toy, saved_model, capsys):
    assert quality.main([*arguments(toy, saved_model), "--results", str(toy / "plan.toml")]) == 2
    assert "toy.jsonl cannot be written" in capsys.readouterr().err


def test_results_without_a_line_leave_no_file(toy, saved_model, capsys):
    assert quality.main(arguments(toy, saved_model, "--report")) == 0
    assert "0 of 8 results." in capsys.readouterr().out
    file = toy / "results" / "toy.jsonl"
    assert not file.exists()
    with Results(file, "run") as results:
        assert file.exists()  # what the lock lies on
        with pytest.raises(ResultsError, match="another process"):
            Results(file, "run")
        results.add("task", {"system": "a"})
    Results(file, "run").__exit__()
    assert len(read_results(file)) == 1
