"""Does eval/quality measure what a plan says, compare item by item, and report what it found?"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)

from quality_toy import SYSTEMS, TASKS, arguments, lines

from eval.quality import __main__ as quality


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
