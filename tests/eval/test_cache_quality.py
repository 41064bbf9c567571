"""Does the program score every token of a text once, and hide and ask for the very line it counts?"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import torch
from programs import program

from hf_mlspec.evaluation import TokenScores


@pytest.fixture
def quality(from_the_root):
    return program("cache_quality")


def test_every_cache_is_scored(quality, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert quality.main(["--quick", "--contexts", "40", "64", "--threads", "1", "--json", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [line for line in lines if line["part"] == "perplexity"]
    assert [line["cache"] for line in texts] == ["as computed", "int8", "int4"]
    assert texts[0]["perplexity"] > 1
    assert 0 < abs(texts[1]["change"]) < abs(texts[2]["change"]) < 0.5
    found = [line for line in lines if line["part"] == "retrieval"]
    assert len(found) == 2 * 2 * 3  # contexts, depths, caches
    assert {line["difference"] for line in found if line["cache"] == "as computed"} == {0.0}
    for cache in ("int8", "int4"):
        assert any(line["difference"] for line in found if line["cache"] == cache)


@pytest.mark.parametrize("tokens", [2, 9, 10, 11, 15, 16, 47])
def test_every_token_but_the_first_is_scored_once(quality, tokens):
    ids = list(range(tokens))
    rows, scored = quality.windows(ids, 10)
    assert [token for row, count in zip(rows, scored, strict=True) for token in row[-count:]] == ids[1:]
    assert all(count < len(row) <= 10 for row, count in zip(rows, scored, strict=True))


def test_a_row_ends_with_what_its_line_says(quality):
    def encode(text, add_special_tokens):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    needles = quality.Needles(encode, [ord(letter) for letter in "xyz " * 200], seed=3)
    for depth in (0.0, 0.5, 1.0):
        row, count = needles.row(300, depth)
        text = "".join(map(chr, row))
        assert len(row) == 300
        name, _, digits = text[text.rindex("assert ") + 7 :].partition(' == "')
        assert len(digits) == count == 5
        assert text.count(f'\n{name} = "{digits}"\n') == 1
        assert abs(text.index(f"\n{name} = ") - depth * 250) < 30
    assert needles.row(300, 0.0) != needles.row(300, 0.0)


def test_found_and_differences_are_those_of_a_place(quality):
    rng = random.Random(0)
    greedy = [torch.tensor([number % 2 == 0]) for number in range(4)]
    scores = {cache: [TokenScores(torch.tensor([rng.random()]), one) for one in greedy] for cache in quality.CACHES}
    args = SimpleNamespace(contexts=[50, 60], depths=[0.0], lines_asked=2)
    lines = quality.retrieval(scores, args)
    assert [(line["context"], line["cache"], line["found"]) for line in lines] == [
        (context, cache, 1) for context in (50, 60) for cache in quality.CACHES
    ]
    off = [scores["int8"][i].total - scores["as computed"][i].total for i in (2, 3)]
    assert lines[4]["difference"] == pytest.approx(sum(off) / 2)
    assert lines[4]["largest_difference"] == pytest.approx(max(map(abs, off)))


@pytest.mark.parametrize(("argv", "said"), [
    (["--contexts", "20"], "--contexts are at least 40"), (["--depths", "1.5"], "--depths are shares"),
    (["--lines-asked", "0"], "--lines-asked 1"),
])  # fmt: skip
def test_bad_options(quality, capsys, argv, said):
    with pytest.raises(SystemExit):
        quality.parse(argv)
    assert said in capsys.readouterr().err
