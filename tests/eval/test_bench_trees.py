"""Does the benchmark of trees count tokens, passes and differences of every contender, and refuse shapes at once?"""

from __future__ import annotations

import pytest
from programs import program, write_words


@pytest.fixture
def bench(from_the_root):
    return program("bench_trees")


def options(folder, saved_model, *more: str) -> list[str]:
    write_words(folder, [{"prompt": "one two one two one"}, {"prompt": "three"}, {"prompt": "a b a b a b"}])
    return ["--model", str(saved_model), "--level", "lookups", "--prompts", str(folder / "words.jsonl"),
            "--max-new-tokens", "6", "--dtype", "float32", *more]  # fmt: skip


def test_a_line_for_every_contender(bench, tmp_path, saved_model, capsys):
    assert bench.main(options(tmp_path, saved_model, "--tree", "2,2", "--tree", "3", "--batch-size", "2")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("alone", "row", "tree"))]
    assert [line[:24].strip() for line in lines] == ["alone", "row 2", "tree [2, 2] 2", "tree [3] 1"]
    assert lines[0].split()[1:] == ["1.00", "-", "1.00", "0"]
    assert all(line.split()[-1] == "0" for line in lines)


def test_tokens_that_differ_are_counted(bench, tmp_path, saved_model, monkeypatch, capsys):
    own = bench.decode

    def decode(model, inputs, levels, config, tokens):
        out, seconds = own(model, inputs, levels, config, tokens)
        if config is not None:
            out[:, -1] += 1
        return out, seconds

    monkeypatch.setattr(bench, "decode", decode)
    assert bench.main(options(tmp_path, saved_model, "--tree", "2", "--count", "1")) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("alone", "row", "tree"))]
    assert [line.split()[-1] for line in lines] == ["0", "1", "1"]


@pytest.mark.parametrize(("tree", "words"), [("2,x", "invalid literal"), ("0", "every depth"), ("9,9,9", "most 256")])
def test_shapes_are_refused_before_anything_is_read(bench, tree, words, saved_model, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(options(tmp_path, saved_model, "--tree", tree))
    assert words in capsys.readouterr().err
