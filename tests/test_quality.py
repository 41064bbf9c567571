"""Does eval/quality.py measure what it says, refuse what cannot be, and go on after any kill as if there was none?"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import plan_identity, quality, quality_fidelity, quality_run, quality_scores, quality_tasks, quality_units
from eval.plan import Places, PlanError
from eval.quality_plan import Task, check_plan, read_plan
from eval.results import Results, ResultsError, read_results

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = """
name = "toy"
seed = 3
batch_size = 2
max_new_tokens = 12

[[systems]]
name = "wide"
model = "{models}"
dtype = "float32"

[[systems]]
name = "chain"
model = "{models}"
dtype = "float32"
levels = ["mxfp4", "prompt_lookup"]
num_draft_tokens = [4, 2]
reference = "wide"

[[systems]]
name = "W4A16"
model = "{models}"
dtype = "float32"
format = "int4"
group_size = 32

[[systems]]
name = "W4A4"
model = "{models}"
dtype = "float32"
format = "int4"
group_size = 32
precision = "w4a4"
reference = "W4A16"
"""
FIDELITY = """
[[fidelity]]
name = "words"
file = "{data}/words.jsonl"
count = 5
batch_sizes = [2, 1]
"""
PERPLEXITY = """
[[perplexity]]
name = "text"
file = "{data}/text.txt"
lines = 3
max_length = 24
stride = 16
"""
PROBABILITIES = """
[[probabilities]]
system = "W4A4"
reference = "W4A16"
data = "words"
"""
PLAN = SYSTEMS + FIDELITY + PERPLEXITY + PROBABILITIES
TASKS = """
[[tasks]]
task = "mlspec_gsm8k"
num_fewshot = 1
limit = 3
max_gen_toks = 10

[[tasks]]
task = "mlspec_piqa"
num_fewshot = 0
limit = 2

