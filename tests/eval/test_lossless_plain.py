"""Is a nested target held against the plain model, which is another one, and is a difference found?"""

from __future__ import annotations

import pytest
from programs import needs_plans, program, run_plan, words, write_words

pytestmark = needs_plans
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
""" + words(3)


@pytest.fixture
def lossless(tmp_path, saved_model, from_the_root, capsys):
    """Runs the program on three prompts: -> its exit status, its lines, what it prints."""
    write_words(tmp_path, [{"prompt": "def f("}, {"prompt": "a"}, {"question": "How many?"}])

    def run(*options: str, plan: str = PLAN):
        (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
        status, found = run_plan("lossless", tmp_path, saved_model, "--device", "cpu", *options)
        return status, found, capsys.readouterr().out

    run.program = program("lossless")
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
