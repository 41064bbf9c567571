"""Does the program that compares heads, trees and QSpec count what each chain does, and refuse what is no chain?"""

from __future__ import annotations

import pytest
import torch
from heads import write_head
from models import letters, tiny
from programs import program, write_words


@pytest.fixture
def bench(from_the_root):
    return program("bench_heads")


@pytest.fixture
def folder(tmp_path):
    """A target with its tokenizer, a head for it, a tiny model and prompts."""
    model = tiny(seed=2, dtype=torch.bfloat16)
    for name, one in (("target", model), ("draft", tiny(seed=4, dtype=torch.bfloat16))):
        one.save_pretrained(tmp_path / name)
        letters().save_pretrained(tmp_path / name)
    write_head(tmp_path / "head", model)
    write_words(tmp_path, [{"prompt": word * 4} for word in ("ab", "cd", "e")])
    return tmp_path


def options(folder, *more: str) -> list[str]:
    common = "--model", str(folder / "target"), "--prompts", str(folder / "words.jsonl"), "--max-new-tokens", "8"
    return [*common, *more]


def lines_of(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {name: cells for name, *cells in rows if name != "chain"}


@pytest.mark.parametrize(("small", "called"), [("head", "head"), ("draft", "tiny")])
def test_a_row_for_every_chain(bench, folder, small, called, capsys):
    assert bench.main(options(folder, "--small", str(folder / small), "--batch-size", "2")) == 0
    found = lines_of(capsys.readouterr().out)
    assert list(found) == ["QSpec", called, f"{called}, tree", f"QSpec, {called}", f"QSpec, {called}, tree"]
    for cells in found.values():
        assert cells[-1] == "0"
        assert float(cells[0]) >= 1
        assert 0 <= float(cells[1]) <= 1
        shares = [float(cell) for cell in cells[3:-1] if cell]
        assert shares == sorted(shares, reverse=True)


def test_nothing_stands_below_a_head_and_chains_may_be_named(bench, folder, capsys):
    given = "--small", str(folder / "head"), "--part", "order", "--chain", "mine=small:2:3,2", "--count", "1"
    assert bench.main(options(folder, *given)) == 0
    assert list(lines_of(capsys.readouterr().out)) == ["own", "head", "own, head", "own, lookups", "mine"]


def test_a_head_of_specforge_is_one(bench, folder):
    write_head(folder / "forge", tiny(seed=2, dtype=torch.bfloat16), layout="specforge")
    args = bench.parse(options(folder, "--small", str(folder / "forge"), "--part", "order"))
    assert [chain.name for chain in args.chains["order"]] == ["own", "head", "own, head", "own, lookups"]


def test_tokens_that_differ_are_counted(bench, folder, monkeypatch, capsys):
    own = bench.answer

    def answer(model, rows, chain, args):
        answers, *rest = own(model, rows, chain, args)
        if chain is not None:
            answers = {number: [*tokens[:-1], tokens[-1] + 1] for number, tokens in answers.items()}
        return answers, *rest

    monkeypatch.setattr(bench, "answer", answer)
    given = "--small", str(folder / "draft"), "--chain", "mine=small:2"
    assert bench.main(options(folder, *given)) == 0
    assert lines_of(capsys.readouterr().out)["mine"][-1] == "3"


@pytest.mark.parametrize(
    ("text", "words"),
    [("x=small", "a chain is LEVEL"), ("x=own+small:3", "2 levels, and 1 lengths"), ("x=small:a", "invalid literal")],
)
def test_what_is_no_chain_is_refused(bench, folder, text, words, capsys):
    with pytest.raises(SystemExit):
        bench.main(options(folder, "--small", str(folder / "head"), "--chain", text))
    assert words in capsys.readouterr().err