[[tasks]]
task = "mlspec_wikitext2"
"""
PROMPTS = [{"prompt": "def f("}, {"question": "How many?"}, {"turns": ["one", "two"]}, {"text": "a"},
           {"prompt": "import os\n"}, {"prompt": "not asked for"}]
TEXT = "The first line is here.\n\nAn é and a ü, then words.\nleft out\n"


@pytest.fixture
def toy(tmp_path, saved_model):
    """Folder with a plan, its data, and the arguments that run it."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)), encoding="utf-8")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    sums = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(5)]
    choices = [{"goal": goal, "sol1": "Use it.", "sol2": "Do not use it."} for goal in ("A tool?", "A hat?", "A cup?")]
    for name, text in {
        "gsm8k/test.jsonl": "\n".join(map(json.dumps, sums)), "gsm8k/train.jsonl": json.dumps(sums[0]),
        "piqa/valid.jsonl": "\n".join(map(json.dumps, choices)), "piqa/valid-labels.lst": "0\n1\n1\n",
        "wikitext2/test.txt": " = One = \n\n Some words . \n = Two = \n\n Other words , and more . \n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def arguments(folder: Path, saved_model: Path, *more: str) -> list[str]:
    return [str(folder / "plan.toml"), "--models", str(saved_model), "--data", str(folder),
            "--results", str(folder / "results"), "--device", "cpu", *more]


def lines(folder: Path, kind: str) -> list[dict]:
    """The results of this kind, without what two runs differ in."""
    return [{key: value for key, value in row.items() if key not in ("machine", "seconds")}
            for row in read_results(folder / "results" / "toy.jsonl") if row["kind"] == kind]


def test_a_whole_plan(toy, saved_model, capsys):
    assert quality.main(arguments(toy, saved_model)) == 0
    report = capsys.readouterr().out
    chain = [line for line in lines(toy, "fidelity") if line["system"] == "chain"]
    assert [(line["batch"], line["equal"], line["prompts"], line["differences"]) for line in chain] == [
        (2, 5, 5, []), (1, 5, 5, [])]
    four = next(line for line in lines(toy, "fidelity") if line["system"] == "W4A4")
    assert four["equal"] < 5, "4-bit activations of a random model write something else"
    places = [entry["position"] for entry in four["differences"]]
    assert len(places) == 5 - four["equal"]
    assert four["mean_first_difference"] == pytest.approx(sum(places) / len(places))
    assert [line["system"] for line in lines(toy, "perplexity")] == ["wide", "W4A16", "W4A4"]
    (pair,) = lines(toy, "probabilities")
    assert pair["tokens"] == len(pair["points"]) == four["tokens"]
    assert -1 <= pair["pearson_r"] <= 1
    assert "| chain | wide | words | 2 | 5 | 5 (100.0%) | 100.0% to 100.0% | - |" in report
    assert "8 of 8 results." in report
    assert "Systems with levels against their target alone: 0 differences." in report

    before = (toy / "results" / "toy.jsonl").read_bytes()
    assert quality.main(arguments(toy, saved_model)) == 0
    assert (toy / "results" / "toy.jsonl").read_bytes() == before
    assert report.split("## toy")[1] == capsys.readouterr().out.split("## toy")[1]
    assert quality.main(arguments(toy, saved_model, "--report", "--only", "fidelity")) == 0
    partial = capsys.readouterr().out
    assert "4 of 4 results." in partial
    assert "Perplexity" not in partial


def test_a_difference_of_a_chain_is_an_error_and_listed(toy, saved_model, capsys):
    quality.main(arguments(toy, saved_model, "--only", "fidelity"))
    (toy / "results" / "toy.jsonl").unlink()
    journal = toy / "results" / "toy" / "ids-chain-words-2.jsonl"
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    next(entry for entry in entries if entry.get("key") == "3")["value"]["ids"][7] ^= 1
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model, "--only", "fidelity")) == 1
    report = capsys.readouterr().out
    assert "against their target alone: 1 difference:" in report
    assert "- chain, words, item 3, position 7" in report
    assert "| chain | wide | words | 2 | 5 | 4 (80.0%) |" in report
    assert quality.main(arguments(toy, saved_model, "--report")) == 1


def test_tasks_are_compared_item_by_item(toy, saved_model, capsys):
    """Ids of what is written, log-probabilities of what is scored; one wrong answer of each is found and listed."""
    (toy / "plan.toml").write_text(SYSTEMS + TASKS, encoding="utf-8")
    assert quality.main(arguments(toy, saved_model)) == 0
    report = capsys.readouterr().out
    found = lines(toy, "task")
    assert [(line["system"], line["task"], line["metric"], line["items"], line["identical_items"]) for line in found
            if line["system"] in ("wide", "chain")] == [
        (system, task, metric, items, None if system == "wide" else items) for system in ("wide", "chain")
        for task, metrics, items in (("mlspec_gsm8k", ["exact_match", "flexible_match"], 3),
                                     ("mlspec_piqa", ["acc", "acc_norm"], 2),
                                     ("mlspec_wikitext2", ["word_perplexity", "byte_perplexity", "bits_per_byte"], 2))
        for metric in metrics]
    by_key = {(line["system"], line["task"], line["metric"]): line["value"] for line in found}
    assert all(by_key[("chain", *key[1:])] == value for key, value in by_key.items() if key[0] == "wide")
    assert "| chain | wide | mlspec_gsm8k | 3 of 3 |" in report
    assert report.endswith("Systems with levels against their target alone: 0 differences.\n")
    assert quality.main(arguments(toy, saved_model)) == 0
    assert capsys.readouterr().out == report

    results = toy / "results" / "toy.jsonl"
    rows = results.read_text().splitlines(keepends=True)
    results.write_text("".join(row for row in rows if '"system": "chain"' not in row))
    _tamper(toy / "results" / "toy" / "answers-wide-mlspec_gsm8k.jsonl", lambda answers: answers[0].append(7))
    _tamper(toy / "results" / "toy" / "answers-wide-mlspec_piqa.jsonl", lambda answers: answers.append(
        answers.pop() - 1e-9))
    assert quality.main(arguments(toy, saved_model)) == 1
    report = capsys.readouterr().out
    assert "against their target alone: 2 differences:" in report
    assert re.search(r"- chain, mlspec_gsm8k, item 0, position \d+\n- chain, mlspec_piqa, item 0, position 0\n",
                     report)
    assert "| chain | wide | mlspec_gsm8k | 2 of 3 |" in report


