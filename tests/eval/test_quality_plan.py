"""Does eval/quality refuse a plan that cannot be, before anything is computed, with one sentence?"""

from __future__ import annotations

import re
import shutil
import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

from quality_toy import FIDELITY, PLAN, PROBABILITIES, ROOT, SYSTEMS, TASKS, arguments
from transformers import AutoTokenizer

from eval.plans import fidelity as quality_fidelity
from eval.plans.places import Places
from eval.plans.tables import PlanError
from eval.quality import __main__ as quality
from eval.quality import scores as quality_scores
from eval.quality import tasks as quality_tasks
from eval.quality.plan import check_plan, read_plan

WRONG = {
    "no TOML": ("name =", "", "is no TOML"),
    "unknown key": ("seed = 3", "seeds = [3]", r"plan.toml: unknown key 'seeds'; it may have name, systems"),
    "a negative seed": ("seed = 3", "seed = -3", "seed is -3, it must be at least 0"),
    "unknown key of a system": ('levels = ["mxfp4"', 'level = ["mxfp4"', r"\[\[systems\]\] 2: unknown key 'level'"),
    "wrong type": ("seed = 3", 'seed = "3"', r"seed is '3', it must be an integer"),
    "a bool is no number": ("count = 5", "count = true", r"count is True, it must be an integer"),
    "no file of prompts": ("words.jsonl", "no.jsonl", r"\[\[fidelity\]\] 'words': file: .*no.jsonl is no file"),
    "too few prompts": ("count = 5", "count = 7", r"'words': .*words.jsonl holds 6 prompts, count is 7"),
    "no prompts": ("count = 5", "count = 0", "count is 0, it must be at least 1"),
    "no model": ('"{models}"', '"{models}/no"', r"\[\[systems\]\] 'wide': model: .*/no holds no config.json"),
    "no level": ('"prompt_lookup"', '"{models}/no"', r"'chain': levels: .*/no holds no config.json"),
    "no text": ("text.txt", "no.txt", r"\[\[perplexity\]\] 'text': file: .*no.txt is no file"),
    "too few lines": ("lines = 3", "lines = 9", r"'text': .*text.txt holds 4 lines, lines is 9"),
    "stride": ("stride = 16", "stride = 24", "max_length is 24, it must be more than stride, 24"),
    "dtype": ('dtype = "float32"', 'dtype = "float8"', "dtype is 'float8', choose one of float32"),
    "format": ('format = "int4"', 'format = "int5"', "format 'int5' is unknown"),
    "group size": ("group_size = 32", "group_size = 33", "group_size is 33"),
    "group size without a format": ('format = "int4"\n', "", "group_size is 32, but there is no format"),
    "draft lengths": ("[4, 2]", "[4, 2, 1]", "num_draft_tokens has 3 entries for 2 levels"),
    "no reference": ('reference = "wide"', 'reference = "W8"', "reference is 'W8', the other systems are 'wide'"),
    "reference of a chain": ('reference = "wide"', 'reference = "W4A16"',
                             "'W4A16' is not its target alone: format is None here, 'int4' there"),
    "two of one name": ('name = "W4A4"', 'name = "chain"', r"2 tables \[\[systems\]\] are named 'chain'"),
    "a name with a slash": ('name = "words"', 'name = "../words"', "letters, digits"),
    "pair": ('data = "words"', 'data = "word"', r"\[\[probabilities\]\] 1: data is 'word', .* are 'words'"),
    "pair of a chain": ('system = "W4A4"', 'system = "chain"', "'chain' has levels, which change no probability"),
    "batch size": ("batch_sizes = [2, 1]", "batch_sizes = [0]", "batch_sizes is 0, it must be at least 1"),
    "no level of that name": ('"prompt_lookup"', '"prompt_look"', r"'chain': levels .*prompt_look"),
    "precision": ('precision = "w4a4"', 'precision = "w4a5"', "'W4A4': precision 'w4a5'"),
    "too many tokens": ("max_new_tokens = 12", "max_new_tokens = 512", "'words', prompt 1: 6 tokens .* 512 positions"),
    "window": ("max_length = 24", "max_length = 513", "max_length is 513, 'wide' has 512 positions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_plan_is_refused_before_anything_is_computed(case, toy, saved_model, capsys, monkeypatch):
    old, new, words = WRONG[case]
    assert old in PLAN
    (toy / "plan.toml").write_text(PLAN.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(quality_fidelity, "decode", lambda *_, **__: pytest.fail("something was decoded"))
    monkeypatch.setattr(quality_scores, "scored", lambda *_, **__: pytest.fail("something was scored"))
    assert quality.main(arguments(toy, saved_model)) == 2
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert said.startswith(f"eval.quality: {toy / 'plan.toml'}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("part", [FIDELITY, TASKS, FIDELITY + PROBABILITIES.replace("W4A4", "other").replace(
    "W4A16", "wide")], ids=["fidelity", "tasks", "probabilities"])
def test_a_reference_with_another_tokenizer_is_refused(part, toy, saved_model, capsys, monkeypatch):
    other = shutil.copytree(saved_model, toy / "other")
    AutoTokenizer.from_pretrained(saved_model).train_new_from_iterator(["other words"], 270).save_pretrained(other)
    system = '\n[[systems]]\nname = "other"\nmodel = "{data}/other"\ndtype = "float32"\n'
    named = '' if "probabilities" in part else 'reference = "wide"\n'
    (toy / "plan.toml").write_text(SYSTEMS.partition('[[systems]]\nname = "chain"')[0] + system + named + part)
    monkeypatch.setattr(quality_fidelity, "decode", lambda *_, **__: pytest.fail("something was decoded"))
    monkeypatch.setattr(quality_tasks, "evaluate", lambda *_, **__: pytest.fail("something was asked"))
    assert quality.main(arguments(toy, saved_model)) == 2
    said = capsys.readouterr().err
    assert re.search(r"plan.toml: \[\[systems\]\] 'other' \({data}/other, \d+ tokens\) and its reference 'wide' "
                     r"\({models}, \d+ tokens\) have different tokenizers", said)
    assert "Traceback" not in said


@pytest.mark.parametrize(("system", "data", "both"), [
    ("wide-a", "a-words", "'wide' on 'a-words' at batch size 2 and 'wide-a' on 'words' at batch size 2"),
    ("WIDE", "w", "'wide' on 'words' at batch size 2 and 'WIDE' on 'words' at batch size 2"),
])
def test_names_that_would_share_a_file_are_refused(system, data, both, toy, saved_model, capsys):
    plan = f'{PLAN}[[systems]]\nname = "{system}"\nmodel = "{{models}}"\n' + FIDELITY.replace("words\"", f'{data}"')
    (toy / "plan.toml").write_text(plan, encoding="utf-8")
    assert quality.main(arguments(toy, saved_model)) == 2
    assert capsys.readouterr().err.startswith(f"eval.quality: {toy / 'plan.toml'}: {both} would both be kept in ids-")
    assert not (toy / "results").exists()


def test_references_in_a_circle(toy):
    text = PLAN.replace('name = "W4A16"\n', 'name = "W4A16"\nreference = "W4A4"\n')
    (toy / "plan.toml").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match="in a circle, 'W4A16' -> 'W4A4' -> 'W4A16': leave one out"):
        read_plan(toy / "plan.toml")


@pytest.mark.parametrize("key", ["name", "model"])
def test_a_key_that_must_be_there(toy, key):
    (toy / "plan.toml").write_text(re.sub(rf'\[\[systems\]\]([^[]*){key} = .*\n', r"[[systems]]\1", PLAN, count=1))
    with pytest.raises(PlanError, match=rf"\[\[systems\]\] 1: no key '{key}', which it must have"):
        read_plan(toy / "plan.toml")


@pytest.mark.parametrize("plan", sorted(ROOT.glob("eval/configs/quality_*.toml")), ids=lambda path: path.name)
def test_committed_plans_can_be_read(plan, tmp_path):
    found = read_plan(plan)
    assert [system.name for system in found.in_order]
    if plan.name == "quality_demo.toml":  # needs nothing but the package
        import hf_mlspec

        material = check_plan(found, Places(tmp_path, tmp_path, hf_mlspec.demo_pair()[0]), plan)
        assert all(len(prompts) == 6 for prompts in material.prompts.values())
