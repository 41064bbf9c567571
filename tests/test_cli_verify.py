"""Does mlspec verify write its certificate and badge, and does --check notice what changed?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hf_mlspec
from hf_mlspec.cli import main, verify
from hf_mlspec.evaluation import Certificate


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("def area(radius):\nOnce upon a time\nx\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(saved_model, tmp_path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "packed_in_a_box"))


def asked(folder: object, prompts: str, *more: object) -> list[str]:
    return ["verify", str(folder), "--level", "mxfp4", "--prompts", prompts, "--max-new-tokens", "6",
            *map(str, more)]


def test_a_certificate_and_a_badge_are_written(capsys, folder, prompts, tmp_path):
    card = folder / "README.md"
    card.write_text("# A model\n", encoding="utf-8")
    where = tmp_path / "c.json"
    assert main(asked(folder, prompts, "--batch-size", "1,2", "--certificate", where, "--badge", card)) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "ids identical: 3 of 3 prompts"
    assert "levels, all prompts, batch size 2\n" in told.out
    assert told.err.splitlines() == [f"certificate written to {where}", f"badge written to {card}"]
    found = Certificate.load(where)
    assert found.to_dict()["target"]["name"] == "packed_in_a_box"
    assert found.to_dict()["prompts"]["name"] == "prompts.txt"
    assert card.read_text(encoding="utf-8") == "# A model\n\n" + found.markdown()
    assert main(["verify", str(folder), "--check", str(where), "--prompts", prompts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("lossless: 0 of 36 tokens differ")
    assert lines[-1] == "the certificate is of this model and these kernels"


def test_several_batch_sizes_in_json(capsys, saved_model, prompts):
    assert main(asked(saved_model, prompts, "--batch-size", "1,3", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["asked"]["batch_size"] for run in told["runs"]] == [1, 3]
    assert told["failing"] == 0


def test_a_mismatch_is_certified_and_fails(capsys, monkeypatch, saved_model, prompts, tmp_path):
    def compare(model, tokenizer, prompts, levels, **options):
        ids = [item.ids for item in hf_mlspec.compare(model, tokenizer, prompts, [], **options).items]
        ids[0][1] ^= 1
        return hf_mlspec.compare(model, tokenizer, prompts, levels, reference_ids=ids, **options)

    monkeypatch.setattr(verify, "compare", compare)
    where = tmp_path / "c.json"
    assert main(asked(saved_model, prompts, "--certificate", where)) == 1
    found = Certificate.load(where)
    assert found.statement.startswith("NOT lossless: 1 of 14 tokens differ")
    assert main(["verify", str(saved_model), "--check", str(where)]) == 1  # the same model, and not lossless
    assert main(asked(saved_model, prompts, "--certificate", where, "--tolerate-ties", "1e9")) == 0
    assert Certificate.load(where).statement.startswith("lossless up to ties: 1 of 14 tokens differ")
    capsys.readouterr()


def test_check_notices_another_model(capsys, folder, prompts, tmp_path):
    where = tmp_path / "c.json"
    assert main(asked(folder, prompts, "--certificate", where)) == 0
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    capsys.readouterr()
    assert main(["verify", str(folder), "--check", str(where)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  DIFFERENT: target: weights, 1 file: ") for line in lines)
    assert lines[-1] == "the certificate is not of this model and these kernels: 1 differences"
    assert main(["verify", str(folder), "--check", str(where), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] is False
    assert len(told["different"]) == 1
    where.write_text(where.read_text(encoding="utf-8").replace('"mismatches": 0', '"mismatches": 1'), encoding="utf-8")
    assert main(["verify", str(folder), "--check", str(where)]) == 2
    assert "was changed after it was made" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    (["--level", "mxfp4"], "no --prompts FILE given"),
    (["--level", "mxfp4", "--prompts", "P", "--certificate", "no/folder/c.json"], "that folder does not exist"),
    (["--level", "mxfp4", "--prompts", "P", "--badge", "."], "which is a folder"),
    (["--level", "mxfp4", "--prompts", "P", "--certificate", "P"], "--prompts and --certificate both name"),
    (["--level", "mxfp4", "--prompts", "P", "--certificate", "c", "--badge", "./c"], "both name './c', and one would"),
    (["--level", "mxfp4", "--prompts", "P", "--batch-size", "1,1"], "1,1 names one number twice"),
    (["--level", "mxfp4", "--prompts", "P", "--batch-size", "1,0"], "0 is not 1 or more"),
    (["--level", "mxfp4", "--prompts", "P", "--batch-size", "few"], "invalid list of integers value: 'few'"),
    (["--check", "nowhere.json"], "'nowhere.json' cannot be read"),
    (["--check", "nowhere.json", "--certificate", "c.json"], "nothing to write with --certificate")])
def test_bad_calls_are_refused_before_a_model_is_loaded(capsys, monkeypatch, prompts, words, message):
    def load(*_):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(verify, "load_target", load)
    try:
        status = main(["verify", "any", *[prompts if word == "P" else word for word in words]])
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr()
    assert status == 2
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert message in told.err