def _tamper(file: Path, change) -> None:
    """Change the first item of a journal."""
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    change(entries[1]["value"])
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.mark.parametrize(("old", "new", "words"), [
    ("mlspec_gsm8k", "mlspec_gsm9k", r"\[\[tasks\]\] 'mlspec_gsm9k' cannot be read: .*mlspec_gsm9k"),
    ('piqa"\nnum_fewshot = 0', 'piqa"\nnum_fewshot = 2',
     r"\[\[tasks\]\] 'mlspec_piqa' with num_fewshot 2: .*/train.jsonl .*is not in"),
    ("num_fewshot = 1", "num_fewshot = 2", "'mlspec_gsm8k' with num_fewshot 2: .*/train.jsonl holds 1, and example 2"),
    ("wikitext2", "lambada", r"'mlspec_lambada' cannot be read: .*lambada_test.jsonl .*is not in"),
    ("limit = 3", "limit = 0", "'mlspec_gsm8k': limit is 0, it must be at least 1"),
    ("num_fewshot = 1", "num_fewshot = -1", "num_fewshot is -1, it must be at least 0"),
    ("mlspec_piqa", "mlspec_gsm8k", r"2 tables \[\[tasks\]\] have task 'mlspec_gsm8k': leave one"),
])
def test_a_task_that_cannot_be_is_refused_before_anything_is_computed(old, new, words, toy, saved_model, capsys):
    assert old in TASKS
    (toy / "plan.toml").write_text(SYSTEMS + TASKS.replace(old, new), encoding="utf-8")
    assert quality.main(arguments(toy, saved_model)) == 2
    said = capsys.readouterr().err
    assert re.search(words, said)
    assert f"eval.quality: {toy / 'plan.toml'}" in said
    assert not list((toy / "results").glob("toy/*"))


