"""Does `eval.bench_architectures` time the classes that are described, beside Llama at the same bytes?"""

from __future__ import annotations

import json

import pytest

from eval.bench_architectures import __main__ as program


def test_a_line_and_a_row_of_each_class(capsys):
    names = ["FalconForCausalLM", "GPT2LMHeadModel"]
    how = ["--shape", "tiny", "--layers", "1", "--repeats", "1", "--batch", "1", "2"]
    assert program.main(["--classes", *names, *how]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(row["class"], row["rows"]) for row in found] == [(name, n) for name in names for n in (1, 2)]
    assert all(row["mb"] > 1 and row.keys() >= {"ms", "llama_ms", "ratio"} for row in found)
    assert sum(line.startswith("| `") for line in lines) == 2


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GemmaForCausalLM"])
def test_bytes_are_those_that_a_step_reads(name):
    """Not a table of which it takes a row, unless that is the head, too."""
    model = program.made(name, program.dense_classes()[name], "tiny", 1, "cpu")
    inside = sum(parameter.nbytes for parameter in model.model.layers.parameters()) + model.model.norm.weight.nbytes
    assert program.step_bytes(model) == inside + model.lm_head.weight.nbytes


def test_every_dense_class_that_is_described_has_a_model_type():
    assert len(program.dense_classes()) >= 30
    assert {"LlamaForCausalLM", "OPTForCausalLM", "Gemma2ForCausalLM"} <= program.dense_classes().keys()


@pytest.mark.parametrize(("words", "said"), [
    (["--classes", "NoForCausalLM"], "NoForCausalLM is no dense class that is described: ArceeForCausalLM"),
    (["--repeats", "0"], "--layers, --repeats and --batch are 1 or more"),
])  # fmt: skip
def test_what_cannot_be_is_refused(words, said, capsys):
    with pytest.raises(SystemExit):
        program.parse(words)
    assert said in capsys.readouterr().err
