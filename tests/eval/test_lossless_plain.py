"""Is a nested target held against the plain model, which is another one, and is a difference found?"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAN = """
name = "words"
target = "{models}"
dtype = "bfloat16"
reference = "plain"
max_new_tokens = 8
batch_sizes = [2]
chains = [[], ["nested"]]
[quantize]
format = "nested-bf16"
[[data]]
name = "words"
file = "{data}/words.jsonl"
count = 3
"""


@pytest.fixture
def lossless(tmp_path, saved_model, monkeypatch, capsys):
    """Runs the program on three prompts: -> its exit status, its lines, what it prints."""
    pytest.importorskip("tomllib", reason="plans need Python 3.11 or later")
    monkeypatch.syspath_prepend(str(ROOT))
    program = importlib.import_module("eval.lossless")
    lines = [{"prompt": "def f("}, {"prompt": "a"}, {"question": "How many?"}]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    def run(*options: str, plan: str = PLAN):
        (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
        status = program.main([str(tmp_path / "plan.toml"), "--models", str(saved_model), "--data", str(tmp_path),
                               "--results", str(tmp_path / "results"), "--device", "cpu", *options])
        found = [json.loads(line) for file in (tmp_path / "results").glob("*.jsonl")
                 for line in file.read_text().splitlines()]
        return status, found, capsys.readouterr().out

    run.program = program
    return run


def test_no_token_differs_from_the_plain_model(lossless):
    status, found, _ = lossless()
    assert status == 0
    assert [(line["chain"], line["differences"]) for line in found] == [([], []), (["nested"], [])] * 2
    assert sum(line["tokens_compared"] for line in found) > 0
    shown = lossless("--report")[2]
    assert "against the plain model" in shown
    assert "| target alone | words | 2 | 3 |" in shown


def test_the_reference_is_what_the_plain_model_wrote(lossless, monkeypatch):
    asked = []

    def written_alone(model, tokenizer, prompts, plan):
        asked.append(getattr(model.config, "quantization_config", None))
        return [[1, 2, 3] for _ in prompts]

    monkeypatch.setattr(lossless.program, "written_alone", written_alone)
    status, found, _ = lossless()
    assert status == 1
    assert asked == [None, None]  # once a batch, by a model that is not nested
    assert all(line["differences"] for line in found)
    assert [line["reference_ids"] for line in found if "reference_ids" in line] == [[[1, 2, 3]] * 2, [[1, 2, 3]]]


def test_another_reference_is_refused(lossless):
    with pytest.raises(SystemExit, match="reference is 'stock', choose"):
        lossless(plan=PLAN.replace('"plain"', '"stock"'))