def test_the_perplexity_is_that_of_the_model(toy, saved_model):
    """Against one float64 forward pass per window of transformers' own model."""
    quality.main(arguments(toy, saved_model, "--only", "perplexity"))
    line = next(line for line in lines(toy, "perplexity") if line["system"] == "wide")
    model = AutoModelForCausalLM.from_pretrained(saved_model, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(saved_model)
    text = "".join(TEXT.splitlines(keepends=True)[:3])
    row = [tokenizer.eos_token_id, *tokenizer(text)["input_ids"]]
    total = 0.0
    for target in range(1, len(row)):
        start = max(0, math.ceil((target - 23) / 16)) * 16  # the first window that holds it
        logits = model(torch.tensor([row[start:target]])).logits[0, -1]
        total -= torch.log_softmax(logits, -1)[row[target]].item()
    assert line["tokens"] == len(row) - 1
    assert line["token_perplexity"] == pytest.approx(math.exp(total / (len(row) - 1)), rel=1e-4)
    assert line["word_perplexity"] == pytest.approx(math.exp(total / 12), rel=1e-3)
    assert line["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 23, 24, 25, 39, 40, 41, 100])
@pytest.mark.parametrize(("max_length", "stride"), [(24, 16), (24, 23), (2, 1), (1000, 999)])
def test_windows_score_every_token_once(length, max_length, stride):
    ids = list(range(1, length + 1))
    found = list(quality_scores.windows(ids, 0, max_length, stride))
    assert [token for window in found for token in window.ids[-window.scored :]] == ids
    assert all(len(window.ids) <= max_length and window.scored < len(window.ids) for window in found)
    assert all(len(window.ids) - window.scored >= max_length - stride for window in found[1:])


def test_agreement_of_two_systems():
    expected = [[1, 2, 3, 4], [1, 2], [5, 6, 7], [1, 2, 3]]
    got = [[1, 2, 3, 4], [1, 2, 3], [5, 9, 7], [4, 2, 3]]
    found = quality_fidelity.compared(expected, got, seed=0)
    assert (found["equal"], found["prompts"], found["tokens"]) == (1, 4, 12)
    assert found["mean_first_difference"] == pytest.approx((2 + 1 + 0) / 3)
    assert found["mean_common_tokens"] == pytest.approx((4 + 2 + 1 + 0) / 4)
    assert [entry["position"] for entry in found["differences"]] == [2, 1, 0]
    assert quality_fidelity.compared(expected, expected, 0)["mean_first_difference"] is None


def test_the_interval_is_that_of_resampling():
    items = np.array([1] * 30 + [0] * 20)
    draws = np.random.default_rng(1).choice(items, (20000, 50)).mean(axis=1)
    assert quality_fidelity.interval(30, 50, 0) == pytest.approx(np.quantile(draws, (0.025, 0.975)), abs=0.021)
    assert quality_fidelity.interval(50, 50, 0) == [1.0, 1.0]


def test_probabilities_side_by_side():
    one, other = np.log([0.1, 0.5, 0.9]), np.log([0.2, 0.4, 1.0])
    found = quality_scores.agreement(one, other, 0)
    assert found["pearson_r"] == pytest.approx(np.corrcoef(np.exp(one), np.exp(other))[0, 1])
    assert found["points"] == [[0.1, 0.2], [0.5, 0.4], [0.9, 1.0]]
    assert found["mean_difference"] == pytest.approx(0.1)
    assert quality_scores.agreement(one, [0.0] * 3, 0)["pearson_r"] is None
    many = np.log(np.linspace(0.1, 0.9, 5000))
    first, again, another = (quality_scores.agreement(many, many, seed)["points"] for seed in (0, 0, 1))
    assert len(first) == 2000
    assert first == again != another


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


def test_results_of_another_plan_are_not_mixed_in(toy, saved_model, capsys):
    quality.main(arguments(toy, saved_model, "--only", "perplexity"))
    (toy / "plan.toml").write_text(PLAN.replace("stride = 16", "stride = 8"), encoding="utf-8")
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity")) == 2
    assert "stride: 16 then, 8 now" in capsys.readouterr().err


def test_another_draft_under_the_same_name_is_noticed(toy, saved_model, capsys):
    draft = shutil.copytree(saved_model, toy / "draft")
    plan = SYSTEMS.replace('"prompt_lookup"', '"{data}/draft"') + FIDELITY
    (toy / "plan.toml").write_text(plan, encoding="utf-8")
    assert quality.main(arguments(toy, saved_model)) == 0
    (weights,) = draft.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model)) == 2
    assert "level_weights: {'{data}/draft': " in capsys.readouterr().err


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
    assert "arithmetic: " in capsys.readouterr().err


def test_finished_results_of_other_versions_are_not_this_run(toy, saved_model, capsys, monkeypatch):
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity")) == 0
    other = {**plan_identity.arithmetic("cpu"), "torch": "1.0"}
    monkeypatch.setattr(quality_units, "arithmetic", lambda device: other)
    capsys.readouterr()
    assert quality.main(arguments(toy, saved_model, "--only", "perplexity", "--report")) == 2
    assert re.search(r"toy.jsonl holds .* \(arithmetic: .*'torch': '2.*now\): rename", capsys.readouterr().err)


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
    assert re.search("answers-wide-mlspec_piqa.jsonl holds .*documents: '.* then, '.* now", capsys.readouterr().err)
    questions.write_text(asked)
    assert quality.main(arguments(toy, saved_model)) == 0  # every line is finished
    for changed, status in ((asked.replace("A cup?", "A pan?"), 0), (asked.replace("A hat?", "A pan?"), 2)):
        questions.write_text(changed)  # item 2 lies behind the limit, item 1 does not
        capsys.readouterr()
        assert quality.main(arguments(toy, saved_model, "--report")) == status
    assert re.search("toy.jsonl holds .*documents: '.* then, '.* now", capsys.readouterr().err)


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


