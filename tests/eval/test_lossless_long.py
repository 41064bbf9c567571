"""Does eval/lossless cut texts of one length, decode them as a stream, compare caches, and find what differs?"""

from __future__ import annotations

import json

import pytest
import torch
from programs import needs_plans, program, run_plan, write_words
from transformers import AutoTokenizer

pytestmark = needs_plans
PLAN = """
name = "long"
target = "{models}"
dtype = "float32"
max_new_tokens = 6
batch_sizes = [1, 2]
chains = [["prompt_lookup"]]
[speculation]
num_draft_tokens = 2
[[data]]
name = "texts"
file = "{data}/words.jsonl"
count = 3
tokens = 20
[[data]]
name = "a stream"
file = "{data}/words.jsonl"
count = 3
tokens = 20
shared = 12
stream = true
"""


@pytest.fixture
def lossless(tmp_path, saved_model, from_the_root, capsys):
    """Runs the program on 60 letters: -> its exit status, its lines, what it prints."""
    write_words(tmp_path, [{"prompt": "abcdefghi " * 3}, {"prompt": "klmnopqrs" * 3 + "!"}])

    def run(*options: str):
        (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
        status, found = run_plan("lossless", tmp_path, saved_model, "--device", "cpu", *options)
        return status, found, capsys.readouterr().out

    run.results = tmp_path / "results"
    return run


def test_texts_are_pieces_of_the_file_none_twice(saved_model):
    tokenizer, texts_of = AutoTokenizer.from_pretrained(saved_model), program("lossless.contexts").texts_of
    prompts = ["abcdefgh", "ijklmnop", "qrst"]  # joined by two new lines: 24 letters of a token each
    whole = "\n\n".join(prompts)
    assert texts_of(prompts, tokenizer, 8, 9) == [whole[:8], whole[8:16], whole[16:]]
    assert texts_of(prompts, tokenizer, 9, 9) == [whole[:9], whole[9:18]]
    assert texts_of(prompts, tokenizer, 8, 2) == [whole[:8], whole[8:16]]
    assert texts_of(prompts, tokenizer, 12, 9, 4) == ["abcd" + whole[4:12], "abcd" + whole[12:20]]


def test_batches_and_streams_are_compared(lossless):
    status, found, _ = lossless()
    assert status == 0
    assert [(line["data"], line["batch_size"], line["prompts"], line["tokens_compared"]) for line in found] == [
        *(("texts", 1, 1, 6),) * 3, ("a stream", 1, 3, 18),
        ("texts", 2, 2, 12), ("texts", 2, 1, 6), ("a stream", 2, 3, 18)]
    assert all(line["asked"]["speculation"] == {"num_draft_tokens": 2} for line in found)
    assert all(line["speculation"]["new_tokens"] for line in found)
    assert "| prompt_lookup | a stream | 2 | 3 | 18 | 0 | 0 |" in lossless("--report")[2]


def test_a_stream_that_differs_is_told(lossless):
    lossless()
    file = next(lossless.results.glob("*.jsonl"))
    known = next(line for line in map(json.loads, file.read_text().splitlines()) if line["data"] == "a stream")
    known["reference_ids"][1][2] ^= 1
    file.write_text(json.dumps(known) + "\n")  # the rest is decoded again, the stream of two slots against a wrong id
    status, found, printed = lossless()
    assert status == 1
    assert [(line["data"], line["batch_size"]) for line in found if line["differences"]] == [("a stream", 2)]
    (difference,) = found[-1]["differences"]
    assert (difference["prompt"], difference["position"]) == (1, 2)
    assert "Unit(data='a stream'" in printed
    assert "prompt 1, new token 2: alone" in lossless("--report")[2]


def test_more_texts_than_there_are(lossless, monkeypatch):
    more = PLAN.replace("count = 3\ntokens = 20\nshared", "count = 9\ntokens = 20\nshared")
    monkeypatch.setitem(globals(), "PLAN", more)
    with pytest.raises(SystemExit, match="holds 6 prompts, the plan asks for 9"):
        lossless()


def test_caches_of_prompts_are_those_of_prompts_alone(lossless, monkeypatch):
    status, _, printed = lossless("--caches")
    assert status == 0
    rows = [line for line in printed.splitlines() if "| texts |" in line]
    assert len(rows) == 2 * 2  # the target alone and the chain, one prompt or two at a time
    assert all(row.split(" | ")[-1] == "0 |" for row in rows)
    main = program("lossless")
    own = main.caches

    def wrong(model, rows, batch_size, levels, settings):
        for states in own(model, rows, batch_size, levels, settings):
            if batch_size == 2:
                states[1][0, 3, 0] = torch.nextafter(states[1][0, 3, 0], torch.tensor(9.0))
            yield states

    monkeypatch.setattr(main, "caches", wrong)
    status, _, printed = lossless("--caches")
    assert status == 1
    assert [row.split(" | ")[-1] for row in printed.splitlines() if "| texts | 2 |" in row] == ["3 |", "3 |"]
