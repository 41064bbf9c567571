"""What does a line of a batch ask for, which lines does a file hold, and which are told apart as none?"""

from __future__ import annotations

import datetime
import json

import pytest
from datasets import Dataset

from hf_mlspec.batch.lines import CHAT, COMPLETION, BadLine, answered, read_line, unanswered
from hf_mlspec.batch.source import Source

HELLO = [{"role": "user", "content": "hello"}]
READ = {
    "a prompt": ({"prompt": "a", "max_tokens": 3}, COMPLETION, {"prompt": "a", "max_tokens": 3}, ()),
    "a chat": ({"messages": HELLO}, CHAT, {"messages": HELLO}, ()),
    "a prompt with more": ({"prompt": "a", "task_id": 3, "answer": "b"}, COMPLETION, {"prompt": "a"},
                           ("answer", "task_id")),
    "OpenAI's": ({"custom_id": "x", "method": "POST", "url": CHAT, "body": {"messages": HELLO, "top_p": 0.5}}, CHAT,
                 {"messages": HELLO, "top_p": 0.5}, ()),
    "without url": ({"body": {"messages": HELLO}}, CHAT, {"messages": HELLO}, ()),
    "a stream": ({"body": {"prompt": "a", "stream": True}}, COMPLETION, {"prompt": "a"}, ()),
}  # fmt: skip
BAD = {
    "no JSON": (b"{", "no JSON"), "deep": (b"[" * 100_000, "no JSON"), "bytes": (b"\xff", "no JSON"),
    "a list": (b"[1]", "a list, no JSON object"), "nothing": (b"{}", "it has nothing"),
    "something else": (b'{"text": "a"}', "it has text"),
    "custom_id": (b'{"custom_id": 3, "prompt": "a"}', "custom_id is 3"),
    "body": (b'{"body": "a"}', "body is a str"), "method": (b'{"method": "GET", "body": {}}', "method is 'GET'"),
    "url": (b'{"url": "/v1/embeddings", "body": {}}', "/v1/embeddings"),
    "beside": (b'{"max_tokens": 3, "body": {}}', "max_tokens beside body"),
}


@pytest.mark.parametrize(("found", "url", "body", "unread"), READ.values(), ids=READ)
def test_a_line_becomes_a_request(found, url, body, unread):
    line = read_line(7, json.dumps(found).encode(), seed=1)
    seed = line.body.pop("seed")
    assert (line.url, line.body, line.unread, line.custom_id) == (url, body, unread, found.get("custom_id"))
    assert 0 <= seed < 2**56


def test_a_seed_is_that_of_the_line_or_of_its_place():
    seeds = [read_line(number, b'{"prompt": "a"}', job).body["seed"] for number, job in ((1, 0), (2, 0), (1, 1))]
    assert len(set(seeds)) == 3
    assert read_line(1, b'{"prompt": "a"}', 0).body["seed"] == seeds[0]
    assert read_line(1, b'{"prompt": "a", "seed": 4}', 0).body["seed"] == 4


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_what_is_no_request_says_why(text, said):
    with pytest.raises(BadLine, match=said):
        read_line(1, text, 0)


def test_answers_have_the_fields_of_openais_batches():
    line = read_line(3, b'{"custom_id": "x", "prompt": "a"}', 0)
    told = answered(line, 200, {"choices": []})
    assert told == {"id": "batch_req_3", "custom_id": "x", "line": 3, "error": None,
                    "response": {"status_code": 200, "request_id": "line-3", "body": {"choices": []}}}
    failed = answered(line, 400, {"error": {"message": "m", "type": "t", "param": None, "code": None}})
    assert failed["error"] == {"code": "t", "message": "m"}
    assert failed["response"]["status_code"] == 400
    assert unanswered(3, BadLine("why"))["error"] == {"code": "invalid_line", "message": "why"}


def test_json_lines_keep_their_numbers(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n  \r\n{"prompt": "b"}\nnone\n{"prompt": "c"}')
    source = Source(str(file))
    assert source.count == 4
    pieces = list(source.pieces(3))
    assert [[number for number, _ in piece.lines] for piece in pieces] == [[1, 4, 5], [6]]
    assert [piece.index for piece in pieces] == [0, 1]
    assert json.loads(pieces[0].lines[0][1]) == {"prompt": "a"}


def test_rows_of_parquet_leave_columns_that_no_request_has(tmp_path):
    file = tmp_path / "in.parquet"
    Dataset.from_dict({
        "prompt": ["a", "b"], "max_tokens": [3, None], "when": [datetime.datetime(2026, 1, 1)] * 2,
        "custom_id": ["x", "y"],
    }).to_parquet(file)  # fmt: skip
    source = Source(str(file))
    lines = [json.loads(text) for piece in source.pieces(5) for _, text in piece.lines]
    assert source.count == 2
    assert lines == [{"prompt": "a", "max_tokens": 3, "custom_id": "x"}, {"prompt": "b", "custom_id": "y"}]


def test_chats_of_parquet_have_no_fields_of_other_rows(tmp_path):
    file = tmp_path / "in.parquet"
    Dataset.from_list([{"body": {"messages": HELLO, "seed": None}}, {"body": {"messages": HELLO, "seed": 3}}]
                      ).to_parquet(file)  # fmt: skip
    ((_, first), (_, second)) = next(iter(Source(str(file)).pieces(2))).lines
    assert json.loads(first) == {"body": {"messages": HELLO}}
    assert json.loads(second) == {"body": {"messages": HELLO, "seed": 3}}


@pytest.mark.parametrize(("name", "content", "said"), [
    ("in.jsonl", None, "cannot be read: No such file"), ("in.jsonl", b"\n \n", "holds no lines"),
    ("in.parquet", b"PAR1", "is no parquet file"),
])  # fmt: skip
def test_inputs_that_cannot_be_read_are_refused(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        Source(str(tmp_path / name))


def test_parquet_without_a_column_of_prompts_names_those_it_has(tmp_path):
    Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "in.parquet")
    with pytest.raises(ValueError, match="has the columns text"):
        Source(str(tmp_path / "in.parquet"))