def test_a_line_that_was_cut_is_written_again(tmp_path):
    file = tmp_path / "r.jsonl"
    with Results(file, "run") as results:
        results.add("task", {"system": "a", "value": 1}, asked={"limit": 1})
        results.add("task", {"system": "b", "value": 2}, asked={"limit": 1})
    whole = file.read_bytes()
    for cut in range(1, len(whole.splitlines(keepends=True)[1]), 7):
        file.write_bytes(whole[:-cut])
        assert [row["system"] for row in read_results(file)] == ["a"]
        with Results(file, "run") as results:
            assert results.find("task", {"limit": 1}, system="b") is None
            assert results.find("task", {"limit": 1}, system="a")["value"] == 1
            results.add("task", {"system": "b", "value": 2}, asked={"limit": 1})
        assert [row["system"] for row in read_results(file)] == ["a", "b"]
    with Results(file, "run") as results:
        with pytest.raises(ResultsError, match="limit: 1 then, 2 now"):
            results.find("task", {"limit": 2}, system="a")
        with pytest.raises(ResultsError, match="another process"):
            Results(file, "run")
    row = read_results(file)[0]
    assert row["name"] == "run"
    assert row["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize("text", ["hello", "hello\n", "[]\n", '{"a": 1}\n', '{"kind": "x"}\nhello\n'])
def test_other_files_are_no_results(tmp_path, text):
    file = tmp_path / "r.jsonl"
    file.write_text(text)
    with pytest.raises(ResultsError, match=r"r\.jsonl"):
        Results(file, "run")
    assert file.read_text() == text


# A process that has imported everything and computed nothing, and forks one child per line it reads: each child is a
# run of its own, which the test kills. What is begun is appended to a log: the journal and the item.
NURSERY = """
import os, sys, time
import hf_mlspec
from eval import quality, quality_fidelity, quality_scores, quality_tasks
from hf_mlspec.evaluation import harness, harness_generation, score_rows
import lm_eval.tasks

log = open(sys.argv[1], "ab", buffering=0)
stream, decode, scored = hf_mlspec.generate_stream, quality_fidelity.decode, quality_scores.scored
evaluate = quality_tasks.evaluate
now = None

def begun(item):
    log.write(f"{now} {item}\\n".encode())
    time.sleep(0.01)

def told_stream(model, requests, **options):
    def telling():
        for request in requests:
            begun(request.id)
            yield request
    return stream(model, telling() if now else requests, **options)

def told_decode(system, loaded, prompts, *, journal, **options):
    global now
    now = journal.path.name
    decode(system, loaded, prompts, journal=journal, **options)
    now = None

def told_scored(loaded, rows, *, journal, **options):
    left = [number for number in range(len(rows)) if str(number) not in journal]
    def telling(*args, **more):
        for place, scores in score_rows(*args, **more):
            log.write(f"{journal.path.name} {left[place]}\\n".encode())
            time.sleep(0.01)
            yield place, scores
    quality_scores.score_rows = telling
    return scored(loaded, rows, journal=journal, **options)

def told_evaluate(*args, journal, **options):
    global now
    now = journal.name
    found = evaluate(*args, journal=journal, **options)
    now = None
    return found

def slow_scores(*args, **options):
    for found in score_rows(*args, **options):
        time.sleep(0.01)
        yield found

hf_mlspec.generate_stream = harness_generation.generate_stream = told_stream
harness.score_rows, quality_tasks.evaluate = slow_scores, told_evaluate
quality_fidelity.decode, quality_scores.scored = told_decode, told_scored
for line in sys.stdin:
    child = os.fork()
    if not child:
        sys.stdout = open(sys.argv[2], "w")
        status = quality.main(line.split())
        sys.stdout.flush()
        os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """The process of NURSERY, and what its children began."""

    def __init__(self, folder: Path):
        self.log, self.report = folder / "log", folder / "report"
        self.log.touch()
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY, str(self.log), str(self.report)], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})

    def run(self, command: list[str], kill_after: int | None = None) -> tuple[int, list[tuple[str, str]]]:
        """One child, killed once it began so many items; -> its status and what it began."""
        before = len(self.begun())
        self.process.stdin.write(" ".join(command) + "\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        if kill_after is not None:
            deadline = time.monotonic() + 60
            while len(self.begun()) < before + kill_after and time.monotonic() < deadline and self._alive(child):
                time.sleep(0.003)
            time.sleep(random.random() * 0.05)
            if self._alive(child):
                os.kill(child, signal.SIGKILL)
        return int(self.process.stdout.readline()), self.begun()[before:]

    def begun(self) -> list[tuple[str, str]]:
        return [tuple(line.split()) for line in self.log.read_text().splitlines()]

    @staticmethod
    def _alive(child: int) -> bool:
        return Path(f"/proc/{child}/stat").exists() and " Z " not in Path(f"/proc/{child}/stat").read_text()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs fork, SIGKILL and /proc")
    found = Nursery(tmp_path_factory.mktemp("nursery"))
    yield found
    found.process.stdin.close()
    assert found.process.wait(60) == 0


def finished(folder: Path) -> set[tuple[str, str]]:
    """(journal, item) of everything on disk that a nursery tells of: all but scores inside lm-eval."""
    files = [file for file in (folder / "results" / "toy").glob("*.jsonl")
             if not re.match(r"answers-|requests-.*-mlspec_(piqa|wikitext2)", file.name)]
    return {(file.name, json.loads(line)["key"]) for file in files
            for line in file.read_bytes().rpartition(b"\n")[0].splitlines()[1:]}


KILLED = {
    "ids, windows, logprobs": (PLAN, 8, 12),
    "tasks": (SYSTEMS.partition('[[systems]]\nname = "W4A16"')[0] + TASKS.partition('[[tasks]]\ntask = "mlspec_wi')[0],
              4, 4),
}


@pytest.mark.parametrize("plan", KILLED)
def test_killed_at_random_moments(plan, nursery, toy, saved_model, tmp_path_factory):
    """Nothing that was finished is begun again, and what comes out is what an undisturbed run says."""
    seed = random.randrange(2**32)
    print("seed", seed)  # shown where the test fails
    random.seed(seed)
    text, results, most = KILLED[plan]
    (toy / "plan.toml").write_text(text, encoding="utf-8")
    killed = 0
    for _ in range(40):
        before = finished(toy)
        status, begun = nursery.run(arguments(toy, saved_model), kill_after=random.randint(1, most))
        assert not before & set(begun)
        assert len(begun) == len(set(begun))
        assert status in (0, -signal.SIGKILL)
        if status == 0:
            break
        killed += 1
    assert status == 0
    assert killed >= 1
    report = nursery.report.read_text()
    assert f"{results} of {results} results." in report
    other = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(toy, other, dirs_exist_ok=True, ignore=shutil.ignore_patterns("results"))
    status, begun = nursery.run(arguments(other, saved_model))
    assert (status, nursery.report.read_text()) == (0, report)
    assert finished(other) == finished(toy) == set(begun)
    for kind in ("fidelity", "perplexity", "probabilities", "task"):
        assert sorted(map(json.dumps, lines(toy, kind))) == sorted(map(json.dumps, lines(other, kind)))
